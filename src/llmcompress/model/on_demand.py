"""Weights that are read when they are used: linears of a layer that does not fit into memory, and embeddings."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from llmcompress.store.checkpoint import StoredRows


def read_on_demand(module: nn.Linear, read: Callable[[], Tensor]) -> None:
    """Let a module multiply by what `read` returns, the weight [out, in], instead of by a weight of its own."""

    def forward(x: Tensor) -> Tensor:  # no partial object, which a copy of the module would copy with all it refers to
        return linear(x, read(), module.bias)

    module.forward = forward  # type: ignore[method-assign, assignment]


def hold_own_weight(module: nn.Module) -> None:
    """Undo `read_on_demand`."""
    module.__dict__.pop("forward", None)


_TOLD = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_meta", "requires_grad")}
_TOLD |= {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point}


class LookedUpRows(Tensor):
    """An embedding [tokens, hidden] that stays in its file: a lookup reads the rows of its tokens.

    Shape, type and device are those of the whole table. Whatever else it is used for reads all of it, each time.
    """

    _rows: StoredRows

    @classmethod
    def of(cls, rows: StoredRows, dtype: torch.dtype, device: torch.device) -> "LookedUpRows":
        """rows: of the table, in the type of the file. dtype: of the table."""
        made = torch.zeros((), dtype=dtype, device=device).expand(rows.shape).as_subclass(cls)
        made._rows = rows
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _TOLD:
                return func(*args, **kwargs)
            if func is embedding and isinstance(args[1], cls) and kwargs.get("max_norm") is None:
                ids, table = args
                numbers, places = ids.unique(return_inverse=True)
                return embedding(places, table._read(numbers.tolist()))
            return func(*map(_whole, args), **{name: _whole(value) for name, value in kwargs.items()})

    def _read(self, numbers: Sequence[int]) -> Tensor:
        return self._rows.read(numbers).to(self.device, self.dtype)


def _whole(value: Any) -> Any:
    """An argument of a function, or a list of them, with tables in place of what stands for them."""
    if isinstance(value, list | tuple):
        return type(value)(map(_whole, value))
    return value._read(range(value.shape[0])) if isinstance(value, LookedUpRows) else value
