"""Verdicts: which runtimes load what a plan would write, for one target, for the ledger and for `plan --json`."""

from collections.abc import Mapping, Sequence
from typing import Any

from llmcompress.engine.targets.facts import LoadCase, Violation
from llmcompress.engine.targets.split import shards, unsplittable
from llmcompress.engine.targets.table import TARGETS, Target
from llmcompress.errors import PlanError, RecipeError
from llmcompress.formats.base import Entry
from llmcompress.registry import suggest

_UNCHECKED = {
    "ollama": "Ollama runs GGUF files: `llmcompress gguf MODEL --modelfile`",
    "lmstudio": "LM Studio runs GGUF files and MLX: `llmcompress gguf MODEL`, or --target mlx-lm",
    "tgi": "what TGI loads is not checked; it takes many of vLLM's checkpoints, which --target vllm does check",
}
"""By the name of a runtime that is no target, what to do for it."""
_MOST = 1024  # the most devices that a hint proposes


def requested_target(name: str | None, tp: int, repair: bool) -> Target | None:
    """The target of --target, if any; RecipeError for an unknown name, PlanError for --tp or --repair without use."""
    if name is not None and name not in TARGETS:
        raise RecipeError(f"unknown target {name!r}", _UNCHECKED.get(name.lower()) or suggest(name, list(TARGETS)))
    split = [target.name for target in TARGETS.values() if target.tensor_parallel]
    if tp < 1:
        raise PlanError(f"--tp {tp} is no number of devices", "use 1 or more")
    if tp > 1 and name not in split:
        why = (
            "says nothing without --target" if name is None else f"is not for {name}, whose ways to split are not known"
        )
        raise PlanError(f"--tp {tp} {why}", f"use it with --target {' or '.join(split)}")
    if repair and name is None:
        raise PlanError("--repair without --target has nothing to go by", "see `llmcompress list targets`")
    return TARGETS[name] if name is not None else None


def label(target: Target, tp: int) -> str:
    """The name of a target in messages: 'vllm', or 'vllm (tp 2)'."""
    return f"{target.name} (tp {tp})" if tp > 1 and target.tensor_parallel else target.name


def violations(
    target: Target, format_: str, entries: Sequence[Entry], config: Mapping[str, Any], tp: int = 1
) -> list[Violation]:
    """What keeps a target from loading `entries` in a format on `tp` devices; empty if nothing known does."""
    facts = target.formats.get(format_)
    if facts is None:
        return [Violation(f"it does not read format {format_}", (), f"use --format {' or '.join(target.formats)}")]
    tp = tp if target.tensor_parallel else 1
    entries = [entry for entry in entries if target.further or not entry.further]
    if found := unsplittable(entries, config, tp):
        smaller = next(n for n in range(min(tp - 1, _MOST), 0, -1) if not unsplittable(entries, config, n))
        return [Violation(item.what, item.modules, f"use --tp {smaller}") for item in found]
    case = LoadCase(entries, shards(entries, config, tp, target.fuses), str(config.get("model_type")))
    return [item for fact in (*target.always, *facts) for item in fact.violations(case)]


def verdicts(
    format_: str, entries: Sequence[Entry], config: Mapping[str, Any], tp: int = 1
) -> dict[str, str | list[str]]:
    """For every target, "ok" or the reasons why it does not load the result."""
    return {
        name: [str(item) for item in violations(target, format_, entries, config, tp)] or "ok"
        for name, target in TARGETS.items()
    }


def labels(found: Mapping[str, str | list[str]], tp: int, only: str | None = None) -> list[str]:
    """The labels of all targets that `verdicts` calls "ok". only: the one target that counts."""
    return [label(TARGETS[name], tp) for name, verdict in found.items() if verdict == "ok" and only in (None, name)]


def engine_notes(format_: str, entries: Sequence[Entry], config: Mapping[str, Any]) -> list[str]:
    """One sentence for each runtime that reads the format and does not load this on one device, or was not seen to."""
    model_type, notes = config.get("model_type"), []
    for target in TARGETS.values():
        if format_ not in target.formats or not target.unasked:
            continue
        if found := violations(target, format_, entries, config):
            notes.append(f"{target.title} does not load this: {'; '.join(map(str, found))}")
        elif model_type in target.borrowed:
            notes.append(
                f"{target.title} has no class for models of type {model_type!r} and runs transformers' own, which was "
                "not seen with quantised weights"
            )
    return notes
