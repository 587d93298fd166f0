"""Recipes from what a user names: a file, one that comes with llmcompress, plain data, or a method with its options."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcompress.api.presets import PRESETS
from llmcompress.api.settings import (
    COMMON_SETTINGS,
    OUTPUT_SETTINGS,
    TEXT_SETTINGS,
    output_of,
    recipe_with,
    refuse_unknown,
    text_of,
)
from llmcompress.calib.default import shipped
from llmcompress.errors import RecipeError
from llmcompress.grids.ggml import GgufTypes
from llmcompress.pruners.base import Pruner
from llmcompress.recipe import (
    DEFAULT_FORMAT,
    Recipe,
    build,
    load,
    methods,
    parse,
    pruners,
)
from llmcompress.registry import suggest

GGUF = "gguf"
_TYPE_NAMES = {
    "type": "type",
    "pure": "pure",
    "output_type": "output",
    "embedding_type": "embedding",
    "tensor_type": "tensors",
    "allow_requantize": "allow_requantize",
    "search": "search",
}
"""Fields of GgufTypes by the settings that give them."""
_OF_GGUF = ("guided", "recover", "imatrix", "shard_size", "modelfile", "pre", "base_model", "license")


@dataclass(frozen=True)
class PackagedRecipe:
    """A recipe that comes with llmcompress, in `file`."""

    name: str
    file: Path

    @property
    def comment(self) -> str:
        """When to use the recipe: the comment lines of its file, without the commands in them."""
        lines = [line[1:] for line in self.file.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        return " ".join(line.strip() for line in lines if not line.startswith("   "))


def packaged_recipes() -> dict[str, PackagedRecipe]:
    """The recipes in `configs/` by name."""
    files = {file.stem: file for file in shipped("configs").glob("*.yaml")}
    return {name: PackagedRecipe(name, files[name]) for name in sorted(files)}


def recipe_file(recipe: str | Path) -> Path:
    """The file of a recipe, which may be a path or the name of one that comes with llmcompress.

    A file of that name is preferred. RecipeError if there is neither.
    """
    path = Path(recipe)
    if path.suffix or path.is_file() or path.name != str(recipe):
        return path
    known = packaged_recipes()
    if path.name not in known:
        raise RecipeError(f"there is no file {recipe}, and no recipe of that name", suggest(path.name, list(known)))
    return known[path.name].file


def load_recipe(recipe: str | Path) -> Recipe:
    """The recipe in a YAML file, or the one of that name that comes with llmcompress (`llmcompress recipe list`).

    RecipeError if there is none, or if the file says anything that no recipe may say.

        >>> recipe = llmcompress.load_recipe("gptq-w4")
        >>> recipe.method.bits
        4
    """
    return load(recipe_file(recipe))


def as_recipe(
    recipe: Recipe | Mapping[str, Any] | str | Path | None, method: str | None, settings: Mapping[str, Any]
) -> Recipe:
    """The recipe that is given, with `settings` of its text and output changed, or the one of `method` with `settings`.

    RecipeError unless exactly one of `recipe` and `method` is given.
    """
    if (recipe is None) == (method is None):
        said = "nothing says what to do" if recipe is None else "recipe and method both say what to do"
        raise RecipeError(said, "give a recipe, or method with its options")
    if method is not None:
        return method_recipe(method, settings)
    if isinstance(recipe, Mapping):
        recipe = parse(dict(recipe))
    elif not isinstance(recipe, Recipe):
        assert recipe is not None
        recipe = load_recipe(recipe)
    known = (*TEXT_SETTINGS, *OUTPUT_SETTINGS)
    refuse_unknown(settings, known, "the options of text and output that a recipe may be given beside its own")
    text, output = text_of(settings, recipe.calibration), output_of(settings, otherwise=recipe.output)
    return recipe.model_copy(update={"calibration": text, "output": output})


def method_recipe(method: str, settings: Mapping[str, Any]) -> Recipe:
    """The recipe of a method, a pruner, a preset or "gguf": what the command of that name does with `settings`.

    settings: values of the command's options, named as they are, with `_` for `-`; `set` and `tensor_type` are mappings
    by pattern, sizes are bytes. Those left out keep the command's defaults. RecipeError for what the command refuses.
    """
    if method == GGUF:
        return _gguf_recipe(settings)
    if method in PRESETS:
        refuse_unknown(settings, (*PRESETS[method].fields, *COMMON_SETTINGS), method)
        return PRESETS[method].recipe(settings)
    steps: dict[str, Any] = {**methods(), **pruners()}
    if method not in steps:
        raise RecipeError(f"unknown method {method!r}", suggest(method, [*steps, *PRESETS, GGUF]))
    kind = steps[method]
    options = {name: settings[name] for name in settings if name in kind.model_fields or name not in COMMON_SETTINGS}
    format_ = "dense" if issubclass(kind, Pruner) else DEFAULT_FORMAT
    return recipe_with(text_of(settings), [build(kind, options, method)], format_, settings)


def _gguf_recipe(settings: Mapping[str, Any]) -> Recipe:
    """The recipe of a GGUF file of the types that settings ask for."""
    refuse_unknown(settings, (*_TYPE_NAMES, *TEXT_SETTINGS, *_OF_GGUF), "the options of gguf")
    if settings.get("type") is None:
        raise RecipeError("nothing says how large the result is to be", "give a type, such as Q4_K_M")
    calibrated, weighted = settings.get("calibration") is not None, settings.get("imatrix") is not None
    if calibrated and weighted:
        raise RecipeError("--imatrix and --calibration both say what errors cost", "give one of them")
    if settings.get("guided") and not calibrated:
        raise RecipeError("--guided follows gradients of a calibration text, and there is none", "add --calibration")
    recovers = settings.get("recover", "none") != "none"
    if recovers and not calibrated:
        raise RecipeError("--recover trains on a calibration text, and there is none", "add --calibration")
    types = {field: settings[name] for name, field in _TYPE_NAMES.items() if settings.get(name) is not None}
    types.setdefault("search", "best" if calibrated or weighted else "fast")
    text = text_of(settings)
    if weighted:
        text = text.model_copy(update={"imatrix": str(settings["imatrix"])})
    method = "gptq" if calibrated else "rtn"
    more = {"guided": True} if settings.get("guided") else {}
    more |= {"recover": settings["recover"]} if recovers else {}
    step = build(methods()[method], {"gguf": build(GgufTypes, types, "the types"), **more}, method)
    return Recipe(calibration=text, steps=(step,), output=output_of({**settings, "format": GGUF}, "modelfile", "pre"))
