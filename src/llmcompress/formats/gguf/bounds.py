"""How far rounding to a type of GGUF takes a tensor at most: further, and the type did not hold the values."""

import math

_GRIDS = {  # values that share a scale, and steps across their range; for IQ4 the widest step counts
    "Q8_0": (32, 254), "Q6_K": (16, 63), "Q5_0": (32, 31), "Q5_1": (32, 31), "Q5_K": (32, 31), "Q4_0": (32, 15),
    "Q4_1": (32, 15), "Q4_K": (32, 15), "IQ4_NL": (32, 10), "IQ4_XS": (32, 10), "Q3_K": (16, 7),
}  # fmt: skip
_SUBNORMAL = 2.0**-25 * 4096  # half a step of a subnormal scale, times the largest codes
_ZEROS = 1 - 1e-6  # the error of values that all became zeros, but for the roundings of sums


def farthest(kind: str, energy: float, count: int) -> float:
    """The largest relative error of `count` values, of which `energy` is the sum of squares, in a type.

    Always below 1, the error of zeros. Scales of small values are subnormal in float16, and coarse.
    """
    group, steps = _GRIDS.get(kind, (1, 1))
    return min(_ZEROS, math.sqrt(group) / steps + _SUBNORMAL * math.sqrt(count / energy)) if energy else _ZEROS
