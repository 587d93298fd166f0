"""MXFP4 (compressed-tensors' mxfp4-pack-quantized) decoded by numpy alone: part of `verify`'s second reader.

Imports nothing that takes part in writing (formats, packing, grids, store), on purpose.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcompress.validate.matrix import StoredMatrix, StoredScheme, nearest, shaped
from llmcompress.validate.stored import Array, DamageError, Tensor

MXFP4 = "mxfp4-pack-quantized"
MXFP4_PARTS = ("weight_packed", "weight_scale")
_GROUP = 32
_SIGNED: Array = np.array([s * m for s in (1, -1) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)


@dataclass(frozen=True)
class StoredMxfp4(StoredMatrix):
    """packed uint8 [rows, in/2], the first of two codes in the low bits; exponent e uint8 [rows, in/32]: 2^(e-127)."""

    packed: Array
    exponent: Array

    def decode(self, rows: slice) -> Array:
        packed = np.ascontiguousarray(self.packed[rows])
        codes = np.stack([packed & 15, packed >> 4], axis=2).reshape(packed.shape[0], -1)
        values: Array = _SIGNED[codes] * self._scale(rows)
        return values

    def reach(self, rows: slice, weight: Array) -> Array:
        scale = self._scale(rows)
        far: Array = nearest(weight, (level * scale for level in _SIGNED)) + 1e-6 * np.abs(weight)  # ties in float32
        return far

    def _scale(self, rows: slice) -> Array:
        return np.repeat(np.ldexp(np.float32(1), self.exponent[rows].astype(np.int32) - 127), _GROUP, axis=1)


def mxfp4_scheme(module: str, weights: Mapping[str, Any], inputs: str | None) -> StoredScheme:
    """What config.json says of a module; DamageError where it is not what vLLM takes for MXFP4."""
    wanted = {"num_bits": 4, "type": "float", "group_size": _GROUP, "symmetric": True, "scale_dtype": "torch.uint8"}
    if wrong := [key for key, value in wanted.items() if weights.get(key) != value]:
        raise DamageError(f"{module} is {MXFP4}, and its weights have another {wrong[0]} than {wanted[wrong[0]]}")
    if inputs is not None:
        raise DamageError(f"{module} is {MXFP4} with inputs of {inputs}")
    return StoredScheme(4, _GROUP, True, stored=MXFP4, kind="mxfp4")


def read_mxfp4(module: str, scheme: StoredScheme, tensors: Mapping[str, Tensor]) -> tuple[StoredMatrix, list[str]]:
    """The matrix of a module and what is wrong with it; DamageError where it cannot be decoded at all."""
    packed, scale = (tensors[f"{module}.{name}"] for name in MXFP4_PARTS)
    if len(packed.shape) != 2 or 2 * packed.shape[1] % _GROUP:
        raise DamageError(f"{packed.name} is no matrix of whole groups")
    rows, width = packed.shape[0], 2 * packed.shape[1]
    shaped(packed, ("U8",), (rows, width // 2))
    exponent = shaped(scale, ("U8",), (rows, width // _GROUP)).array()
    wrong = [f"{scale.name} has scales that are no numbers"] if (exponent == 255).any() else []
    return StoredMxfp4(module, scheme, rows, width, packed.array(), exponent), wrong
