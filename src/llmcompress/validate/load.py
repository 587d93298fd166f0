"""Whatever we write, and originals, back into something that runs on the CPU, without other projects' runtimes."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from llmcompress.arch import find
from llmcompress.engine.decoded import decoded_headers
from llmcompress.engine.fits import check_numbers
from llmcompress.engine.source import config_of, disk_module, linears_of, open_checkpoint, round_as_stored
from llmcompress.engine.text_part import text_part
from llmcompress.errors import CheckpointError
from llmcompress.ledger import Ledger
from llmcompress.model.build import StreamedModel, Weights
from llmcompress.model.observe import observe
from llmcompress.model.whole import whole_model
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.gguf_model import read_gguf
from llmcompress.store.headers import read_headers
from llmcompress.validate.gguf_file import gguf_in
from llmcompress.validate.gguf_source import GgufWeights
from llmcompress.validate.packed import PackedLinear


def open_streamed(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | None = None,
    trust_remote_code: bool = False,
    source: Path | None = None,
) -> StreamedModel:
    """A directory or a GGUF file as a model run section by section, inputs rounded where the checkpoint says so.

    source: the directory that a GGUF file was made from, which has the config that the file lacks.
    """
    file = gguf_in(path)
    if file is not None and source is None:
        raise CheckpointError(f"{path} is a GGUF file, without config.json", "give the model it was made from: --ref")
    directory = path if file is None or source is None else source
    stored = text_part(read_headers(directory), Ledger())
    check_numbers(stored)
    config = config_of(stored, trust_remote_code)
    spec = find(str(stored.config.get("model_type"))) or observe(config, trust_remote_code)
    headers = decoded_headers(stored, spec)
    if headers is stored and "quantization_config" in stored.config:
        raise CheckpointError(
            f"{directory} is quantised in a format that is not known here", "see `llmcompress list formats`"
        )
    checkpoint = open_checkpoint(headers)
    weights: Weights = checkpoint if file is None else GgufWeights(read_gguf(file), checkpoint)
    model = StreamedModel(weights, config, spec, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    if file is None:
        round_as_stored(model, checkpoint)
    return model


def load_whole(
    path: Path,
    *,
    dtype: torch.dtype,
    packed: bool = True,
    trust_remote_code: bool = False,
    source: Path | None = None,
) -> nn.Module:
    """A directory or GGUF file as a whole transformers model in memory.

    packed: quantised linears of a directory stay packed. source: as of `open_streamed`.
    """
    streamed = open_streamed(path, dtype=dtype, trust_remote_code=trust_remote_code, source=source)
    weights, spec = streamed.weights, streamed.spec
    modules = [
        (f"{spec.layers}.{number}.{name}", disk_module(streamed, number, name))
        for number, layer in enumerate(streamed.layers)
        for name, _ in linears_of(layer)
    ]
    causal = whole_model(streamed)
    if packed and isinstance(weights, Checkpoint):
        for runtime, disk in modules:
            coded = weights.coded(disk)
            if coded is not None:
                parent, _, leaf = runtime.rpartition(".")
                before: Any = causal.get_submodule(runtime)
                linear = PackedLinear(coded, before.bias, dtype, weights.inputs(disk))
                setattr(causal.get_submodule(parent), leaf, linear)
    return causal
