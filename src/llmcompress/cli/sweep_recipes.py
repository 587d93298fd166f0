"""The recipes of a sweep: one recipe with other methods, bits and group sizes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

from llmcompress.api.presets import PRESETS, Preset
from llmcompress.errors import RecipeError
from llmcompress.grids.ggml import gguf_types
from llmcompress.methods.base import Method
from llmcompress.recipe import Recipe, build, methods
from llmcompress.registry import suggest

Item = TypeVar("Item")
_PRESETS = {name: preset for name, preset in PRESETS.items() if preset.method is not None}


@dataclass(frozen=True)
class Variant:
    """A run of a sweep, called after what it has of its own."""

    name: str
    method: str
    recipe: Recipe


def variants(
    recipe: Recipe, names: Sequence[str] | None, bits: Sequence[int] | None, group_sizes: Sequence[int] | None
) -> list[Variant]:
    """All combinations, in the order of the lists; what has none stays as the recipe says.

    A method takes the place of the recipe's quantising step, with the options it shares with it; a preset, such as awq,
    that of all steps but one that prunes. RecipeError for what a recipe, a method or a preset has no place for.
    """
    step = recipe.method
    if step is None:
        raise RecipeError("the recipe has no quantising step to change", "add one, such as {method: gptq, bits: 4}")
    if names is None and bits is None and group_sizes is None:
        raise RecipeError("nothing is swept", "give --method, --bits or --group-size a list")
    types = gguf_types(step)
    if types is not None and (bits is not None or group_sizes is not None):
        raise RecipeError(
            f"the recipe has types of GGUF ({types.type}), which bring their bits and groups along",
            "sweep --method alone, or take a recipe with bits",
        )
    found = []
    widths: Sequence[int | None] = bits or [None]
    sizes: Sequence[int | None] = group_sizes or [None]
    for method, width, size in product(names or [step.name], widths, sizes):
        changes = {key: value for key, value in (("bits", width), ("group_size", size)) if value is not None}
        name = "-".join((method, *(_LABELS[key](value) for key, value in changes.items())))
        found.append(Variant(name, method, _changed(recipe, step, method, changes)))
    return found


_LABELS: dict[str, Callable[[int], str]] = {
    "bits": lambda bits: f"w{bits}",
    "group_size": lambda size: "row" if size == -1 else f"g{size}",
}


def _changed(recipe: Recipe, step: Method, name: str, changes: dict[str, Any]) -> Recipe:
    if name in _PRESETS:
        return _preset(recipe, step, _PRESETS[name], changes)
    known = methods()
    if name not in known:
        raise RecipeError(f"--method {name!r} is not known", suggest(name, [*known, *_PRESETS]))
    kind = known[name]
    shared = {key: value for key, value in step.model_dump(exclude_unset=True).items() if key in kind.model_fields}
    new = build(kind, {**shared, **changes}, name)
    steps = tuple(new if item is step else item for item in recipe.steps)
    return recipe.model_copy(update={"steps": steps, "expected": None})


def _preset(recipe: Recipe, step: Method, preset: Preset, changes: dict[str, Any]) -> Recipe:
    fixed = [key for key in changes if key not in preset.offered]
    if fixed:
        raise RecipeError(f"{preset.name} has its own {fixed[0].replace('_', ' ')}", f"sweep {preset.name} apart")
    said = step.model_dump(exclude_unset=True)
    shared: dict[str, Any] = {key: said[key] for key in ("bits", "group_size") if key in said and key in preset.offered}
    *scalings, method = preset.steps({**shared, **changes})
    pruner = () if recipe.pruner is None else (recipe.pruner,)
    steps = (*scalings, *pruner, method.model_copy(update={"set": step.set}))
    return recipe.model_copy(update={"steps": steps, "expected": None})


def listed(option: str, text: str | None, read: Callable[[str], Item]) -> list[Item] | None:
    """The values of a list such as `3,4,5`; RecipeError for one that is empty, repeats itself, or has another kind."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    try:
        found = [read(part) for part in parts]
        if not all(parts):
            raise ValueError
    except ValueError:
        raise RecipeError(
            f"{option} {text!r} is not a list", f"write values with commas, such as {option} 3,4"
        ) from None
    if len(set(found)) < len(found):
        raise RecipeError(f"{option} {text!r} names something twice", "leave one of them out")
    return found
