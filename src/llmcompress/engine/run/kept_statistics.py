"""Statistics that runs share through a store: which ones a run may use instead of text, and where it keeps its own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.process.ranks import device_of
from llmcompress.grids.ggml import gguf_types
from llmcompress.ledger import Ledger
from llmcompress.recipe import Step
from llmcompress.store.statistics import STORED, Kept, all_statistics, statistics_entry
from llmcompress.transforms.rotate import Rotate


def statistics_of_run(plan: Plan, store: Path, tokens: str) -> Kept | None:
    """The place in the store where this run keeps its statistics; None while an equal run keeps them there.

    tokens: hash of the calibration tokens.
    """
    return statistics_entry(store, _about(plan, tokens) | {"steps": _steps(plan), "options": _options(plan)})


def reusable_statistics(plan: Plan, store: Path, tokens: str, before: str | None) -> Kept | None:
    """Statistics of another run that this run can use; None if this run has to gather its own.

    The other run had the same model, tokens and transforms, and its statistics hold every input that this run needs. A
    run whose own statistics are in the store gathers them again, so that it gives the same bytes as before. before: the
    key of those that an earlier start of the run went by, which are taken again, whatever the store has got since.
    """
    if _needs_text(plan):
        return None
    about = _about(plan, tokens)
    candidates = [kept for kept in all_statistics(store) if {key: kept.about.get(key) for key in about} == about]
    if any(kept.about.get("options") == _options(plan) for kept in candidates):
        return None
    wanted = [_spaces(section) for section in plan.sections]
    whole = (kept for kept in sorted(candidates, key=lambda kept: kept.key != before) if kept.complete)
    return next((kept for kept in whole if all(kept.has(n, spaces) for n, spaces in enumerate(wanted))), None)


def about_gradients(plan: Plan, tokens: str, windows: int, watched: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a store says of what gradients say of this model and text.

    The gradients are of the model as it was, but for rotations, which come before them, so that runs that do other
    things to it find the same there. tokens: hash of the calibration tokens. windows: how many of them gradients are
    of. watched: what is gathered of every layer, as plain data.
    """
    return {
        "gradients_of": plan.headers.contents,
        "tokens": tokens,
        "windows": windows,
        "seed": plan.recipe.calibration.seed,
        "compute_dtype": plan.dtype,
        "device": device_of(plan.options.device).type,
        "watched": watched,
        "transforms": [_said(step) for step in plan.recipe.transforms if isinstance(step, Rotate)],
        "layers": len(plan.layers),
        "steps": ["gradients"],
    }


def note_reuse(plan: Plan, kept: Kept, ledger: Ledger) -> None:
    """Note in the ledger what is lost by using the statistics of another run."""
    why = f"inputs as they were while {' and '.join(kept.steps)} was at work, not this run: close to its own"
    if plan.original_samples:
        why += "; the error of earlier matrices is not made up for"
    ledger.note("statistics", kept.key, why)


def _spaces(section: Sequence[MatrixPlan]) -> dict[str, bool]:
    """The inputs that a section's matrices need statistics of, and whether one needs the Gram matrix."""
    spaces: dict[str, bool] = {}
    for matrix in section:
        if matrix.needs_calibration:
            spaces[matrix.space] = matrix.needs_gram or spaces.get(matrix.space, False)
    return spaces


def _needs_text(plan: Plan) -> bool:
    """Whether the run needs something from the text that no store holds."""
    return (
        plan.recipe.kv_cache is not None
        or plan.recipe.scales_channels
        or plan.follows_gradients
        or plan.recovers
        or (plan.recipe.pruner is not None and plan.recipe.pruner.allocation != "uniform")
        or any(matrix.needs - STORED for matrix in plan.matrices)
    )


def _about(plan: Plan, tokens: str) -> dict[str, Any]:
    return {
        "model": plan.headers.contents,
        "tokens": tokens,
        "compute_dtype": plan.dtype,
        "batch": plan.batch,
        "transforms": [_said(step) for step in plan.recipe.transforms],
        "layers": len(plan.sections),
        "follows_gradients": plan.follows_gradients,
    }


def _options(plan: Plan) -> list[dict[str, Any]]:
    """Names and all options of the steps that change matrices."""
    steps = (plan.recipe.pruner, plan.recipe.method)
    return [_said(step) for step in steps if step is not None]


def _said(step: Step) -> dict[str, Any]:
    """A step with all its options, as plain data."""
    return {"method": step.name, **step.model_dump()}


def _steps(plan: Plan) -> list[str]:
    """The same steps as people call them."""
    steps = (plan.recipe.pruner, plan.recipe.method)
    return [f"{step.name} {_label(step)}" for step in steps if step is not None]


def _label(step: Any) -> str:
    types = gguf_types(step)
    return str(step.label if types is None else types.type)
