"""Linears with a correction of low rank beside them, as LoRA adapters are run."""

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def adapt(module: nn.Module, b: Tensor, a: Tensor) -> RemovableHandle:
    """Add (x a^T) b^T to a module's output [..., out] for an input x [..., in], in every call from now on.

    b [out, rank] and a [rank, in] are on the module's device. `remove` of the returned handle undoes the change.
    """

    def hook(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        x: Tensor = args[0]
        return out + (x @ a.T.to(x.dtype)) @ b.T.to(x.dtype)

    return module.register_forward_hook(hook)
