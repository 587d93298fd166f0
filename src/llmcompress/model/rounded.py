"""Linears whose inputs are rounded while the model runs."""

from typing import Any

from torch import nn

from llmcompress.grids.inputs import Rounding


def round_inputs(module: nn.Module, grid: Rounding) -> None:
    """Round a module's input [..., in] to the codes of `grid` in every call from now on, as an engine would."""

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (grid.rounded(args[0]), *args[1:])

    module.register_forward_pre_hook(hook)
