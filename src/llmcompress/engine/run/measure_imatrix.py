"""Measuring an importance matrix: every layer of the original model is run once over all windows."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmcompress.engine.plan.resources import usual_resources
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.process.process_memory import keep_freed_memory, return_freed_memory
from llmcompress.engine.run.collect import outputs_with_energy
from llmcompress.engine.run.forward import Forward, Stream
from llmcompress.engine.run.installed import has_module
from llmcompress.engine.run.opened_model import check_model, opened_model
from llmcompress.engine.run.overflow import refuse_overflow
from llmcompress.engine.run.tokens import tokens_for
from llmcompress.engine.source.adapting import with_adapter
from llmcompress.engine.source.matrix_refs import Matrices, matrices_of
from llmcompress.engine.source.open import directory_headers, open_checkpoint
from llmcompress.engine.source.stacked import unstacked_headers
from llmcompress.errors import RunError
from llmcompress.formats.gguf.imatrix import Imatrix, ImatrixEntry, numbered
from llmcompress.formats.gguf.names import gguf_tensors
from llmcompress.ledger import Ledger
from llmcompress.recipe import Calibration
from llmcompress.stats.energy import Energy
from llmcompress.store.folder import Folder
from llmcompress.store.headers import ModelHeaders
from llmcompress.store.windows import write_windows
from llmcompress.workers import SERIAL


@dataclass(frozen=True)
class _Row:
    """A matrix of a layer: its module path, the space it reads, and its own row of an entry's sums and counts."""

    path: str
    module: str
    space: str
    routed: bool
    entry: ImatrixEntry
    number: int


def measure_imatrix(
    model: Path,
    text: Calibration,
    scratch: Folder,
    options: Options,
    ledger: Ledger,
    watch: Callable[[int, int], None] = lambda done, of: None,
) -> Imatrix:
    """The importance matrix of a model directory on the windows that `text` asks for.

    For every matrix of a layer it holds the sum over tokens of its squared input, under GGUF's names; for the matrix of
    an expert, over the tokens that were routed to the expert. The numbers are the same for any number of threads.
    scratch: for hidden states meanwhile. watch: called after each layer with the numbers of layers done
    and of all layers. Raises LlmcompressError.
    """
    headers = unstacked_headers(directory_headers(model, ledger), Ledger())
    matrices = matrices_of(headers, options.trust_remote_code, ledger)
    if options.adapter is not None:
        headers = with_adapter(headers, matrices, options.adapter, ledger)
    entries, layers = _rows(headers, matrices)
    resources = usual_resources(options, text.length)
    check_model(headers, matrices.spec, options, resources.dtype)
    tokens = tokens_for(text, model, resources.dtype, options.trust_remote_code)
    streamed = opened_model(open_checkpoint(headers), matrices.spec, resources.dtype, options)
    keep_freed_memory()
    with SERIAL.with_threads(resources.threads) as workers:
        with streamed.outer(embed=True, head=False):
            streamed.prepare(tokens[:1])
            hidden = write_windows(streamed.embedded(tokens, resources.batch), scratch / "0.bin", streamed.dtype)
        for number, rows in enumerate(layers):
            return_freed_memory()
            found: dict[str, Energy] = {}
            with streamed.layer(number) as layer:
                forward = Forward(streamed, number, Stream("original", layer, hidden), resources.batch, workers)
                hidden = write_windows(
                    outputs_with_energy(forward, {r.space: r.path for r in rows if has_module(layer, r.path)}, found),
                    scratch / f"{(number + 1) % 2}.bin",
                    streamed.dtype,
                )
            for row in rows:
                if row.space in found:
                    refuse_overflow(row.module, [found[row.space]], streamed.dtype, row.routed)
            _fill(rows, found, ledger)
            watch(number + 1, len(layers))
    for name, entry in entries.items():
        unseen = np.flatnonzero(entry.counts == 0).tolist()
        if unseen:
            ledger.note("importance", name, f"no token came to {numbered(unseen, len(entry.counts))}")
    return Imatrix(entries, (Path(text.source).resolve().name,), tokens.shape[0], tokens.shape[1])


def _rows(headers: ModelHeaders, matrices: Matrices) -> tuple[dict[str, ImatrixEntry], list[list[_Row]]]:
    """Empty entries by GGUF name, and for each layer which matrix fills which row of which entry."""
    entries: dict[str, ImatrixEntry] = {}
    places: dict[str, tuple[ImatrixEntry, int]] = {}
    for tensor in gguf_tensors(headers.config, [(name, item.spec.shape) for name, item in headers.tensors.items()]):
        widths = [matrices.widths.get(name.removesuffix(".weight")) for name in tensor.sources]
        if widths and widths[0] is not None and tensor.name.endswith(".weight"):
            count = tensor.shape[0] if len(tensor.shape) > 2 else 1
            entry = ImatrixEntry(np.zeros((count, widths[0]), np.float32), np.zeros(count, np.float32))
            entries[tensor.name] = entry
            places |= {name: (entry, number * count // len(widths)) for number, name in enumerate(tensor.sources)}
    layers: list[list[_Row]] = [[] for _ in range(1 + max(ref.layer for ref in matrices.refs))]
    for ref in matrices.refs:
        place = places[f"{ref.module}.weight"]
        layers[ref.layer].append(_Row(ref.path, ref.module, ref.space, ref.expert is not None, *place))
    return entries, layers


def _fill(rows: list[_Row], found: dict[str, Energy], ledger: Ledger) -> None:
    """Copy the energies of a layer's spaces into the entries."""
    for row in rows:
        part = found.get(row.space)
        if part is None and not row.routed:
            raise RunError(f"a layer never reached {row.space}", "its declaration has another order")
        if part is None:
            continue
        if part.dropped:
            ledger.note("nonfinite_inputs", row.module, f"{part.dropped} tokens left out of its statistics")
        row.entry.sum2[row.number] = part.sums.numpy()
        row.entry.counts[row.number] = part.tokens
