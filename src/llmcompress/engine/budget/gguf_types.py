"""Choosing GGUF types within a budget: the loss of each tensor by each type is measured, then a knapsack is packed."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from math import prod
from pathlib import Path

from llmcompress.calib.base import fingerprint
from llmcompress.engine.budget.fisher_run import FisherRun, measure
from llmcompress.engine.budget.fit_to_size import Budget, allotted, impossible, too_little, within_divergence
from llmcompress.engine.budget.losses_file import kept_losses
from llmcompress.engine.budget.type_losses import Losses, candidates
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import PlanError
from llmcompress.formats.gguf.file import Placed, padded
from llmcompress.formats.gguf.mixture import Wishes, asked, is_quantised
from llmcompress.formats.gguf.types import tensor_type
from llmcompress.grids.ggml import GgufTypes, gguf_types
from llmcompress.ledger import Ledger
from llmcompress.recipe import Recipe
from llmcompress.solve.knapsack import Choice, choose
from llmcompress.store.output_file import is_single

SMALLEST = "Q2_K"  # of types that any run may choose, or Q4_0 where rows are too narrow for it
SMALLEST_INFORMED = "IQ1_S"  # or IQ4_NL, as large


def fitted_to_budget(
    recipe: Recipe,
    model: Path,
    options: Options,
    budget: Budget,
    kept: Path | None = None,
    watch: Callable[[int, int], None] = lambda done, of: None,
    begin: Callable[[], object] = lambda: None,
    kl: float | None = None,
) -> tuple[Recipe, Ledger]:
    """The recipe with a type for every tensor, chosen for least loss within `budget`, and notes on how.

    kl: if given, the smallest types whose expected KL divergence is at most this, in nats per token.
    recipe: of a method with types of GGUF; those that its `tensors`, `output` and `embedding` name stay. kept: file of
    losses measured before; where it is missing they are measured and written there. watch: told how many steps of all
    are done. begin: called before measuring. PlanError for a GGUF file, and for a budget below the smallest possible
    size, before anything is measured; for a divergence that no types have, or none within the budget, after it.
    """
    step = recipe.method
    if recipe.transforms:
        raise PlanError(
            f"losses are measured on the model as it is, not after {recipe.transforms[0].name}",
            "give types instead of a budget, or leave the step out",
        )
    assert step is not None
    wished = gguf_types(step)
    assert wished is not None

    def planned(**types: object) -> tuple[Recipe, Plan]:
        changed = step.model_copy(update={"gguf": wished.model_copy(update=types)})
        with_types = recipe.model_copy(update={"steps": (*recipe.transforms, changed)})
        return with_types, make_plan(with_types, model, options)

    if is_single(model):
        raise PlanError(
            f"{model} is a GGUF file: a budget asks for the directory it was made from, to run text through it",
            "give that, or a --type",
        )
    informed = step.needs_calibration or recipe.calibration.imatrix is not None
    _, smallest = planned(type=SMALLEST_INFORMED if informed else SMALLEST, pure=True)
    if _excess(budget, smallest) > 0:
        raise impossible(budget, "types", smallest.estimate.output_bytes, _bits(smallest), "weight")
    begin()
    ledger = Ledger()
    matrices = [item for item in _placed(smallest) if is_quantised(item.tensor.name, item.tensor.shape)]
    losses = _losses(smallest, matrices, informed, kept, ledger, watch)
    kinds = _kinds(matrices, informed, wished)
    least = sum(padded(item.nbytes) for item in matrices)

    items = [_choices(item, kinds[item.tensor.name], losses[item.tensor.name]) for item in matrices]

    def typed(numbers: list[int]) -> tuple[dict[str, str], Recipe, Plan]:
        names = [item.tensor.name for item in matrices]
        chosen = {name: kinds[name][number] for name, number in zip(names, numbers, strict=True)}
        return chosen, *planned(type=_most(chosen), output=None, embedding=None, tensors=chosen)

    if kl is None:
        chosen, result, plan = allotted(
            lambda room: typed(choose(items, room)),
            least - _excess(budget, smallest),
            least,
            lambda made: _excess(budget, made[-1]),
        )
    else:
        chosen, result, plan = typed(_within(items, kl))
        if _excess(budget, plan) > 0:
            raise too_little(budget, kl, plan.estimate.output_bytes, _bits(plan), "weight")
    loss = sum(losses[name][kind] for name, kind in chosen.items() if len(kinds[name]) > 1)
    ledger.note(
        "budget",
        f"{_bits(plan):.3f} bits per weight",
        f"a KL divergence of {loss:.3g} nats per token is expected of rounding",
    )
    return result, ledger


def _placed(plan: Plan) -> list[Placed]:
    return [placed for file in plan.files for placed in file.tensors]


def _weights(plan: Plan) -> int:
    return sum(prod(placed.tensor.shape) for placed in _placed(plan))


def _bits(plan: Plan) -> float:
    """Bits per weight of all tensors."""
    return 8 * sum(padded(placed.nbytes) for placed in _placed(plan)) / _weights(plan)


def _excess(budget: Budget, plan: Plan) -> int:
    """Bytes by which a plan's result exceeds a budget; negative where there is room."""
    if budget.nbytes is not None:
        return plan.estimate.output_bytes - budget.nbytes
    if budget.bits is None:
        return 0
    limit = sum(len(file.header) for file in plan.files) + int(budget.bits * _weights(plan) / 8)
    return plan.estimate.output_bytes - limit


def _losses(
    plan: Plan,
    matrices: list[Placed],
    informed: bool,
    kept: Path | None,
    ledger: Ledger,
    watch: Callable[[int, int], None],
) -> Losses:
    """The losses of the matrices: read from the file `kept` if it exists, else measured now."""
    tensors = [item.tensor for item in matrices]
    wanted = {tensor.name: candidates(tensor.shape[-1], informed) for tensor in tensors}
    fisher_run = cache(lambda: FisherRun.of(plan))  # once, and not where losses of no text are only read
    given = "none" if not informed else "imatrix"
    if plan.calibrated:
        given = fingerprint(fisher_run().tokens)
    of = {"model": plan.headers.contents, "calibration": given}
    return kept_losses(kept, of, wanted, lambda: measure(fisher_run(), tensors, informed, ledger, watch))


def _kinds(matrices: list[Placed], informed: bool, wished: GgufTypes) -> dict[str, tuple[str, ...]]:
    """The types to choose from for each tensor: the one type that the user named for it, or all candidates."""
    wishes = Wishes(output=wished.output, embedding=wished.embedding, tensors=wished.tensors)
    named = asked([item.tensor.name for item in matrices], wishes)
    return {
        item.tensor.name: (item.type.name,)
        if item.tensor.name in named
        else candidates(item.tensor.shape[-1], informed)
        for item in matrices
    }


def _choices(item: Placed, kinds: tuple[str, ...], losses: Mapping[str, float]) -> list[Choice]:
    """Bytes and losses of the types of a tensor; what a type was named for loses nothing that could be helped."""
    return [Choice(padded(tensor_type(kind).nbytes(item.tensor.shape)), losses.get(kind, 0.0)) for kind in kinds]


def _within(items: list[list[Choice]], kl: float) -> list[int]:
    """The number of a type for each tensor, such that all tensors together lose at most `kl` in few bytes."""
    named = [[choice if len(item) > 1 else choice._replace(loss=0.0) for choice in item] for item in items]
    return within_divergence(named, kl, "types", "allow a larger divergence")


def _most(chosen: Mapping[str, str]) -> str:
    """The type of most tensors: llama.cpp names a file after it."""
    return Counter(chosen.values()).most_common(1)[0][0]
