"""Rounding the inputs of a matrix to codes, as runtimes do while they run."""

from dataclasses import dataclass
from math import floor, log2

import torch
from torch import Tensor

from llmcompress.grids import e2m1, e4m3
from llmcompress.grids.base import InputSpec
from llmcompress.grids.int8_inputs import BesideOutliers, ByThreshold
from llmcompress.grids.scales import SMALLEST_SCALE
from llmcompress.stats.absmax import AbsMax
from llmcompress.stats.magnitudes import Magnitudes

_TOP = {
    "int": 127.5,
    "fp8": e4m3.LARGEST,
    "fp4": e2m1.LARGEST,
}  # scales in the largest magnitude; half a step of it is clipped where it is int
_EXPONENT = 0x7F800000  # of a float32
_OF_ZEROS = 0.125  # the scale of a group whose own is rounded to zero, as compressed-tensors has it
_LEAST = 1e-5  # magnitude for which a scale is made, so that none is zero
_SHARES = [1 - step / 100 for step in range(100)]  # of the largest magnitude, tried as ranges

Seen = AbsMax | Magnitudes


@dataclass(frozen=True)
class InputGrid:
    """The values inputs may take.

    scale [1] float32: of all inputs, or the divisor of scales of groups, or that of each token [..., 1]; None where
    every token has its own scale.
    """

    spec: InputSpec
    scale: Tensor | None = None

    @property
    def integers(self) -> bool:
        """Whether all inputs become whole numbers times a scale, which kernels multiply as they are."""
        return self.spec.type == "int"

    def scales(self, x: Tensor) -> Tensor:
        """Scales float32 of an input [..., in]: [..., 1], [..., in] where groups have their own, or [1]."""
        if self.spec.group is not None:
            return self._of_groups(x, self.spec.group)
        if self.scale is not None:
            return self.scale
        most = x.abs().amax(dim=-1, keepdim=True).to(torch.float32)
        return _over(most.clamp_min_(_LEAST), _TOP[self.spec.type])

    def _of_groups(self, x: Tensor, size: int) -> Tensor:
        """[..., in]; the last group may not be full."""
        full = torch.nn.functional.pad(x, (0, -x.shape[-1] % size))
        full = full.view(*x.shape[:-1], -1, size)
        most = full.abs().amax(dim=-1).to(torch.float32)
        top = _TOP[self.spec.type]
        if self.scale is not None:
            small = e4m3.rounded_(_over(most, top) * self.scale)
            scale = torch.where(small == 0, _OF_ZEROS, small) / self.scale
        elif self.spec.powers:
            scale = _power(most.clamp_min_(_LEAST), top)
        else:
            scale = _over(most.clamp_min_(_LEAST), top)
        return scale.repeat_interleave(size, dim=-1)[..., : x.shape[-1]]

    def levels(self, x: Tensor, scales: Tensor) -> Tensor:
        """The nearest levels of an input [..., in], float32, in units of its scales."""
        return _nearest_(x.to(torch.float32) / scales, self.spec)

    def rounded(self, x: Tensor) -> Tensor:
        """An input [..., in] as the codes of its values say, in its own type."""
        scales = self.scales(x)
        return self.levels(x, scales).mul_(scales).to(x.dtype)

    def to(self, device: torch.device | str) -> "InputGrid":
        """The same on another device."""
        return self if self.scale is None else InputGrid(self.spec, self.scale.to(device))


def _over(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, rounded once on every device: on a GPU torch multiplies by the inverse of a number."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def foreseen(x: Tensor, spec: InputSpec | None) -> Tensor:
    """An input [..., in] as it will be rounded, as far as calibration can tell before it has ended.

    A divisor of scales is known then: until then each token has that of its own largest magnitude, so that only which
    scales are subnormal differs. One scale for all inputs is not known, and they stay as they are. Without `spec` too.
    """
    if spec is None:
        return x
    if spec.dynamic:
        return InputGrid(spec).rounded(x)
    if spec.group is None:
        return x
    peaks = x.abs().amax(dim=-1, keepdim=True).to(torch.float32).clamp_min_(_LEAST)
    return InputGrid(spec, e4m3.LARGEST * e2m1.LARGEST / peaks).rounded(x)


Rounding = InputGrid | ByThreshold | BesideOutliers
"""All the ways to round inputs that a checkpoint can ask for."""


def fixed_for(rounding: Rounding | None, spec: InputSpec) -> Tensor | None:
    """What is fixed of inputs that are rounded as `spec` says [1] float32; None where nothing is, or by another."""
    return rounding.scale if isinstance(rounding, InputGrid) and rounding.spec == spec else None


def name_of(rounding: Rounding | None) -> str | None:
    """The name that `--activations` has for a rounding of inputs; None where it has no such."""
    if rounding is None:
        return "none"
    return rounding.spec.name if isinstance(rounding, InputGrid) else None


def divisor(seen: AbsMax) -> Tensor:
    """The divisor [1] float32 of scales of groups that holds all that was seen."""
    return torch.tensor([e4m3.LARGEST * e2m1.LARGEST / max(seen.peak, _LEAST)], dtype=torch.float32)


def static_scale(spec: InputSpec, seen: Seen, percentile: float | None, dtype: torch.dtype) -> Tensor:
    """The scale [1] float32, exact in the stored type `dtype`, of inputs of which `seen` is known.

    AbsMax: the range holds all that was seen. Magnitudes: it holds `percentile` per cent, or, without one, as much as
    makes the mean squared error of rounding least.
    """
    if isinstance(seen, AbsMax):
        most = seen.peak
    elif percentile is not None:
        most = seen.percentile(percentile)
    else:
        most = _least_error(spec, seen)
    scale = torch.tensor([max(most, _LEAST) / _TOP[spec.type]], dtype=torch.float32)
    return scale.to(dtype).to(torch.float32).clamp_min(SMALLEST_SCALE)


def _least_error(spec: InputSpec, seen: Magnitudes) -> float:
    """The range that loses least; of equals the widest."""
    values, counts = seen.present()
    if not values.numel():
        return 0.0
    best, least = 0.0, float("inf")
    for share in _SHARES:
        most = share * float(values[-1])
        scale = most / _TOP[spec.type]
        error = _nearest_(values / scale, spec).mul_(scale).sub_(values).to(torch.float64)
        loss = float((error.square_() * counts).sum())
        if loss < least:
            best, least = most, loss
    return best


def _power(most: Tensor, top: float) -> Tensor:
    """Powers of two for the largest magnitudes float32 of groups, as compressed-tensors has them.

    From 1.75 times a power of two on the next one is taken, which is the least that clips no float of 8 bits; of 4
    bits it clips what lies above 6.
    """
    whole = (most.contiguous().view(torch.int32) + (1 << 21)) & _EXPONENT
    return whole.view(torch.float32) / 2.0 ** floor(log2(top))


def _nearest_(values: Tensor, spec: InputSpec) -> Tensor:
    """Values in units of a scale to the nearest levels, in place."""
    if spec.type == "int":
        return values.round_().clamp_(-128, 127)
    return e4m3.rounded_(values) if spec.type == "fp8" else e2m1.rounded_(values)
