"""Export of a quantised checkpoint: the same codes in another container, whoever wrote it."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from llmcompress.engine.execute import run
from llmcompress.engine.plan.head_matrix import FURTHER, outside_modules
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.matrix_options import matches
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.source.matrix_refs import matrices_of
from llmcompress.engine.source.open import checkpoint_headers
from llmcompress.engine.source.quantised import DecodedCheckpoint, DecodedHeaders, code_grid, kept_grid
from llmcompress.engine.write.export_work import Exported
from llmcompress.errors import PlanError, RunError
from llmcompress.grids.grid_type import type_of
from llmcompress.grids.inputs import name_of
from llmcompress.ledger import Ledger, LedgerEntry
from llmcompress.methods.base import Solved, Statistics
from llmcompress.methods.rtn import Rtn
from llmcompress.recipe import Output, Recipe, format_named
from llmcompress.store.checkpoint import DTYPES, Checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.solve.prune import Pruned
    from llmcompress.solve.row_blocks import RowBlocks
    from llmcompress.solve.sparsegpt import MaskChoice

_SKIPPED: Mapping[str, Any] = {"skip": True}
_ANEW = "round anew: llmcompress rtn"


class _Kept(Rtn):
    """Codes of the source and what is fixed of their inputs; nothing is measured, and nothing rounded."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def solve(
        self,
        weight: "Tensor",
        stats: Statistics,
        scale_dtype: "torch.dtype",
        blocks: "RowBlocks",
        pruned: "Pruned | MaskChoice | None" = None,
    ) -> Solved:
        raise RunError(
            f"the source has codes on {self.grid.name} with scales or zero points that the output cannot hold", _ANEW
        )


class _Wide(_Kept):
    """The same where scales are no values of the model's own type, as ModelOpt has them."""

    def described(self) -> dict[str, Any]:
        return {"scale_type": "F32"}


def export_checkpoint(model: Path, formats: Sequence[str], out: Path | None, overwrite: bool) -> list[Exported]:
    """Write the codes of a quantised checkpoint in each format.

    PlanError for codes that config.json does not tell the grid of, or that a format cannot hold; RunError for scales
    that it cannot.
    """
    headers = checkpoint_headers(model)
    if not isinstance(headers, DecodedHeaders):
        raise PlanError(f"{model} is not quantised, so it has no codes to export", "quantise it: llmcompress gptq")
    if "gguf" in formats:
        raise PlanError("GGUF files are made by a command of their own", "llmcompress gguf keeps codes of its types")
    step = _step(headers, formats)
    stem = out or model
    plans = []
    with _work_beside(stem) as work:
        for name in formats:
            target = stem if out is not None and len(formats) == 1 else stem.with_name(f"{stem.name}-{name}")
            taken, notes = (
                (step, list[LedgerEntry]()) if format_named(name).holds is not None else _with_inputs_as_they_are(step)
            )
            recipe = Recipe(steps=(taken,), output=Output(format=name))
            plan = make_plan(recipe, model, Options(out=target, work=Path(work) / name, overwrite=overwrite))
            plans.append(plan.with_notes(notes))
            _check_scales(headers, plans[-1])
        for plan in plans:
            run(plan)
    return [Exported.of(plan) for plan in plans]


def _check_scales(headers: DecodedHeaders, plan: Plan) -> None:
    """PlanError for scales that the output cannot hold."""
    for entry in plan.entries:
        if entry.grid and kept_grid(headers, entry.module, plan.format.scales_of_sources) != entry.grid:
            raise PlanError(
                f"format {plan.format.name} stores scales as {entry.source.dtype}, which does not hold those of "
                f"{entry.module}",
                "--format gptq and awq have float16 scales, dense has none; or round anew: llmcompress rtn",
            )


def _work_beside(target: Path) -> "TemporaryDirectory[str]":
    """A directory for the work, where the output will be; PlanError where nothing can be written."""
    place = next(parent for parent in target.absolute().parents if parent.exists())
    try:
        return TemporaryDirectory(dir=place, prefix=f".{target.name}-")
    except OSError as error:
        raise PlanError(f"{place} cannot be written to: {error.strerror}", "choose another --output") from None


