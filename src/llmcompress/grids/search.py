"""Search for the codes and scales of block types: `fast` in llama-quantize's class, `best` for the least error.

Both work on chunks that stay in a processor's cache and share them out to threads. How they are cut depends on the
shape alone, and every chunk is computed by one thread.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompress.grids import block_trials
from llmcompress.grids.block_fit import BlockParameters, Chunk, fit_groups, round_groups
from llmcompress.grids.block_refine import Candidate, fitted, neighbours, refine, refitted
from llmcompress.grids.blocks import IQ4_LEVELS, BlockGrid, BlockSpec
from llmcompress.grids.coded import Coded
from llmcompress.hardware import at_once
from llmcompress.workers import Workers

_CHUNK = 1 << 16  # weights searched at once
_LEAST_IMPORTANCE = 1e-3  # of the mean: channels that were never active keep a sensible scale
_FLOAT16_MAX = 65504.0


def fast(weight: Tensor, spec: BlockSpec, workers: Workers, importance: Tensor | None = None) -> Coded:
    """Codes and scales of weight [out, in] float32, as fast as llama-quantize and with less error.

    Squared errors count as they do there: by importance [in] times sqrt(mean square + x^2), or without importance by
    x^2, which types with minima soften to abs(x) + root mean square: large weights matter more than their share. For
    less KL divergence than there, Q3_K softens it too, and errors in IQ4, whose levels crowd around zero, count alike.
    """
    return _search(weight, spec, workers, importance, _fast)


def best(weight: Tensor, spec: BlockSpec, workers: Workers, importance: Tensor | None = None) -> Coded:
    """Codes and scales of weight [out, in] float32 of the least error found: the sum of importance * (w - q)^2.

    importance [in]: the diagonal of the Gram matrix of the inputs; None for ones. Scales, minima and the units they are
    multiples of are refined together. What `fast` chooses is a candidate, so that no block is worse.
    """
    return _search(weight, spec, workers, importance, _best)


@dataclass(frozen=True)
class _Piece:
    """Blocks x [groups per block, group size, blocks] of some rows, their importance likewise.

    rows: how many. Blocks follow one another by row.
    """

    spec: BlockSpec
    x: Tensor
    importance: Tensor | None
    rows: int

    @property
    def energy(self) -> Tensor:
        """[blocks]: the mean square that llama-quantize adds to the square of a weight.

        Of a block, or of the row for types of one even group; twice that where it doubles it.
        """
        energy = self.x.square().mean((0, 1))
        if self.spec.multiples is None and not self.spec.curved:
            blocks = len(energy) // self.rows
            return energy.view(self.rows, blocks).mean(1, keepdim=True).expand(-1, blocks).reshape(-1)
        return energy if self.spec.bits == 2 else energy.mul_(2)


def _fast(piece: _Piece) -> tuple[Chunk, BlockParameters]:
    spec, weighted = piece.spec, piece.importance is not None
    chunk = Chunk(spec, piece.x, _by_magnitude(piece))
    stored = round_groups(chunk, *fit_groups(chunk, block_trials.quick(spec, weighted=weighted)), block_trials.UNITS)
    if spec.multiples is None or (spec.bits == 3 and not weighted):  # llama-quantize takes no time over these
        return chunk, stored
    start = refitted(chunk, stored)
    return chunk, neighbours(chunk, Candidate(start, torch.full_like(start.multiples, torch.inf)), 1, 0).stored


def _best(piece: _Piece) -> tuple[Chunk, BlockParameters]:
    spec = piece.spec
    weights = torch.ones_like(piece.x) if piece.importance is None else piece.importance
    quick, chunk = _fast(piece)[1], Chunk(spec, piece.x, weights)
    own = round_groups(chunk, *fit_groups(chunk, block_trials.thorough(spec)), block_trials.UNITS)
    start = Candidate.of(chunk, quick).or_better(fitted(chunk, Candidate.of(chunk, own)))
    return chunk, refine(chunk, start, block_trials.reaches(spec)).stored


def _by_magnitude(piece: _Piece) -> Tensor:
    """What squared errors are weighed by."""
    spec, x = piece.spec, piece.x
    if piece.importance is None:
        if spec.curved:
            return torch.ones_like(x)
        if spec.minima or spec.bits == 3 or spec.multiples is None:
            return (x * x).mean(1, keepdim=True).sqrt_() + x.abs()
        return x * x
    if spec.name == "Q6_K":
        return piece.importance
    return (x * x).add_(piece.energy).sqrt_().mul_(piece.importance)


def _search(
    weight: Tensor,
    spec: BlockSpec,
    workers: Workers,
    importance: Tensor | None,
    choose: Callable[[_Piece], tuple[Chunk, BlockParameters]],
) -> Coded:
    limit = _limit(spec)
    floored = None if importance is None else _laid(_floored(importance).view(1, -1), spec).unsqueeze(2)

    def search(part: Tensor) -> Coded:
        part = part.to(torch.float32)
        x = _laid(part, spec).clamp_(-limit, limit)
        spread = None if floored is None else floored.expand(-1, -1, len(part), -1).reshape(x.shape)
        chunk, stored = choose(_Piece(spec, x, spread, len(part)))
        return _coded(chunk, stored, part.shape)

    return Coded.by_rows(weight, at_once(weight, _CHUNK), workers, search)


def _coded(chunk: Chunk, stored: BlockParameters, shape: torch.Size) -> Coded:
    spec, rows = chunk.spec, shape[0]

    def by_row(value: Tensor | None, size: int) -> Tensor | None:
        return None if value is None else value.t().reshape(rows, shape[1] // size)

    codes, d = chunk.codes(stored.affine).view(shape), stored.d.view(rows, shape[1] // spec.block_size)
    dmin = by_row(stored.dmin, spec.block_size)
    if spec.multiples is None:
        return Coded(codes, BlockGrid(spec, d, None, dmin))
    multiples, minima = by_row(stored.multiples, spec.group_size), by_row(stored.minima, spec.group_size)
    return Coded(codes, BlockGrid(spec, d, multiples, dmin, minima))


def _laid(rows: Tensor, spec: BlockSpec) -> Tensor:
    """Rows [out, in] as [groups per block, group size, blocks]."""
    return rows.reshape(-1, spec.block_size).t().contiguous().view(spec.groups_per_block, spec.group_size, -1)


def _limit(spec: BlockSpec) -> float:
    """The largest magnitude that a block can hold."""
    level = -IQ4_LEVELS[0] if spec.curved else max(spec.middle, spec.levels - 1 - spec.middle)
    return _FLOAT16_MAX * level * (1 if spec.multiples is None else max(map(abs, spec.multiples)))


def _floored(importance: Tensor) -> Tensor:
    """Importance in units of its mean, never zero."""
    mean = importance.to(torch.float32).mean()
    if mean <= 0:
        return torch.ones_like(importance, dtype=torch.float32)
    return (importance / mean).clamp_min_(_LEAST_IMPORTANCE)
