"""Sources of runs: a model directory, quantised or not, the language model inside one, or a GGUF file."""

from pathlib import Path
from typing import Any

from torch import nn

from llmcompress.engine.source.gguf_input import GgufCheckpoint, GgufHeaders, gguf_headers
from llmcompress.engine.source.multimodal import text_part, text_view
from llmcompress.engine.source.quantised import DecodedCheckpoint, DecodedHeaders, decoded_headers, in_own_type
from llmcompress.ledger import Ledger
from llmcompress.model.rounded import round_inputs
from llmcompress.model.skeleton import load_config
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.folds import FoldedCheckpoint
from llmcompress.store.headers import ModelHeaders, read_headers
from llmcompress.store.output_file import is_single


def source_headers(path: Path, ledger: Ledger) -> ModelHeaders:
    """The headers of the model at `path` as if it were an original language model: codes count as float32 tensors.

    CheckpointError for a damaged model, and for a format that is not known here.
    """
    if is_single(path) and path.is_file():
        return gguf_headers(path)
    return directory_headers(path, ledger)


def directory_headers(path: Path, ledger: Ledger) -> ModelHeaders:
    """The same as `source_headers`, for a directory."""
    return decoded_headers(text_part(read_headers(path), ledger))


def checkpoint_headers(path: Path) -> ModelHeaders:
    """The headers of a directory as if it had never been quantised, every matrix in the model's own type.

    Of a multimodal model the config is that of its language model. CheckpointError for a damaged model; a format that
    is not known here stays as it is.
    """
    return in_own_type(decoded_headers(text_view(read_headers(path))))


def config_of(headers: ModelHeaders, trust_remote_code: bool) -> Any:
    """The transformers config of the model that the headers describe: of the whole where all its tensors are there."""
    config = load_config(headers.path, trust_remote_code)
    whole = headers.wrapper is not None or config.model_type == headers.config.get("model_type")
    return config if whole else config.get_text_config()


def open_checkpoint(headers: ModelHeaders) -> Checkpoint:
    """A reader of the tensors that the headers describe."""
    base = _opened(headers)
    if headers.merged is None:
        return base
    checkpoint = FoldedCheckpoint(base)
    checkpoint.fold(headers.merged.changes)
    return checkpoint


def _opened(headers: ModelHeaders) -> Checkpoint:
    if isinstance(headers, DecodedHeaders):
        return DecodedCheckpoint(headers)
    if isinstance(headers, GgufHeaders):
        return GgufCheckpoint(headers)
    return Checkpoint(headers)


def round_as_stored(model: StreamedModel, checkpoint: Checkpoint) -> None:
    """Make the linears of a model round their inputs, where the checkpoint says so."""
    for number, layer in enumerate(model.layers):
        for name, module in linears_of(layer):
            grid = checkpoint.inputs(disk_module(model, number, name))
            if grid is not None:
                round_inputs(module, grid.to(model.device))


def linears_of(layer: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The linears of a layer, each with its module path below the layer."""
    return [(name, module) for name, module in layer.named_modules() if isinstance(module, nn.Linear)]


def disk_module(model: StreamedModel, number: int, name: str) -> str:
    """The on-disk module of the linear at path `name` of layer `number`."""
    return model.disk_name(number, f"{name}.weight").removesuffix(".weight")
