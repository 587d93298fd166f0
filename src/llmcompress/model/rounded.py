"""Linears whose inputs are rounded while the model runs."""

from typing import Any

import torch
from torch import nn

from llmcompress.grids.inputs import Rounding


def round_inputs(module: nn.Module, grid: Rounding) -> None:
    """Round a module's input [..., in] to the codes of `grid` in every call from now on, as an engine would.

    Gradients pass the rounding as if there were none.
    """

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        with torch.no_grad():
            rounded = grid.rounded(x.detach())
        return (x + (rounded - x).detach() if x.requires_grad else rounded, *args[1:])

    module.register_forward_pre_hook(hook)
