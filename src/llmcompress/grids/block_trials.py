"""Which inverse scales and which neighbours a search tries, by type of block.

Chosen by the errors they leave on Gaussian and Student-t weights. GGML's quantisers walk along one line of inverse
scales; fewer of them, some with the least value clipped too, leave less error. The unclipped range is always among
them, which is what weights need that lie on a grid of the type already.
"""

from llmcompress.grids.block_fit import Trial
from llmcompress.grids.blocks import IQ4_LEVELS, BlockSpec

_EXTENT = float(-IQ4_LEVELS[0])

UNITS = (-12.0, -6.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)
"""How far beyond the last multiple the extreme scale of a block may lie when its unit is chosen."""


def quick(spec: BlockSpec, *, weighted: bool) -> list[Trial]:
    """Few trials, for a search that is as fast as GGML's; weighted: with an importance, where GGML's is slower too."""
    if spec.curved:
        return _signed(_EXTENT, _spaced(-0.1, 0.2, 4), both=True)
    top, half = spec.levels - 1, spec.middle - spec.lowest
    if spec.minima and spec.multiples is None:
        return [Trial(top + step, start) for start in (1.0, 0.93) for step in _spaced(-1.05, 1.05, 7)]
    if spec.minima:
        steps = _spaced(-0.9, 0.9, 5)
        return [Trial(top + step) for step in steps] + [Trial(top + step, 0.9) for step in steps[:-1]]
    if spec.bits == 3:
        return _signed(half, _spaced(-0.225, 0.375, 5) if weighted else _spaced(-0.225, 0.225, 3))
    if spec.bits == 4:
        return _signed(half, _spaced(-0.12, 0.12, 7))
    return [Trial(-float(half + step)) for step in range(-2, 3)]


def thorough(spec: BlockSpec) -> list[Trial]:
    """Many trials, of which a part fits any group well."""
    if spec.minima:
        steps = _spaced(-1.6, 1.6, 9)
        return [Trial(spec.levels - 1 + step, start) for start in (1.0, 0.95, 0.9, 0.8) for step in steps]
    extent = _EXTENT if spec.curved else spec.middle - spec.lowest
    return _signed(extent, _spaced(-0.24, 0.36, 16), both=spec.bits < 6)


def reaches(spec: BlockSpec) -> list[tuple[int, int]]:
    """How far multiples and minima are moved, in each round of refinement."""
    if spec.minima or spec.multiples is None:
        return [(4, 4), (1, 1)]
    wide = spec.multiples[1] // 8
    return [(wide, 0), (max(wide // 4, 1), 0)]


def _signed(extent: float, steps: list[float], *, both: bool = False) -> list[Trial]:
    """Scales that put the extreme entry near the lowest level; `both`: and near the highest."""
    return [Trial(sign * extent * (1 + step)) for sign in ((-1, 1) if both else (-1,)) for step in steps]


def _spaced(first: float, last: float, count: int) -> list[float]:
    return [first + (last - first) * place / (count - 1) for place in range(count)]
