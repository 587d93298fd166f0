"""Whatever we write, and originals, back into something that runs on the CPU, without other projects' runtimes."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmcompress.arch import find
from llmcompress.arch.spec import ArchSpec
from llmcompress.engine.fits import check_numbers
from llmcompress.errors import CheckpointError
from llmcompress.formats.base import Format
from llmcompress.grids.coded import Coded
from llmcompress.model.build import StreamedModel, Weights
from llmcompress.model.observe import observe
from llmcompress.model.skeleton import load_config
from llmcompress.model.whole import whole_model
from llmcompress.recipe import formats
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.gguf_model import read_gguf
from llmcompress.validate.gguf_file import gguf_in
from llmcompress.validate.gguf_source import GgufWeights
from llmcompress.validate.packed import PackedLinear


class DecodedWeights:
    """A checkpoint as if it had never been quantised: the weight of a packed module is decoded when it is read."""

    def __init__(self, checkpoint: Checkpoint, spec: ArchSpec) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.headers.config
        self.format = _format_of(checkpoint)
        self._transposed = tuple(f".{linear.path}" for linear in spec.linears if linear.conv1d)

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint or self._packed(name)

    def _packed(self, name: str) -> bool:
        if self.format is None or not name.endswith(".weight"):
            return False
        return f"{name.removesuffix('.weight')}.{self.format.marker}" in self.checkpoint

    def coded(self, module: str) -> Coded | None:
        """Codes of a quantised module, None for any other."""
        if self.format is None or not self._packed(f"{module}.weight"):
            return None
        return self.format.decode(module, self._part, self.config)

    def _part(self, name: str) -> Tensor:
        """A tensor of a packed module; KeyError tells a format that it has none of that name."""
        if name not in self.checkpoint:
            raise KeyError(name)
        return self.checkpoint.read(name)

    def read(self, name: str) -> Tensor:
        module = name.removesuffix(".weight")
        coded = self.coded(module) if name.endswith(".weight") else None
        if coded is None:
            return self.checkpoint.read(name)
        value = coded.decode()
        return value.T.contiguous() if module.endswith(self._transposed or ("\0",)) else value


def open_streamed(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | None = None,
    trust_remote_code: bool = False,
    source: Path | None = None,
) -> StreamedModel:
    """A directory or a GGUF file as a model run section by section.

    source: the directory that a GGUF file was made from, which has the config that the file lacks.
    """
    file = gguf_in(path)
    if file is not None and source is None:
        raise CheckpointError(f"{path} is a GGUF file, without config.json", "give the model it was made from: --ref")
    directory = path if file is None or source is None else source
    checkpoint = Checkpoint(directory)
    check_numbers(checkpoint.headers)
    config = load_config(directory, trust_remote_code)
    spec = find(str(checkpoint.headers.config.get("model_type"))) or observe(config, trust_remote_code)
    weights: Weights = DecodedWeights(checkpoint, spec) if file is None else GgufWeights(read_gguf(file), checkpoint)
    return StreamedModel(weights, config, spec, dtype=dtype, device=device, trust_remote_code=trust_remote_code)


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
    modules: list[tuple[str, str]] = []
    for number, layer in enumerate(streamed.layers):
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                runtime = f"{spec.layers}.{number}.{name}"
                modules.append((runtime, streamed.disk_name(number, f"{name}.weight").removesuffix(".weight")))
    causal = whole_model(streamed)
    if packed and isinstance(weights, DecodedWeights):
        for runtime, disk in modules:
            coded = weights.coded(disk)
            if coded is not None:
                parent, _, leaf = runtime.rpartition(".")
                before: Any = causal.get_submodule(runtime)
                setattr(causal.get_submodule(parent), leaf, PackedLinear(coded, before.bias, dtype))
    return causal


def _format_of(checkpoint: Checkpoint) -> Format | None:
    config = checkpoint.headers.config
    if "quantization_config" not in config:
        return None
    for item in formats().values():
        if item.recognises(config):
            return item  # type: ignore[no-any-return]
    raise CheckpointError(
        f"{checkpoint.path} is quantised in a format that is not known here", "see `llmcompress list formats`"
    )
