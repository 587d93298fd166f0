"""Verdicts: which runtimes load what a plan would write, for one target, for the ledger and for `plan --json`."""

from collections.abc import Mapping, Sequence
from typing import Any

from llmcompress.arch.spec import head_width
from llmcompress.engine.targets.base import Target, targets
from llmcompress.engine.targets.facts import LoadCase, Violation
from llmcompress.engine.targets.machine import Machine, OnGpus
from llmcompress.engine.targets.split import shards, unsplittable
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
_SAID = 2  # reasons in a note for the ledger, which is read by people; `plan --json` has all
_ANY = Machine()


def requested_target(name: str | None, machine: Machine, repair: bool) -> Target | None:
    """The target of --target, if any; RecipeError for an unknown name, PlanError for other options without use."""
    known = targets()
    if name is not None and name not in known:
        raise RecipeError(f"unknown target {name!r}", _UNCHECKED.get(name.lower()) or suggest(name, list(known)))
    split = [target.name for target in known.values() if target.tensor_parallel]
    tp, gpus = machine.tp, [target.name for target in known.values() if _knows_gpus(target)]
    if tp < 1:
        raise PlanError(f"--tp {tp} is no number of devices", "use 1 or more")
    if tp > 1 and name not in split:
        why = (
            "says nothing without --target" if name is None else f"is not for {name}, whose ways to split are not known"
        )
        raise PlanError(f"--tp {tp} {why}", f"use it with --target {' or '.join(split)}")
    if machine.gpu is not None and name not in gpus:
        what = "says nothing without --target" if name is None else f"is not for {name}, which has no facts about GPUs"
        raise PlanError(f"--gpu {what}", f"use it with --target {' or '.join(gpus)}")
    if repair and name is None:
        raise PlanError("--repair without --target has nothing to go by", "see `llmcompress list targets`")
    return known[name] if name is not None else None


def label(target: Target, machine: Machine) -> str:
    """The name of a target in messages: 'vllm', or 'vllm (tp 2, sm_90)'."""
    known = Machine(_devices(target, machine), machine.gpu if _knows_gpus(target) else None)
    return f"{target.name} ({known})" if str(known) else target.name


def violations(
    target: Target, format_: str, entries: Sequence[Entry], config: Mapping[str, Any], machine: Machine = _ANY
) -> list[Violation]:
    """What keeps a target from loading `entries` in a format on a machine; empty if nothing known does."""
    facts = target.formats.get(format_)
    if facts is None:
        return [Violation(f"it does not read format {format_}", (), f"use --format {' or '.join(target.formats)}")]
    loaded, tp = _loaded(target, entries), _devices(target, machine)
    if found := unsplittable(loaded, config, tp):
        smaller = next(n for n in range(min(tp - 1, _MOST), 0, -1) if not unsplittable(loaded, config, n))
        return [Violation(item.what, item.modules, f"use --tp {smaller}") for item in found]
    case = _case(target, entries, config, machine)
    return [item for fact in (*target.always, *facts) for item in fact.violations(case)]


def remarks(
    target: Target, format_: str, entries: Sequence[Entry], config: Mapping[str, Any], machine: Machine
) -> list[str]:
    """What a user of a target that loads the checkpoint should know of it."""
    said = [target.remark] if target.remark and format_ != "dense" else []
    case = _case(target, entries, config, machine)
    return said + [item for fact in target.formats[format_] for item in fact.remarks(case)]


def verdicts(
    format_: str, entries: Sequence[Entry], config: Mapping[str, Any], machine: Machine = _ANY
) -> dict[str, str | list[str]]:
    """For every target, "ok" or the reasons why it does not load the result."""
    return {
        name: [str(item) for item in violations(target, format_, entries, config, machine)] or "ok"
        for name, target in targets().items()
    }


def labels(found: Mapping[str, str | list[str]], machine: Machine, only: str | None = None) -> list[str]:
    """The labels of all targets that `verdicts` calls "ok". only: the one target that counts."""
    return [
        label(targets()[name], machine) for name, verdict in found.items() if verdict == "ok" and only in (None, name)
    ]


def engine_notes(format_: str, entries: Sequence[Entry], config: Mapping[str, Any]) -> list[str]:
    """One sentence for each runtime that reads the format and does not load this on one device, or was not seen to.

    It has the first reasons alone: `verdicts` has all.
    """
    model_type, notes = config.get("model_type"), []
    for target in targets().values():
        if format_ not in target.formats or not target.unasked:
            continue
        if found := violations(target, format_, entries, config):
            more = f"; and {len(found) - _SAID} more" if len(found) > _SAID else ""
            notes.append(f"{target.title} does not load this: {'; '.join(map(str, found[:_SAID]))}{more}")
        elif model_type in target.borrowed:
            notes.append(
                f"{target.title} has no class for models of type {model_type!r} and runs transformers' own, which was "
                "not seen with quantised weights"
            )
    return notes


def _knows_gpus(target: Target) -> bool:
    return any(isinstance(fact, OnGpus) for facts in target.formats.values() for fact in facts)


def _devices(target: Target, machine: Machine) -> int:
    """Over how many devices the target splits matrices."""
    return machine.tp if target.tensor_parallel else 1


def _loaded(target: Target, entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if target.further or not entry.further]


def _case(target: Target, entries: Sequence[Entry], config: Mapping[str, Any], machine: Machine) -> LoadCase:
    loaded = _loaded(target, entries)
    return LoadCase(
        loaded,
        shards(loaded, config, _devices(target, machine), target.fuses),
        str(config.get("model_type")),
        head_width(config) or 0,
        machine.gpu,
    )
