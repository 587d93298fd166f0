"""Progressive groups (qoq) decoded by numpy alone: part of `verify`'s second reader.

Imports nothing that takes part in writing (formats, packing, grids, store), on purpose.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcompress.validate.matrix import StoredMatrix, StoredScheme, shaped
from llmcompress.validate.stored import Array, DamageError, Tensor

PROGRESSIVE_PARTS = ("qweight", "scale_row", "scale_group", "zero_group")
_SHIFTS = np.array([0, 8, 16, 24, 4, 12, 20, 28], np.uint32)  # bit offsets of a word's eight codes


@dataclass(frozen=True)
class ProgressiveMatrix(StoredMatrix):
    """words [rows, width/8] of codes; scale float32 [rows]; multiple and zero int16 [rows, groups]."""

    words: Tensor
    scale: Array
    multiple: Array
    zero: Array

    def whole(self, rows: slice) -> Array:
        """Values after the group's multiple and before the row's scale, int16 [rows, in]."""
        words = np.ascontiguousarray(self.words.array()[rows]).view("<u4")
        codes = (words[:, :, None] >> _SHIFTS & 15).astype(np.int16).reshape(words.shape[0], -1)
        value: Array = (codes - self._spread(self.zero[rows])) * self._spread(self.multiple[rows])
        return value

    def decode(self, rows: slice) -> Array:
        values: Array = self.whole(rows).astype(np.float32) * self.scale[rows, None]
        return values

    def reach(self, rows: slice, weight: Array) -> Array:
        """Half a step plus the distance from the range of the group's 16 codes within -127 ... 127."""
        multiple, zero, scale = self.multiple[rows], self.zero[rows], self.scale[rows, None]
        below, above = (np.minimum(reached, 127 // multiple) * multiple for reached in (zero, 15 - zero))
        outside = np.maximum(weight - self._spread(above) * scale, -self._spread(below) * scale - weight)
        step = self._spread(multiple) * scale
        far: Array = step / 2 + np.maximum(outside, 0) + 1e-4 * step + 1e-6 * np.abs(weight)  # ties in float32
        return far

    def _spread(self, values: Array) -> Array:
        return np.repeat(values, self.scheme.size, axis=1)


def progressive_scheme(module: str, said: Mapping[str, Any]) -> StoredScheme:
    """The scheme that config.json declares for a module; DamageError for an unknown rounding of inputs."""
    size, inputs = int(said["group_size"]), said["inputs"]
    if inputs not in (None, "int8-token"):
        raise DamageError(f"{module} has inputs of {inputs!r}")
    return StoredScheme(4, size, False, inputs=inputs, kind=f"progressive-g{size}")


def read_progressive(module: str, scheme: StoredScheme, part: Mapping[str, Tensor]) -> tuple[StoredMatrix, list[str]]:
    """The matrix of a module and the matrix's faults; DamageError if the matrix cannot be decoded."""
    words = part["qweight"]
    if words.dtype != "I32" or len(words.shape) != 2:
        raise DamageError(f"{words.name} is {words.dtype} {list(words.shape)} and should be a matrix of I32")
    rows, width = words.shape[0], 8 * words.shape[1]
    if scheme.size < 1 or width % scheme.size:
        raise DamageError(f"{module} has {width} inputs, which groups of {scheme.size} do not divide")
    scale = shaped(part["scale_row"], ("F16",), (rows,)).floats()
    shape = (rows, width // scheme.size)
    multiple, zero = (
        shaped(part[name], ("U8",), shape).array().astype(np.int16) for name in ("scale_group", "zero_group")
    )
    if multiple.min() < 1 or multiple.max() > 16:
        raise DamageError(f"{module}.scale_group is not within 1 ... 16")
    wrong = []
    if zero.max() > 15:
        wrong.append(f"{module}.zero_group is not within 0 ... 15")
    if not (np.isfinite(scale) & (scale > 0)).all():
        wrong.append(f"{module}.scale_row has values that are not positive and finite")
    matrix = ProgressiveMatrix(module, scheme, rows, width, words, scale, multiple, zero)
    if not all((np.abs(matrix.whole(block)) <= 127).all() for block in matrix.blocks()):
        wrong.append(f"{module} has codes that leave -127 ... 127")
    return matrix, wrong
