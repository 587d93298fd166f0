"""Linears with a correction of low rank beside them, as LoRA adapters are run."""

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def adapt(module: nn.Module, b: Tensor, a: Tensor) -> RemovableHandle:
    """From now on a module's output [..., out] for an input x [..., in] is more by (x a^T) b^T.

    b [out, rank] and a [rank, in] are on the module's device. The result's `remove` takes it off again.
    """

    def hook(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        x: Tensor = args[0]
        return out + (x @ a.T.to(x.dtype)) @ b.T.to(x.dtype)

    return module.register_forward_hook(hook)
