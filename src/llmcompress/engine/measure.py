"""From a plan to the losses of its tensors: windows of text, gradients on them, rounded samples."""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from llmcompress.engine.calibration import tokens_for
from llmcompress.engine.losses import Known, Losses, measured_losses
from llmcompress.engine.matrices import matrices_of
from llmcompress.engine.plan import Plan
from llmcompress.engine.ranks import device_of
from llmcompress.engine.resources import keep_freed_memory
from llmcompress.engine.sensitivity import EMBEDDING, HEAD, Found, fisher_information
from llmcompress.engine.source import config_of, open_checkpoint
from llmcompress.formats.gguf.imatrix import numbered
from llmcompress.formats.gguf.tensors import GGUFTensor
from llmcompress.ledger import Ledger
from llmcompress.model.build import StreamedModel
from llmcompress.parallel import threads
from llmcompress.store.files import existing, writing

SAMPLES = 16  # windows, of those that a recipe asks for: sums over thousands of weights need few


def measure(plan: Plan, tensors: Sequence[GGUFTensor], ledger: Ledger, watch: Callable[[int, int], None]) -> Losses:
    """Losses of a plan's matrices by every type, on the text of its recipe; layers run in float32.

    watch: told how many steps of all are done. Hidden states lie beside the work directory meanwhile.
    """
    options, text, source = plan.options, plan.recipe.calibration, plan.headers.path
    matrices = matrices_of(plan.headers, options.trust_remote_code, Ledger())
    places = {f"{module}.weight": (layer, path) for module, layer, _, path, _, _ in matrices.found}
    paths: list[list[str]] = [[] for _ in range(1 + max(layer for layer, _ in places.values()))]
    for layer, below in places.values():
        paths[layer].append(below)
    text = text.model_copy(update={"samples": min(text.samples, SAMPLES)})
    tokens = tokens_for(text, source, "float32", options.trust_remote_code)
    checkpoint, steps, of = open_checkpoint(plan.headers), count(1), 2 * len(paths) + 1 + len(tensors)
    model = StreamedModel(
        checkpoint,
        config_of(plan.headers, options.trust_remote_code),
        matrices.spec,
        dtype=torch.float32,
        device=device_of(options.device),
        trust_remote_code=options.trust_remote_code,
    )

    def step() -> None:
        watch(next(steps), of)

    keep_freed_memory()
    folder = existing(plan.work.resolve().parent)
    with writing(folder), TemporaryDirectory(prefix="gradients-", dir=folder) as scratch, threads(plan.means.threads):
        found = fisher_information(model, tokens, paths, text.seed, Path(scratch), step)
        known = _known(tensors, places, found, ledger)
        return measured_losses(tensors, known, checkpoint.read_finite, step)


def _known(
    tensors: Sequence[GGUFTensor], places: Mapping[str, tuple[int, str]], found: Found, ledger: Ledger
) -> dict[str, Known]:
    """Fisher information of the matrices of each tensor, as they are used."""
    tied = all(tensor.name != "output.weight" for tensor in tensors)
    outer: dict[str, Known] = {
        "token_embd.weight": [[found[EMBEDDING], found[HEAD]] if tied else [found[EMBEDDING]]],
        "output.weight": [[found[HEAD]]],
    }
    known: dict[str, Known] = {}
    for tensor in tensors:
        parts: Known = outer.get(tensor.name) or [
            [found[places[source]]] if places[source] in found else [] for source in tensor.sources
        ]
        unseen = [number for number, part in enumerate(parts) if not part]
        if unseen:
            ledger.note("budget", tensor.name, f"no token came to {numbered(unseen, len(parts))}")
        known[tensor.name] = parts
    return known
