"""Loading our outputs and original checkpoints as models that run, without other projects' runtimes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmcompress.engine.source.adapting import as_merged
from llmcompress.engine.source.gguf_weights import GgufWeights
from llmcompress.engine.source.header_checks import check_numbers
from llmcompress.engine.source.matrix_refs import described
from llmcompress.engine.source.multimodal import text_part, text_view
from llmcompress.engine.source.open import config_of, disk_module, linears_of, open_checkpoint, round_as_stored
from llmcompress.engine.source.quantised import decoded_headers
from llmcompress.errors import CheckpointError
from llmcompress.grids.coded import Coded
from llmcompress.grids.inputs import Rounding
from llmcompress.kernels.joined import join
from llmcompress.ledger import Ledger
from llmcompress.model.streamed_model import StreamedModel, Weights
from llmcompress.model.whole import whole_model
from llmcompress.store.gguf_model import read_gguf
from llmcompress.store.headers import read_headers
from llmcompress.validate.gguf_file import gguf_in
from llmcompress.validate.packed import PackedLinear

MakeLinear = Callable[[Coded, Tensor | None, torch.dtype, Rounding | None], nn.Module]
"""Makes a linear of its codes, its bias, the type it computes in and how its inputs are rounded."""


def open_streamed(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | None = None,
    trust_remote_code: bool = False,
    source: Path | None = None,
    adapter: Path | None = None,
) -> StreamedModel:
    """Open a directory or GGUF file as a model run section by section, its inputs rounded as the checkpoint declares.

    source: the directory that a GGUF file was made from, for the config that the file lacks. adapter: merged into the
    weights of a directory while they are read.
    """
    file = gguf_in(path)
    if file is not None and source is None:
        raise CheckpointError(f"{path} is a GGUF file, without config.json", "give the model it was made from: --ref")
    directory = path if file is None or source is None else source
    ledger = Ledger()
    stored = text_view(read_headers(directory)) if file is None else text_part(read_headers(directory), ledger)
    check_numbers(stored)
    spec, _ = described(decoded_headers(stored), trust_remote_code, ledger)
    headers = as_merged(decoded_headers(stored, spec), adapter)
    if headers is stored and "quantization_config" in stored.config:
        raise CheckpointError(
            f"{directory} is quantised in a format that is not known here", "see `llmcompress list formats`"
        )
    checkpoint = open_checkpoint(headers)
    weights: Weights = checkpoint if file is None else GgufWeights(read_gguf(file), checkpoint)
    config = config_of(stored, trust_remote_code)
    model = StreamedModel(weights, config, spec, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    if file is None:
        round_as_stored(model, checkpoint)
    return model


def load_whole(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | None = None,
    linear: MakeLinear | None = PackedLinear,
    trust_remote_code: bool = False,
    source: Path | None = None,
    adapter: Path | None = None,
    prepare: Callable[[StreamedModel], object] | None = None,
) -> nn.Module:
    """Load a directory or GGUF file as a whole transformers model in memory.

    linear: makes a linear on `device` from stored codes without decoding the whole weight; None decodes the weights.
    The bias that `linear` is given has no memory yet. source, adapter: as in `open_streamed`.
    prepare: what is done to the model before its weights are read.
    """
    opening = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    streamed = open_streamed(path, **opening, source=source, adapter=adapter)  # type: ignore[arg-type]
    if prepare is not None:
        prepare(streamed)
    if linear is not None:
        _pack(streamed, linear)
    return whole_model(streamed)


def refuse_other_vocabulary(model: Path, config: Any, ref: Path, original: Any) -> None:
    """CheckpointError if the configs of two models declare different vocabularies."""
    size, wanted = config.get_text_config().vocab_size, original.get_text_config().vocab_size
    if size != wanted:
        raise CheckpointError(
            f"{model} has {size} tokens, {ref} has {wanted}",
            "give the model that was compressed as --ref",
        )


def _pack(model: StreamedModel, linear: MakeLinear) -> None:
    """Replace each linear whose weight is stored as codes by a linear on codes."""
    weights: Any = model.weights
    spaces = {item.path: item.reads for item in model.spec.linears if not item.per_expert}
    for number, layer in enumerate(model.layers):
        readers: dict[str, list[nn.Module]] = {}
        for name, before in linears_of(layer):
            disk = disk_module(model, number, name)
            coded = weights.coded(disk)
            if coded is not None:
                parent, _, leaf = name.rpartition(".")
                made = linear(coded, before.bias, model.dtype, weights.inputs(disk))
                setattr(layer.get_submodule(parent), leaf, made)
                if name in spaces:
                    readers.setdefault(spaces[name], []).append(made)
        for linears in readers.values():
            join(linears)
