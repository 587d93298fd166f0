"""Where trained tensors are in a section of a model, and their gradients there."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from llmcompress.arch.spec import ArchSpec
from llmcompress.engine.train.trained import Trained


class TrainedPlace(NamedTuple):
    """Where a trained tensor is in a layer, or in what stands outside of the layers: a module path below it."""

    path: str
    name: str


def mark(section: nn.Module, places: Sequence[TrainedPlace]) -> None:
    """Let gradients reach the trained tensors of a section."""
    for place in places:
        weight_at(section, place).requires_grad_()


def weight_at(section: nn.Module, place: TrainedPlace) -> Tensor:
    """The tensor at a place of a section."""
    weight = section.get_submodule(place.path).weight
    assert isinstance(weight, Tensor)  # not a module
    return weight


def slopes_of(
    section: nn.Module,
    places: Sequence[TrainedPlace],
    trained: Mapping[str, Trained],
    hidden: Tensor,
    run: Callable[[Tensor], tuple[Tensor, Tensor | None]],
) -> tuple[dict[str, Tensor], Tensor]:
    """Slopes of the trained tensors of a section by name, those that a token reached, and the gradient at `hidden`.

    trained: by name. run: an output, and the gradient there.
    """
    held = [weight_at(section, place) for place in places]
    hidden = hidden.detach().requires_grad_()
    with torch.enable_grad():
        out, gradient = run(hidden)
        back, *found = torch.autograd.grad(out, [hidden, *held], gradient, allow_unused=True)
    slopes = {
        place.name: trained[place.name].slope(value.detach(), slope)
        for place, value, slope in zip(places, held, found, strict=True)
        if slope is not None
    }
    return slopes, back


def add_slopes(found: dict[str, Tensor], slopes: Mapping[str, Tensor]) -> None:
    """Add slopes to the sums in `found`, which may keep the tensors."""
    for name, slope in slopes.items():
        found[name] = found[name].add_(slope) if name in found else slope


def norms_of(section: nn.Module) -> Iterator[str]:
    """Paths of the norms of a section that have a gain for every channel."""
    for path, module in section.named_modules():
        weight = module._parameters.get("weight")
        if "Norm" in type(module).__name__ and weight is not None and weight.dim() == 1:
            yield path


def norm_offsets(spec: ArchSpec) -> dict[str, float]:
    """By module path of a declared norm, what its weight is smaller by than its gain."""
    norms = [*spec.norms, *([] if spec.final is None else [spec.final])]
    offsets = {norm.path: norm.offset for norm in norms}
    if spec.scores is not None:
        offsets |= dict.fromkeys(spec.scores.norms or (), spec.scores.offset)
    return offsets
