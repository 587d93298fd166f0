"""The start of a run: whatever can refuse it is asked before the first tensor is read, by `plan` as by the run itself.

Nothing is written here.
"""

from pathlib import Path

from torch import Tensor

from llmcompress.calib.base import fingerprint
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.process.ranks import device_of
from llmcompress.engine.run.opened_model import check_model
from llmcompress.engine.run.tokens import calibration_tokens, tokens_without_model
from llmcompress.errors import PlanError
from llmcompress.store.files import refuse_unwritable
from llmcompress.store.staging import kept_tokens, refuse_other_work
from llmcompress.store.statistics import all_statistics


def refuse_early(plan: Plan, size: int) -> None:
    """Raise what refuses a run of `size` ranks, whatever its text is; no tensor is read."""
    device_of(plan.options.device)  # refuses one that is not there
    batches = -(-plan.recipe.calibration.samples // plan.batch)
    if plan.calibrated and size > batches:
        raise PlanError(
            f"windows make fewer batches ({batches}) than there are processes ({size})",
            "start fewer, or use more --samples or a smaller --batch",
        )
    _refuse_model_and_work(plan)


def refuse_start(plan: Plan) -> None:
    """Raise what refuses a run, without reading a tensor: text of the model's own is not sampled.

    The device may be missing here: a plan may be made on another machine.
    """
    _refuse_model_and_work(plan)
    if not plan.calibrated or _kept(plan) is not None:
        return
    trusted = plan.options.trust_remote_code
    tokens = tokens_without_model(plan.recipe.calibration, plan.headers.path, plan.dtype, trusted)
    if tokens is not None:
        identity = {**plan.identity, "tokens": fingerprint(tokens)}
        refuse_other_work(plan.work, identity, plan.options.restart, unknown=("statistics",))


def tokens_of(plan: Plan, drawn: Tensor | None) -> Tensor | None:
    """The calibration tokens [samples, length] of a plan, None where it needs none. drawn: by the caller."""
    if not plan.calibrated or drawn is not None:
        return drawn if plan.calibrated else None
    known = _kept(plan)
    return calibration_tokens(plan) if known is None else known


def _refuse_model_and_work(plan: Plan) -> None:
    if plan.options.stats is not None:
        _refuse_store(plan.options.stats, plan)
    refuse_other_work(plan.work, plan.identity, plan.options.restart, unknown=("tokens", "statistics"))
    if plan.calibrated:
        check_model(plan.headers, plan.spec, plan.options, plan.dtype)


def _refuse_store(store: Path, plan: Plan) -> None:
    """PlanError for a place in which no statistics can be kept, or that holds damaged ones."""
    for place in (plan.out, plan.work):
        if store.resolve().is_relative_to(place.resolve()):
            raise PlanError(f"--stats {store} lies in {place}, which holds no statistics", "give a directory elsewhere")
    if store.exists() and not store.is_dir():
        raise PlanError(f"--stats {store} is not a directory", "give another one")
    refuse_unwritable(store)
    all_statistics(store)


def _kept(plan: Plan) -> Tensor | None:
    """Text of the model's own that an earlier start has sampled, which takes minutes."""
    sampled = plan.recipe.calibration.source == "self" and not plan.options.restart
    return kept_tokens(plan.work) if sampled else None
