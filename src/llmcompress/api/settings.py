"""Settings: values of a command's options by name, and the parts of a recipe that several commands make from them."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from llmcompress.errors import RecipeError
from llmcompress.recipe import Calibration, KvCache, Output, Recipe, Step, build
from llmcompress.registry import suggest

TEXT_SETTINGS = ("calibration", "field", "samples", "length", "seed")
OUTPUT_SETTINGS = ("format", "shard_size", "base_model", "license")
FEW_WINDOWS = 8  # enough to tell layers apart
STEPS = 64  # of recovery, four windows each
DRAFT_STEPS, DRAFT_RATE, DRAFT_VOCABULARY, WRITTEN = 512, 1e-3, 8192, 128  # of drafts
DraftKind = Literal["eagle3", "medusa", "prune"]
COMMON_SETTINGS = (*TEXT_SETTINGS, *OUTPUT_SETTINGS, "kv_cache")
"""Settings of every command that writes safetensors."""


def recipe_with(text: Calibration, steps: Iterable[Step], format_: str, settings: Mapping[str, Any]) -> Recipe:
    """The recipe of `steps` on `text`, with what settings say of output and cache; `format_` where they name none."""
    cache = settings.get("kv_cache")
    return Recipe(
        calibration=text,
        steps=tuple(steps),
        output=output_of({"format": format_, **settings}),
        kv_cache=None if cache is None else build(KvCache, {"code": cache}, "kv_cache"),
    )


def text_of(settings: Mapping[str, Any], otherwise: Calibration | None = None) -> Calibration:
    """The calibration text that settings ask for. otherwise: what holds for those that are not given.

    Options of a source are left behind with it.
    """
    given = {} if otherwise is None else otherwise.model_dump()
    given |= {name: settings[name] for name in ("samples", "length", "seed") if settings.get(name) is not None}
    if settings.get("calibration") is not None:
        given |= {"source": str(settings["calibration"]), "options": {}}
    if settings.get("field") is not None:
        given["options"] = {**given.get("options", {}), "field": settings["field"]}
    text: Calibration = build(Calibration, given, "the calibration options")
    return text


def depth_text(by: str, settings: Mapping[str, Any]) -> Calibration:
    """The text on which layers are judged: few windows by "kl", where every layer costs passes of its own."""
    if by == "kl" and settings.get("samples") is None:
        return text_of({**settings, "samples": FEW_WINDOWS})
    return text_of(settings)


def output_of(settings: Mapping[str, Any], *more: str, otherwise: Output | None = None) -> Output:
    """The output that settings ask for. more: names of settings beside OUTPUT_SETTINGS. otherwise: as of `text_of`."""
    given = {} if otherwise is None else otherwise.model_dump()
    given |= {name: settings[name] for name in (*OUTPUT_SETTINGS, *more) if name in settings}
    output: Output = build(Output, given, "the output options")
    return output


def refuse_unknown(settings: Iterable[str], known: Iterable[str], where: str) -> None:
    """RecipeError for a setting that is not one of `known`."""
    names = list(known)
    for name in settings:
        if name not in names:
            raise RecipeError(f"unknown option {name!r} in {where}", suggest(name, names))


def refuse_other_kind(kind: DraftKind, layers: int | None, vocabulary: int | None) -> None:
    """RecipeError for an option of another kind of drafts, and for a pruned draft of no number of layers."""
    if kind != "prune" and layers is not None:
        raise RecipeError("--layers is of --kind prune, and heads have layers of their own", "leave it out")
    if kind == "prune" and vocabulary is not None:
        raise RecipeError("--vocab is of heads, and a pruned draft knows all tokens", "leave it out")
    if kind == "prune" and layers is None:
        raise RecipeError("--kind prune needs to know how many layers the draft has", "write for example --layers 4")
