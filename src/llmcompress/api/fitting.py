"""Recipes that fit a size: what `fit` does, and `gguf --bpw`."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmcompress.api.quiet import quiet_libraries
from llmcompress.api.recipes import GGUF, method_recipe
from llmcompress.api.steps import Watch, watched
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.process.ranks import refuse_several
from llmcompress.errors import RecipeError
from llmcompress.grids.base import PER_ROW
from llmcompress.grids.grid_type import grid_types
from llmcompress.grids.integer import INTEGER_BITS
from llmcompress.ledger import LedgerEntry
from llmcompress.recipe import Recipe

if TYPE_CHECKING:
    from llmcompress.engine.budget.fit_to_size import Budget
    from llmcompress.engine.budget.matrix_grids import GridFitRequest

GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class FitResult:
    """A recipe that fits a size. ledger: what is expected of it, in words.

    losses: (matrices of one grid, that grid, expected KL divergence in nats per token); none for types of GGUF.
    """

    recipe: Recipe
    ledger: tuple[LedgerEntry, ...]
    losses: Sequence[tuple[Sequence[str], str, float]] = field(default=(), repr=False)

    def save(self, file: str | Path, *, overwrite: bool = False) -> None:
        """Write the recipe as YAML. PlanError for a file that exists, without `overwrite`."""
        from llmcompress.store.files import refuse_existing
        from llmcompress.store.unfinished import write_whole

        refuse_existing(Path(file), overwrite)
        write_whole(Path(file), self.recipe.as_yaml().encode(), overwrite)


def fit(
    model: str | Path,
    *,
    size: int | str | None = None,
    bpw: float | None = None,
    kl: float | None = None,
    method: Literal["gptq", "rtn", "gguf"] = "gptq",
    bits: Sequence[int] = INTEGER_BITS,
    group_size: Sequence[int] = GROUP_SIZES,
    types: str | Sequence[str] = "int",
    losses: str | Path | None = None,
    options: Options | None = None,
    progress: Watch | None = None,
    stop: Callable[[int], bool] | None = None,
    **settings: Any,
) -> FitResult:
    """A recipe that gives every matrix the grid by which a model loses least within a size.

    size: of all weight files, in bytes or as text such as "90MB". bpw: bits per weight instead. kl: the smallest result
    whose expected KL divergence is at most this, in nats per token; within a size, where one is given too. types: those
    that may be chosen, such as "nvfp4,fp8"; bits, group_size: those of types that leave them open. method: "gguf"
    chooses types of a GGUF file instead. losses: a file that keeps what is measured, for other sizes. options: `work`
    is where finished layers are kept until all are measured ("fit.work"), and `stats` a store in which a run with
    `guided` finds what gradients say. settings: options of the command `fit`, or
    `gguf`, as `compress` takes them. Raises LlmcompressError.

        >>> fitted = llmcompress.fit("model", bpw=5.5, method="rtn", bits=(4, 8), samples=2, length=64)
        >>> fitted.recipe.expected.bits_per_quantised_weight <= 5.5
        True
        >>> result = llmcompress.compress("model", fitted.recipe, "model-fitted")
    """
    refuse_several("fit() of Python")
    kept = None if losses is None else Path(losses)
    if method == GGUF:
        room = budget_or_divergence(size, bpw, kl)
        recipe = type_recipe(settings)
        return fitted_types(recipe, Path(model), room, kept, options or Options(), progress, stop, kl=kl)
    wanted = wanted_of(size, bpw, kl, kept, bits, group_size, types)
    work = Path("fit.work") if options is None or options.work is None else options.work
    return fitted_grids(method_recipe(method, settings), Path(model), wanted, work, options, progress, stop)


def fitted_grids(
    recipe: Recipe,
    model: Path,
    wanted: "GridFitRequest",
    work: Path,
    options: Options | None = None,
    progress: Watch | None = None,
    stop: Callable[[int], bool] | None = None,
    begin: Callable[[int], None] = lambda memory: None,
    guidance: Path | None = None,
) -> FitResult:
    """The recipe with bits and a group size for every matrix.

    begin: told what memory it will take, in bytes. guidance: a store, in which a run with `--guided` then finds what
    gradients say; that of options where there is none.
    """
    from llmcompress.engine.budget.matrix_grids import fitted_to_grids

    options = options or Options()
    wanted = replace(wanted, guidance=guidance or options.stats)
    inside = replace(options, out=work / "out", work=work, overwrite=False)
    watch = watched(progress, stop, f"finished layers are kept in {work}; run the same command again to go on")
    with quiet_libraries():
        found = fitted_to_grids(recipe, model, inside, wanted, watch, begin)
    losses = [([matrix.module for matrix in item.matrices], grid.name, loss) for item, grid, loss in found.losses]
    return FitResult(found.recipe, tuple(found.ledger.entries), losses)


def fitted_types(
    recipe: Recipe,
    model: Path,
    budget: "Budget",
    losses: Path | None,
    options: Options,
    progress: Watch | None = None,
    stop: Callable[[int], bool] | None = None,
    begin: Callable[[], object] = lambda: None,
    kl: float | None = None,
) -> FitResult:
    """The recipe with a type of GGUF for every tensor. begin: called once the budget is known to be possible."""
    from llmcompress.engine.budget.gguf_types import fitted_to_budget

    kept = "losses are kept by --losses once all are measured; run the same command again"
    with quiet_libraries():
        watch = watched(progress, stop, kept)
        found, ledger = fitted_to_budget(recipe, model, options, budget, losses, watch, begin, kl)
    return FitResult(found, tuple(ledger.entries))


def type_recipe(settings: dict[str, Any]) -> Recipe:
    """The recipe of a GGUF file whose types are still to be chosen."""
    from llmcompress.engine.budget.gguf_types import SMALLEST

    return method_recipe(GGUF, {**settings, "type": SMALLEST})


def wanted_of(
    size: int | str | None,
    bpw: float | None,
    kl: float | None,
    losses: Path | None,
    bits: str | Sequence[int] = INTEGER_BITS,
    group_size: str | Sequence[int] = GROUP_SIZES,
    types: str | Sequence[str] = "int",
) -> "GridFitRequest":
    """RecipeError unless one budget is given, or a divergence, all numbers are some, and all types are known."""
    from llmcompress.engine.budget.matrix_grids import GridFitRequest

    room = budget_or_divergence(size, bpw, kl)
    widths, groups = _numbers("--bits", bits, INTEGER_BITS), _numbers("--group-size", group_size, None)
    return GridFitRequest(room, widths, groups, kl, losses, _types(types))


def _types(given: str | Sequence[str]) -> list[str]:
    """Names of types that `--type` takes; RecipeError for another."""
    known = [name for name, kind in grid_types().items() if kind.chosen]
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)
    for name in names:
        if name not in known:
            raise RecipeError(f"--type {name} is none that there is", f"choose from --type {','.join(known)}")
    return list(dict.fromkeys(names))


def budget_or_divergence(size: int | str | None, bpw: float | None, kl: float | None) -> "Budget":
    """The budget, of any size where a divergence is given; RecipeError for none of all, and for what is no number."""
    if size is None and bpw is None and kl is None:
        raise RecipeError("nothing says how large the result is to be", "give --size, --bpw or --kl")
    if kl is not None:
        _refuse_no_number("--kl", kl, 0.05)
    return budget_of(size, bpw)


def budget_of(size: int | str | None, bpw: float | None) -> "Budget":
    """The budget of a size in bytes or as text, or of bits per weight; RecipeError for both, or for what is no size."""
    from llmcompress.engine.budget.fit_to_size import Budget

    if size is not None and bpw is not None:
        raise RecipeError("--size and --bpw both say how large the result is to be", "give one of them")
    if bpw is not None:
        _refuse_no_number("--bpw", bpw, 4.5)
    return Budget(size_in_bytes("--size", size) if isinstance(size, str) else size, bpw)


def size_in_bytes(option: str, text: str) -> int:
    """A size with its unit in bytes; without one it is in GB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([kKMG]?B|)", text.strip())
    scale = {"": 1e9, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}.get(found[2].upper() if found else "?")
    if found is None or scale is None or float(found[1]) * scale > 1e18:
        raise RecipeError(f"{option} {text!r} is no size", f"write for example {option} 90MB")
    return int(float(found[1]) * scale)


def _refuse_no_number(option: str, value: float, usual: float) -> None:
    """RecipeError for bits, or a divergence, that nothing can have."""
    if not 0 < value <= 64:  # not for nan either
        raise RecipeError(f"{option} {value} is no number that it can be", f"write for example {option} {usual}")


def _numbers(option: str, given: str | Sequence[int], known: tuple[int, ...] | None) -> list[int]:
    """Whole numbers, as they are or as text with commas between them; RecipeError for one that is not `known`."""
    example = ",".join(map(str, known or GROUP_SIZES))
    try:
        numbers = [int(part) for part in (given.split(",") if isinstance(given, str) else given)]
    except ValueError:
        raise RecipeError(
            f"{option} {given!r} is no list of numbers", f"write for example {option} {example}"
        ) from None
    for number in numbers:
        if number not in known if known is not None else not (number == PER_ROW or 0 < number < 1 << 31):
            raise RecipeError(f"{option} {number} is none that there is", f"choose from {option} {example}")
    return list(dict.fromkeys(numbers))
