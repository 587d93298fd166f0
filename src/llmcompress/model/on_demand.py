"""Linears whose weight is read anew for every product, since those of a layer do not fit into memory together."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import linear


def read_on_demand(module: nn.Linear, read: Callable[[], Tensor]) -> None:
    """Let a module multiply by what `read` returns, the weight [out, in], instead of by a weight of its own."""

    def forward(x: Tensor) -> Tensor:  # no partial object, which a copy of the module would copy with all it refers to
        return linear(x, read(), module.bias)

    module.forward = forward  # type: ignore[method-assign, assignment]


def hold_own_weight(module: nn.Module) -> None:
    """Undo `read_on_demand`."""
    module.__dict__.pop("forward", None)
