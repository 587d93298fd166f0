"""Codes of a matrix as the values of its module in a layer that runs."""

from collections.abc import Sequence

from torch import Tensor, nn

from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.errors import RunError
from llmcompress.formats.gguf.tensors import unmultiplied
from llmcompress.grids.coded import Coded
from llmcompress.grids.inputs import InputGrid
from llmcompress.model.on_demand import read_on_demand
from llmcompress.model.rounded import round_inputs


def install(layer: nn.Module, plan: MatrixPlan, coded: Coded) -> None:
    """Put decoded values into a layer and round its inputs, so that later matrices see what the file will hold.

    Nothing is done where no layer runs the matrix, as with keys of a layer that takes those of an earlier one.
    """
    if not has_module(layer, plan.path):
        return
    module = layer.get_submodule(plan.path)
    weight = module.weight
    assert isinstance(weight, Tensor)
    if weight.is_meta:
        assert isinstance(module, nn.Linear)
        read_on_demand(module, lambda: unmultiplied(coded.decode(), plan.factors).to(weight.dtype))
    else:
        # not in place: the layer as it was may still hold the memory
        weight.data = values_of(plan, coded.to(weight.device)).to(weight.dtype).contiguous()
    if plan.entry.inputs is not None:
        round_inputs(module, InputGrid(plan.entry.inputs, coded.input_scale).to(weight.device))


def has_module(layer: nn.Module, path: str) -> bool:
    """Whether a layer has a module of that path."""
    try:
        layer.get_submodule(path)
    except AttributeError:
        return False
    return True


def seen_at(layer: nn.Module, plans: Sequence[MatrixPlan]) -> str:
    """The path of a matrix that a layer runs, of those that read one input: where that input is seen.

    RunError where the layer runs none of them.
    """
    found = next((plan.path for plan in plans if has_module(layer, plan.path)), None)
    if found is None:
        raise RunError(
            f"{plans[0].module} is not run by its layer, and what it would read is seen at no other matrix",
            f"leave it out too: --set '{plans[0].module}: {{skip: true}}'",
        )
    return found


def values_of(plan: MatrixPlan, coded: Coded) -> Tensor:
    """The tensor of a module, float32, as the model has it."""
    value = unmultiplied(coded.decode(), plan.factors)
    return value.T if plan.conv1d else value