def _step(headers: DecodedHeaders, formats: Sequence[str]) -> _Kept:
    """The step whose options are those that the codes of every module have.

    PlanError for codes of other modules than matrices of layers, head and embedding: only dense output holds these.
    """
    matrices = matrices_of(headers, False, Ledger())
    outside = outside_modules(matrices.anatomy(headers))
    apart = sorted(headers.packed - matrices.widths.keys() - outside.keys())
    if apart and any(format_named(name).holds is not None for name in formats):
        raise PlanError(
            f"{apart[0]} is neither head nor embedding nor a matrix of a layer that is ever quantised here",
            f"--format dense decodes it; or {_ANEW}",
        )
    checkpoint = DecodedCheckpoint(headers)
    coded = [module for module in (*matrices.widths, *outside) if module in headers.packed]
    said = {module: _options(checkpoint, module) for module in coded}
    for module, what in outside.items():
        if module in said and what != FURTHER and said[module]["activations"] != "none":
            raise PlanError(f"{module} has rounded inputs, which are known of matrices of layers alone", _ANEW)
    inside = {module: said.get(module, _SKIPPED) for module in matrices.widths}
    counts = Counter(str(said[module]) for module in coded if module in inside or inside.keys().isdisjoint(coded))
    if not counts:
        raise PlanError(f"{headers.place} has codes of experts in one tensor, which are not taken over", _ANEW)
    usual = next(options for options in said.values() if str(options) == counts.most_common(1)[0][0])
    kind = _Wide if any(_is_wide(checkpoint, module) for module in headers.packed) else _Kept
    patterns = _patterns(inside, usual)
    return kind.model_validate({**usual, "set": {**patterns, **_beside(outside, said, patterns)}})


def _with_inputs_as_they_are(step: _Kept) -> tuple[_Kept, list[LedgerEntry]]:
    """The step without rounding of inputs, which no dense checkpoint has a place for; and what that leaves out."""
    options = step.model_dump()
    said = [options, *options["set"].values()]
    rounded = sorted({str(item["activations"]) for item in said if item.get("activations", "none") != "none"})
    for item in said:
        if "activations" in item:
            item["activations"] = "none"
    why = "inputs are not rounded by whatever loads the result, as they are for the source"
    return type(step).model_validate(options), [LedgerEntry("requantised", name, why) for name in rounded]


def _beside(
    outside: Mapping[str, str], said: Mapping[str, Mapping[str, Any]], patterns: Mapping[str, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """Entries of `set` for what lies outside of the layers: asked for where it is codes, and else by no pattern."""
    reaching = [pattern for pattern, options in patterns.items() if options.get("skip") is False]
    return {
        module: {"skip": False, **said[module]} if module in said else _SKIPPED
        for module, what in outside.items()
        if module in said or (what == FURTHER and any(matches(pattern, module) for pattern in reaching))
    }


def _is_wide(checkpoint: DecodedCheckpoint, module: str) -> bool:
    """Whether scales of a module are float32 that the type of the model does not hold."""
    headers, grid = checkpoint.headers, code_grid(checkpoint.headers, module)
    if grid is None or grid.parts(1, 1):
        return False
    own = DTYPES[headers.tensors[f"{module}.weight"].spec.dtype]
    stored = Checkpoint(headers.stored)
    names = [f"{module}.{part}" for part in ("weight_scale", "input_scale") if f"{module}.{part}" in stored]
    scales = [stored.read(name) for name in names if stored.headers.tensors[name].spec.dtype == "F32"]
    return any(not torch.equal(scale, scale.to(own).to(scale.dtype)) for scale in scales)


def _options(checkpoint: DecodedCheckpoint, module: str) -> dict[str, Any]:
    """The options that ask for the grid of a module's codes, and for the rounding of its inputs."""
    grid, inputs = code_grid(checkpoint.headers, module), name_of(checkpoint.inputs(module))
    if grid is None or inputs is None:
        said = f"format {checkpoint.headers.format.name} does not tell the grid of {module}"
        raise PlanError(f"{said}, so its codes cannot be taken over", _ANEW)
    options = {"type": grid.type, "bits": grid.bits, "activations": inputs}
    return options | ({"group_size": grid.group_size, "sym": grid.symmetric} if type_of(grid).grouped else {})


def _patterns(wanted: Mapping[str, Mapping[str, Any]], usual: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Patterns of `set` for what is not as usual: one for a place in all layers, then single modules."""
    skips = _SKIPPED in wanted.values()
    said = {
        module: {"skip": False, **options} if skips and options != _SKIPPED else options
        for module, options in wanted.items()
    }
    found: dict[str, Mapping[str, Any]] = {}
    for module, options in wanted.items():
        if options != usual:
            found.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", module), said[module])
    held = {}
    for module in wanted:
        last = next((found[pattern] for pattern in reversed(found) if matches(pattern, module)), None)
        if last not in (None, said[module]):
            held[module] = said[module]
    return found | held
