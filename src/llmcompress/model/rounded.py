"""Linears whose inputs are rounded while the model runs."""

from typing import Any

from torch import nn

from llmcompress.grids.inputs import Rounding


def round_inputs(module: nn.Module, grid: Rounding) -> None:
    """From now on a module sees its input [..., in] rounded to the codes of `grid`, as an engine would."""

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (grid.rounded(args[0]), *args[1:])

    module.register_forward_pre_hook(hook)
