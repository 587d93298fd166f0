"""Adding the corrections of a LoRA adapter, ours or another's, to a model."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from llmcompress.errors import CheckpointError
from llmcompress.model.adapted import adapt
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.store.adapter import Adapter
from llmcompress.store.headers import read_headers, read_json
from llmcompress.validate.gguf_file import gguf_in

_HINT = "an adapter serves only the model it was made for"


def adapt_streamed(model: StreamedModel, adapter: Path, path: Path) -> None:
    """`adapt_whole` for a model that runs section by section."""

    def find(name: str) -> nn.Module:
        number, _, below = name.removeprefix(f"{model.spec.layers}.").partition(".")
        return model.layers[int(number)].get_submodule(below)

    _adapt(find, adapter, path, model.device)


def adapt_whole(model: nn.Module, adapter: Path, path: Path, device: torch.device | None = None) -> None:
    """Make the linears of the model at `path` add the corrections of an adapter.

    CheckpointError if the adapter's report, module names or sizes are those of another model.
    """
    _adapt(model.get_submodule, adapter, path, device or torch.device("cpu"))


def _adapt(find: Callable[[str], nn.Module], adapter: Path, path: Path, device: torch.device) -> None:
    found = Adapter(adapter)
    if not found.plain:
        raise CheckpointError(
            f"adapter {adapter} has more than corrections of linears, and cannot run beside a model",
            "merge it: --adapter of the command that compresses",
        )
    _refuse_other_base(adapter, path)
    for item in found.corrections:
        try:
            module = find(item.module)
        except (AttributeError, IndexError, ValueError):
            raise CheckpointError(
                f"adapter {adapter} is of another model: {path} has no {item.module}", _HINT
            ) from None
        size, wanted = _size(module), found.shape(item)
        if size != wanted:
            raise CheckpointError(
                f"adapter {adapter} is of another model: {item.module} of {path} is not {wanted[0]} x {wanted[1]}",
                _HINT,
            )
        b, a = found.read(item)
        adapt(module, b.to(device), a.to(device))


def _size(module: nn.Module) -> tuple[int, int] | None:
    """Outputs and inputs of a linear; None for any other module."""
    rows = getattr(module, "out_features", getattr(module, "nf", None))  # nf, nx: of a Conv1D
    columns = getattr(module, "in_features", getattr(module, "nx", None))
    return (rows, columns) if isinstance(rows, int) and isinstance(columns, int) else None


def _refuse_other_base(adapter: Path, path: Path) -> None:
    """CheckpointError if the adapter has a report of ours that names other weights than those of `path`."""
    file = adapter / "report.json"
    base = read_json(file).get("base") if file.is_file() and gguf_in(path) is None else None
    stated = base.get("contents_sha256") if isinstance(base, dict) else None
    if stated is not None and stated != read_headers(path).contents:
        raise CheckpointError(
            f"adapter {adapter} is of another model: its report.json names other weights than {path}", _HINT
        )
