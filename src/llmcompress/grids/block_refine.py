"""Joint refinement of what a block stores: multiples and minima by local search, d and dmin by least squares.

Every step is judged by the error of the codes nearest to the values that would be stored, so that none makes a block
worse. Layout of arrays as in `block_fit`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmcompress.grids.block_fit import TINY, BlockParameters, Chunk, reciprocal
from llmcompress.grids.scales import float16

_APART = 1e-4  # below this the codes do not tell scale and minimum apart


@dataclass
class Candidate:
    """What blocks might store, and the error of each group [groups per block, blocks]."""

    stored: BlockParameters
    error: Tensor

    @classmethod
    def of(cls, chunk: Chunk, stored: BlockParameters) -> "Candidate":
        fit = stored.affine
        return cls(stored, chunk.error(chunk.moved(fit.least), fit.scale, reciprocal(fit.scale)))

    def or_better(self, other: "Candidate") -> "Candidate":
        """For each block the one of less error; this one where they are equal."""
        keep = self.error.sum(0) <= other.error.sum(0)
        return Candidate(self.stored.where(keep, other.stored), torch.where(keep, self.error, other.error))


def refine(chunk: Chunk, start: Candidate, reaches: list[tuple[int, int]]) -> Candidate:
    """Alternate both steps, once for each pair of reaches of the local search."""
    best = fitted(chunk, start)
    for reach in reaches:
        best = fitted(chunk, neighbours(chunk, best, *reach))
    return best


def fitted(chunk: Chunk, candidate: Candidate) -> Candidate:
    """d and dmin by least squares for the codes of a candidate, where that is better."""
    return candidate.or_better(Candidate.of(chunk, refitted(chunk, candidate.stored)))


def refitted(chunk: Chunk, stored: BlockParameters) -> BlockParameters:
    """d and dmin by least squares for the codes nearest to what is stored; worse only by their rounding."""
    sums, whole = chunk.sums(chunk.levels(stored.affine)), stored.multiples
    square, along = (whole * whole * sums.square).sum(0), (whole * sums.along).sum(0)
    if stored.minima is None or stored.dmin is None or sums.level is None:
        return replace(stored, d=float16(along / square.clamp_min(TINY)))
    cross = (whole * stored.minima * sums.level).sum(0)
    least_square = (stored.minima * stored.minima * chunk.w_sum).sum(0)
    least_along = (stored.minima * chunk.x_sum).sum(0)
    product, determinant = square * least_square, square * least_square - cross * cross
    apart = determinant > _APART * product
    determinant = torch.where(apart, determinant, 1.0)
    d = float16((along * least_square - cross * least_along) / determinant)
    dmin = float16((cross * along - square * least_along) / determinant)
    return replace(stored, d=torch.where(apart, d, stored.d), dmin=torch.where(apart, dmin, stored.dmin))


def neighbours(chunk: Chunk, candidate: Candidate, reach: int, least_reach: int) -> Candidate:
    """For each group the best multiple within `reach` of the one it has, with the best minimum within `least_reach`.

    Where multiples have signs, both are tried. Types of one group per block move d and dmin themselves.
    """
    spec, stored = chunk.spec, candidate.stored
    steps, shifts = (
        torch.arange(-most, most + 1, device=stored.d.device).view(-1, 1, 1) for most in (reach, least_reach)
    )
    if spec.multiples is None:
        d = float16(stored.d * (1 + steps / (2 * spec.levels)))  # moves the outermost level by a quarter of a step
        dmin = None if stored.dmin is None else float16(stored.dmin + stored.d * shifts / 8)
        error, place, least_place = _best_pair(chunk, d, dmin)
        moved = replace(stored, d=_picked(d, place)[0])
        if dmin is not None:
            moved = replace(moved, dmin=_picked(dmin, least_place)[0])
        return candidate.or_better(Candidate(moved, error))
    multiples = (stored.multiples + steps).clamp_(*spec.multiples)
    if spec.multiples[0] < 0 and spec.bits < 6:  # with many levels both ends are alike
        multiples = torch.cat([multiples, (-multiples).clamp_(*spec.multiples)])
    if stored.minima is None or stored.dmin is None:
        error, place, _ = _best_pair(chunk, stored.d * multiples, None)
        better = error < candidate.error
        moved = replace(stored, multiples=torch.where(better, _picked(multiples, place), stored.multiples))
        return Candidate(moved, torch.where(better, error, candidate.error))
    minima = (stored.minima + shifts).clamp_(*spec.multiples)
    error, place, least_place = _best_pair(chunk, stored.d * multiples, stored.dmin * minima)
    better = error < candidate.error
    moved = replace(
        stored,
        multiples=torch.where(better, _picked(multiples, place), stored.multiples),
        minima=torch.where(better, _picked(minima, least_place), stored.minima),
    )
    return Candidate(moved, torch.where(better, error, candidate.error))


def _best_pair(chunk: Chunk, scales: Tensor, leasts: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The least error of each group for all pairs of scales and minima [tried, groups per block, blocks].

    Returns it [groups per block, blocks], and which scale and which minimum gave it.
    """
    inverses = reciprocal(scales)
    rows = [None] if leasts is None else list(leasts)
    errors = torch.empty(len(rows), *scales.shape, device=scales.device)
    for row, least in zip(errors, rows, strict=True):
        values = chunk.moved(least)
        for error, scale, inverse in zip(row, scales, inverses, strict=True):
            chunk.error(values, scale, inverse, out=error)
    error, place = errors.flatten(0, 1).min(0)
    return error, place % len(scales), place // len(scales)


def _picked(values: Tensor, place: Tensor) -> Tensor:
    """values[place] for each group."""
    return values.gather(0, place.unsqueeze(0))[0]
