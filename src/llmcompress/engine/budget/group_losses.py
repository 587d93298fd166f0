"""Losses of the groups of matrices that share a budget: measured in a work directory, within a memory limit, kept in a
file."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from llmcompress.engine.budget.fisher_run import SAMPLES, FisherRun
from llmcompress.engine.budget.grid_losses import SAMPLED, measured_losses
from llmcompress.engine.budget.losses_file import kept_losses
from llmcompress.engine.budget.matrix_groups import MatrixGroup
from llmcompress.engine.budget.patterns import CHOSEN
from llmcompress.engine.budget.type_losses import Losses
from llmcompress.engine.plan.memory_model import MemoryModel
from llmcompress.engine.plan.pass_memory import ModelSizes, fit_memory
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.plan.resources import Resources, bounded, host_limits
from llmcompress.engine.plan.run_memory import output_products
from llmcompress.engine.run.guidance import about_guidance
from llmcompress.engine.source.matrix_refs import matrices_of
from llmcompress.ledger import Ledger
from llmcompress.methods.base import Method
from llmcompress.store.staging import Staging
from llmcompress.store.statistics import statistics_entry

FITTED_TO = 64
"""Windows that a method is fitted to and judged on, of those that a recipe asks for: fitted to a few of them, matrices
lose up to twice what they lose in the run, some much more than others, so that grids are chosen wrongly."""

_UNMEASURED = {*CHOSEN, "set", "skip", "recover", "qep_alpha", "qep_samples", "head_bits", "embedding_bits"}
"""Options of a step that losses do not hang on."""


def within_memory(base: Plan, limit: int | None) -> Plan:
    """The plan with as many threads as the memory `limit` allows; PlanError if it is too little for one thread."""
    free = base.options.threads is None, False
    return replace(base, resources=bounded(base.resources, host_limits(limit), partial(_memory, base), free))


def losses_of(
    base: Plan,
    groups: Sequence[MatrixGroup],
    kept: Path | None,
    guidance: Path | None,
    ledger: Ledger,
    watch: Callable[[int, int], None],
    begin: Callable[[int], None],
) -> Losses:
    """Losses by module and name of grid, read from the file `kept` if it exists, else measured now.

    guidance: a store, in which a run that goes by gradients finds what they say. begin: called before anything is
    measured with the memory in bytes that measuring will take. Layers that have been measured lie in the plan's work
    directory until all layers are measured.
    """
    step = base.recipe.method
    assert step is not None
    guided, fitted = base.follows_gradients, step.compensates
    samples = None if guided else FITTED_TO if fitted else SAMPLES
    fisher_run = FisherRun.of(base, samples, _dtype(base))
    of = {
        "model": base.headers.contents,
        "text": sha256(fisher_run.tokens.numpy().tobytes()).hexdigest(),
        "method": json.dumps({"name": step.name, **_rounding(step)}, sort_keys=True),
        "number of samples": str(base.recipe.calibration.samples),
        **({"compute type": fisher_run.dtype} if fitted else {}),
    }
    grids = {
        matrix.module: [grid for grid in group.grids if not grid.unrounded]  # which loses nothing
        for group in groups
        for matrix in group.matrices
    }
    names = {module: [grid.name for grid in choices] for module, choices in grids.items()}
    identity = {**of, "seed": base.recipe.calibration.seed, "grids": names}
    done: list[Staging] = []
    with ExitStack() as stack:

        def measured() -> Losses:
            begin(_memory(base, base.resources).peak("host"))
            staged = stack.enter_context(closing(Staging(base.work, identity, restart=base.options.restart)))
            place = None
            if guided and guidance is not None:
                place = statistics_entry(guidance, about_guidance(base, fisher_run.text))
            if place is not None:
                stack.enter_context(closing(place.folder))
            found = measured_losses(base, fisher_run, grids, staged, place, ledger, watch)
            done.append(staged)
            return found

        losses = kept_losses(kept, of, names, measured)
        for staged in done:
            staged.remove()
        return losses


def _rounding(step: Method) -> dict[str, Any]:
    """The options of a step that losses hang on: those that say how a matrix is rounded to a grid."""

    def kept(options: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name not in _UNMEASURED}

    patterns = {pattern: kept(options) for pattern, options in step.set.items()}
    return {**kept(step.model_dump()), "set": {pattern: options for pattern, options in patterns.items() if options}}


def _memory(base: Plan, resources: Resources) -> MemoryModel:
    """The memory that measuring takes."""
    refs = matrices_of(base.headers, base.options.trust_remote_code, Ledger()).refs
    sizes = ModelSizes.of(base.headers, refs, base.recipe.calibration.length)
    step = base.recipe.method
    products = [output_products(base.recipe, layer) for layer in base.layers]
    compensated = step is not None and step.compensates
    return fit_memory(sizes, replace(resources, dtype=_dtype(base)), compensated, SAMPLED, products)


def _dtype(base: Plan) -> str:
    """The type in which windows run: that of the run where it goes by their gradients.

    float16 has no place for small gradients. A method that compensates nothing is measured on few windows.
    """
    step = base.recipe.method
    quick = step is not None and step.compensates and base.dtype != "float16"
    return base.dtype if quick or base.follows_gradients else "float32"
