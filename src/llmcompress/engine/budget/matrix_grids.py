"""Choosing a grid for every matrix within a budget: losses by each grid are measured, then a knapsack is packed."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from llmcompress.engine.budget.fit_to_size import Budget, allotted, impossible, too_little, within_divergence
from llmcompress.engine.budget.group_losses import losses_of, within_memory
from llmcompress.engine.budget.matrix_groups import (
    Destination,
    MatrixGroup,
    OfferedGrids,
    matrix_groups,
    outside_groups,
    sized,
    stored_bits,
)
from llmcompress.engine.budget.patterns import CHOSEN, options_of, patterns_of
from llmcompress.engine.plan.estimate import Estimate
from llmcompress.engine.plan.head_matrix import coded_ends, outside_bits
from llmcompress.engine.plan.make_plan import format_of, make_plan
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.targets.verdicts import requested_target
from llmcompress.errors import PlanError
from llmcompress.grids.base import PER_ROW, Spec
from llmcompress.ledger import Ledger
from llmcompress.recipe import Expected, Recipe, build
from llmcompress.significant import significant
from llmcompress.solve.knapsack import Choice, choose
from llmcompress.store.output_file import is_single

Watch = Callable[[int, int], None]


@dataclass(frozen=True)
class GridFitRequest:
    """What a fit must keep within, and what it may choose from.

    kl: if given, the smallest result whose expected KL divergence is at most this is sought, within `budget` if that
    has a limit. bits, group_sizes, types: of the grids to choose from. kept: file of losses; where it does not exist,
    losses are measured and written to it. guidance: store for what gradients say, of which a run with `--guided` makes
    use.
    """

    budget: Budget
    bits: Sequence[int]
    group_sizes: Sequence[int]
    kl: float | None = None
    kept: Path | None = None
    types: Sequence[str] = ("int",)
    guidance: Path | None = None


class ChosenGrid(NamedTuple):
    """Matrices, the grid they get, and the loss that is expected of it."""

    group: MatrixGroup
    grid: Spec
    loss: float


@dataclass(frozen=True)
class GridFit:
    """The recipe that was found, and its plan. losses: the grid and expected loss of each group of matrices."""

    recipe: Recipe
    plan: Plan
    losses: list[ChosenGrid]
    ledger: Ledger


def fitted_to_grids(
    recipe: Recipe,
    model: Path,
    options: Options,
    wanted: GridFitRequest,
    watch: Watch = lambda done, of: None,
    begin: Callable[[int], None] = lambda memory: None,
) -> GridFit:
    """The recipe with a grid for every matrix, chosen for the least expected KL divergence.

    recipe: of a method; types, bits and group sizes that its `set` gives to modules stay. options: nothing is written
    to `out`; losses are measured in the directory `work`, which a later start goes on with and which is removed at the
    end. begin: called before anything is measured with the memory in bytes that measuring will take. watch: called with
    how many steps are done, and of how many. PlanError for what is impossible, where that can be told before anything
    is measured.
    """
    limit, options = (
        options.max_memory,
        replace(options, max_memory=None),
    )  # the limit is for measuring, not for the run
    destination = _destination(recipe, model, options)
    base = _base(recipe, model, options)
    step = recipe.method
    assert step is not None
    offer = OfferedGrids(wanted.types, wanted.bits, wanted.group_sizes, step.set)
    destination = replace(destination, config=base.headers.config)
    groups = matrix_groups([matrix for layer in base.layers for matrix in layer], offer, destination)
    base, outside = _with_outside(base, recipe, model, options, offer, destination)
    measured = [*groups, *outside]
    # a mean is asked for of what is quantised anyway
    fitting = _Fitting(recipe, model, options, groups if wanted.budget.bits else measured, wanted.budget)
    smallest = fitting.smallest()
    ledger = Ledger()
    losses = losses_of(within_memory(base, limit), measured, wanted.kept, wanted.guidance, ledger, watch, begin)
    chosen, plan = fitting.least(losses, smallest) if wanted.kl is None else fitting.within(losses, wanted.kl)
    kl = sum(loss for _, _, loss in chosen)
    estimate = plan.estimate
    bits = _bits(estimate)
    ledger.note(
        "budget",
        f"{bits:.3f} bits per quantised weight",
        f"a KL divergence of {kl:.3g} nats per token is expected of rounding",
    )
    expected = Expected(
        kl=significant(kl), bits_per_quantised_weight=round(bits, 4), output_bytes=estimate.output_bytes
    )
    return GridFit(plan.recipe.model_copy(update={"expected": expected}), plan, chosen, ledger)


def _bits(estimate: Estimate) -> float:
    """Bits per quantised weight: grids are chosen for one matrix at least."""
    assert estimate.bits_per_quantised_weight is not None
    return estimate.bits_per_quantised_weight


def _destination(recipe: Recipe, model: Path, options: Options) -> Destination:
    """Who writes and reads the result; PlanError for GGUF, whose types another command chooses."""
    format_ = format_of(recipe)
    if format_.name == "gguf" or is_single(model):
        raise PlanError("types of GGUF are fitted to a size by another command", "use llmcompress gguf with --bpw")
    return Destination(format_, {}, requested_target(options.target, options.machine, options.repair), options.machine)


def _base(recipe: Recipe, model: Path, options: Options) -> Plan:
    """A plan of the same matrices with a grid and a format that refuse nothing."""
    step = recipe.method
    assert step is not None
    widest = step.model_copy(update={"type": "int", "bits": 8, "group_size": PER_ROW})
    dense = recipe.output.model_copy(update={"format": "dense"})
    changed = recipe.model_copy(update={"steps": (*recipe.transforms, widest), "output": dense})
    return make_plan(changed, model, replace(options, target=None, tp=1, gpu=None, repair=False))


def _with_outside(
    base: Plan, recipe: Recipe, model: Path, options: Options, offer: OfferedGrids, destination: Destination
) -> tuple[Plan, list[MatrixGroup]]:
    """The plan with head and embedding too, where grids may be chosen for them, and their groups.

    What the recipe says of either stays. A rotation makes a head of its own, which is left alone.
    """
    step, format_ = recipe.method, destination.format
    assert step is not None
    found = coded_ends(base.anatomy, format_)
    said = outside_bits(step) or not step.set.keys().isdisjoint(found)
    rotated = any(transform.name == "rotate" for transform in recipe.transforms)
    if format_.holds is None or not found or said or rotated:
        return base, []
    asked = step.model_copy(update={"set": {**step.set, **{module: {"skip": False} for module in found}}})
    whole = _base(recipe.model_copy(update={"steps": (*recipe.transforms, asked)}), model, options)
    groups = outside_groups(whole.head, offer, destination)
    offered = {matrix.module for group in groups for matrix in group.matrices}
    return replace(whole, head=tuple(matrix for matrix in whole.head if matrix.module in offered)), groups


class _Fitting:
    """Makes recipes and plans of the grids chosen for groups, and compares their size with a budget."""

    def __init__(
        self, recipe: Recipe, model: Path, options: Options, groups: Sequence[MatrixGroup], budget: Budget
    ) -> None:
        self.recipe, self.model, self.options, self.groups, self.budget = recipe, model, options, groups, budget
        format_ = format_of(recipe)
        self.costs = [[sized(group, grid, format_) for grid in group.grids] for group in groups]
        alike = all(len(set(costs)) == 1 for costs in self.costs)
        if alike and budget.nbytes is not None:
            raise PlanError(f"files of format {format_.name} are of one size, whatever the grids", "use --bpw")
        if alike or budget.bits is not None:
            self.costs = [[stored_bits(group, grid) for grid in group.grids] for group in groups]

    def planned(self, numbers: Sequence[int]) -> Plan:
        """The plan in which each group has the grid of the given number."""
        grids = [group.grids[number] for group, number in zip(self.groups, numbers, strict=True)]
        modules, outside = dict[str, Spec](), dict[str, Mapping[str, Any]]()
        for group, grid in zip(self.groups, grids, strict=True):
            if group.inside:
                modules |= {matrix.module: grid for matrix in group.matrices}
            elif not grid.unrounded:
                outside |= {matrix.module: {"skip": False, **options_of(grid)} for matrix in group.matrices}
        common = Counter(modules.values()).most_common(1)[0][0]
        step = self.recipe.method
        assert step is not None
        # patterns keep their other options; those that ask for a grid are given anew
        others = {name: {k: v for k, v in said.items() if k not in CHOSEN} for name, said in step.set.items()}
        told = {name: {**others.get(name, {}), **options} for name, options in patterns_of(modules, common).items()}
        patterns = {name: options for name, options in {**others, **told, **outside}.items() if options}
        kept = {name: value for name, value in step.model_dump().items() if name not in CHOSEN}
        options = {**kept, **options_of(common), "set": patterns}
        new = build(type(step), options, f"step {step.name}")
        recipe = self.recipe.model_copy(update={"steps": (*self.recipe.transforms, new)})
        return make_plan(recipe, self.model, self.options)

    def excess(self, plan: Plan) -> float:
        """By how much a plan exceeds the budget, in bytes or bits as the costs are; negative where there is room."""
        if self.budget.nbytes is not None:
            return plan.estimate.output_bytes - self.budget.nbytes
        if self.budget.bits is None:
            return 0
        bits, weights = self._stored(plan)
        return bits - self.budget.bits * weights

    def _stored(self, plan: Plan) -> tuple[int, int]:
        """Bits of all codes with their scales and zero points, and the number of weights."""
        entries = [matrix.entry for matrix in plan.matrices]
        sizes = [entry.out_features * entry.in_features for entry in entries]
        pairs = zip(entries, sizes, strict=True)
        bits = sum(size * entry.grid.bits_per_weight(entry.in_features) for entry, size in pairs if entry.grid)
        return round(bits), sum(sizes)

    def smallest(self) -> Plan:
        """The plan of the smallest grids; PlanError if not even that keeps within the budget."""
        plan = self.planned([costs.index(min(costs)) for costs in self.costs])
        if self.excess(plan) > 0:
            estimate = plan.estimate
            raise impossible(
                self.budget,
                "grids",
                estimate.output_bytes,
                _bits(estimate),
                "quantised weight",
            )
        return plan

    def _choices(self, losses: dict[str, dict[str, float]]) -> list[list[Choice]]:
        return [
            [
                Choice(cost, sum(losses[matrix.module].get(grid.name, 0.0) for matrix in group.matrices))
                for grid, cost in zip(group.grids, costs, strict=True)
            ]
            for group, costs in zip(self.groups, self.costs, strict=True)
        ]

    def _taken(self, choices: Sequence[Sequence[Choice]], numbers: Sequence[int]) -> list[ChosenGrid]:
        return [
            ChosenGrid(group, group.grids[number], options[number].loss)
            for group, options, number in zip(self.groups, choices, numbers, strict=True)
        ]

    def least(self, losses: dict[str, dict[str, float]], smallest: Plan) -> tuple[list[ChosenGrid], Plan]:
        """The grids of least loss within the budget."""
        choices = self._choices(losses)
        least = sum(min(costs) for costs in self.costs)

        def attempt(room: float) -> tuple[list[int], Plan]:
            numbers = choose(choices, room)
            return numbers, self.planned(numbers)

        numbers, plan = allotted(attempt, least - self.excess(smallest), least, lambda made: self.excess(made[1]))
        return self._taken(choices, numbers), plan

    def within(self, losses: dict[str, dict[str, float]], kl: float) -> tuple[list[ChosenGrid], Plan]:
        """The smallest grids within a loss; PlanError if there are none, or none that also keep within the budget."""
        choices = self._choices(losses)
        numbers = within_divergence(choices, kl, "grids", "offer more --bits")
        plan = self.planned(numbers)
        if self.excess(plan) > 0:
            estimate = plan.estimate
            raise too_little(self.budget, kl, estimate.output_bytes, _bits(estimate), "quantised weight")
        return self._taken(choices, numbers), plan
