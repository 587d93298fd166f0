"""Losses of the items that share a budget: measured in a work directory, kept in a file, bounded in memory."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from llmcompress.engine.budget.fisher_run import Measuring
from llmcompress.engine.budget.grid_losses import SAMPLED, measured_losses
from llmcompress.engine.budget.items import Item
from llmcompress.engine.budget.losses_file import kept_losses
from llmcompress.engine.budget.type_losses import Losses
from llmcompress.engine.plan.memory_model import MemoryModel
from llmcompress.engine.plan.pass_memory import ModelSizes, fit_memory
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.plan.resources import Resources, bounded, host_limits
from llmcompress.engine.source.matrix_refs import matrices_of
from llmcompress.ledger import Ledger
from llmcompress.store.staging import Staging


def within(base: Plan, limit: int | None) -> Plan:
    """With as many threads as the memory allows; PlanError if it is too little for one."""
    free = base.options.threads is None, False
    return replace(base, resources=bounded(base.resources, host_limits(limit), partial(_memory, base), free))


def losses_of(
    base: Plan,
    items: Sequence[Item],
    kept: Path | None,
    ledger: Ledger,
    watch: Callable[[int, int], None],
    begin: Callable[[int], None],
) -> Losses:
    """By module and name of grid: measured before, as the file `kept` has it, or now.

    begin: told, before anything is measured, what memory it will take in bytes. Layers that are measured lie in the
    plan's work directory until all are.
    """
    measuring = Measuring.of(base)
    step = base.recipe.method
    assert step is not None
    of = {
        "model": base.headers.contents,
        "text": sha256(measuring.tokens.numpy().tobytes()).hexdigest(),
        "method": f"{step.name}, clip {step.clip}",
        "number of samples": str(base.recipe.calibration.samples),
    }
    grids = {matrix.module: item.grids for item in items for matrix in item.matrices}
    names = {module: [grid.name for grid in choices] for module, choices in grids.items()}
    staged: Staging | None = None

    def measured() -> Losses:
        nonlocal staged
        begin(_memory(base, base.resources).peak("host"))
        staged = Staging(base.work, {**of, "seed": base.recipe.calibration.seed, "grids": names})
        return measured_losses(base, measuring, grids, staged, ledger, watch)

    losses = kept_losses(kept, of, names, measured)
    if staged is not None:
        staged.remove()
    return losses


def _memory(base: Plan, resources: Resources) -> MemoryModel:
    """What measuring takes."""
    refs = matrices_of(base.headers, base.options.trust_remote_code, Ledger()).refs
    sizes = ModelSizes.of(base.headers, refs, base.recipe.calibration.length)
    step = base.recipe.method
    return fit_memory(sizes, resources, compensated=step is not None and step.compensates, sampled=SAMPLED)
