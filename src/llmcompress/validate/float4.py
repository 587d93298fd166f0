"""MXFP4 and NVFP4 as compressed-tensors stores them, NVFP4 as ModelOpt does, decoded by numpy alone.

Part of `verify`'s second reader: imports nothing that takes part in writing (formats, packing, grids, store), on
purpose.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcompress.validate.matrix import E4M3, StoredMatrix, StoredScheme, nearest, shaped, zero_scales
from llmcompress.validate.stored import Array, DamageError, Tensor

_MXFP4, _NVFP4 = "mxfp4-pack-quantized", "nvfp4-pack-quantized"
FLOAT4_PARTS: Mapping[str, tuple[str, ...]] = {
    _MXFP4: ("weight_packed", "weight_scale"),
    _NVFP4: ("weight_packed", "weight_scale", "weight_global_scale"),
}
"""Parts of a matrix, by how it is stored."""

_SAID: Mapping[str, Mapping[str, Any]] = {
    _MXFP4: {"group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8"},
    _NVFP4: {"group_size": 16, "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"},
}
_SIGNED: Array = np.array([s * m for s in (1, -1) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)


@dataclass(frozen=True)
class StoredFloat4(StoredMatrix):
    """packed uint8 [rows, in/2], the first of two codes in the low bits; scale float32 [rows, groups].

    divisor: by which all scales were divided, or their factor. input_divisor: the same of the inputs' scales.
    """

    packed: Array
    scale: Array
    divisor: float = 1.0
    input_divisor: float | None = None

    def decode(self, rows: slice) -> Array:
        packed = np.ascontiguousarray(self.packed[rows])
        codes = np.stack([packed & 15, packed >> 4], axis=2).reshape(packed.shape[0], -1)
        values: Array = _SIGNED[codes] * self._spread(rows)
        return values

    def reach(self, rows: slice, weight: Array) -> Array:
        scale = self._spread(rows)
        far: Array = nearest(weight, (level * scale for level in _SIGNED)) + 1e-6 * np.abs(weight)  # ties in float32
        return far

    def _spread(self, rows: slice) -> Array:
        return np.repeat(self.scale[rows], self.scheme.size, axis=1)


def float4_scheme(module: str, stored: str, weights: Mapping[str, Any], inputs: str | None) -> StoredScheme:
    """What config.json says of a module; DamageError where it is not what vLLM takes for this kind of storage."""
    wanted = {"num_bits": 4, "type": "float", "symmetric": True, **_SAID[stored]}
    if wrong := [key for key, value in wanted.items() if weights.get(key) != value]:
        raise DamageError(f"{module} is {stored}, and its weights have another {wrong[0]} than {wanted[wrong[0]]}")
    kind = stored.partition("-")[0]
    if inputs not in (None, kind):
        raise DamageError(f"{module} is {stored} with inputs of {inputs}")
    return StoredScheme(4, wanted["group_size"], True, stored=stored, inputs=inputs, kind=kind)


def read_float4(module: str, scheme: StoredScheme, tensors: Mapping[str, Tensor]) -> tuple[StoredMatrix, list[str]]:
    """The matrix of a module and what is wrong with it; DamageError where it cannot be decoded at all."""
    packed, scale = (tensors[f"{module}.{name}"] for name in ("weight_packed", "weight_scale"))
    rows, width = _sizes(packed, scheme)
    groups = (rows, width // scheme.size)
    divisor: Array = np.ones(1, np.float32)
    zeros: list[str] = []
    if scheme.stored == _MXFP4:
        exponent = shaped(scale, ("U8",), groups).array()
        wrong, scales = (exponent == 255).any(), np.ldexp(np.float32(1), exponent.astype(np.int32) - 127)
    else:
        divisor = _positive(tensors[f"{module}.weight_global_scale"])
        small = shaped(scale, ("F8_E4M3",), groups).array().view(np.uint8)
        wrong, scales, zeros = (small > 0x7E).any(), E4M3[small] / divisor, zero_scales(scale.name, E4M3[small])
    faults = [*([f"{scale.name} has scales that are not positive numbers"] if wrong else []), *zeros]
    given = tensors.get(f"{module}.input_global_scale")
    if given is not None and scheme.inputs != "nvfp4":
        faults.append(f"{given.name} is there, and config.json knows of no rounded inputs")
    inputs = None if given is None else float(_positive(given)[0])
    return StoredFloat4(module, scheme, rows, width, packed.array(), scales, float(divisor[0]), inputs), faults


def factored_scheme(inputs: str | None) -> StoredScheme:
    """That of a module of ModelOpt."""
    return StoredScheme(4, 16, True, stored="modelopt", inputs=inputs, kind="nvfp4")


def read_factored(module: str, scheme: StoredScheme, tensors: Mapping[str, Tensor]) -> tuple[StoredMatrix, list[str]]:
    """NVFP4 with a factor in place of the divisor; as `read_float4`."""
    packed, scale = (tensors[f"{module}.{name}"] for name in ("weight", "weight_scale"))
    rows, width = _sizes(packed, scheme)
    small = shaped(scale, ("F8_E4M3",), (rows, width // scheme.size)).array().view(np.uint8)
    factor = float(_positive(tensors[f"{module}.weight_scale_2"], ()))
    faults = [f"{scale.name} has scales that are not positive numbers"] if (small > 0x7E).any() else []
    faults += zero_scales(scale.name, E4M3[small])
    given = tensors.get(f"{module}.input_scale")
    if (given is None) != (scheme.inputs is None):
        faults.append(f"{module} has {'no' if given is None else 'an'} input_scale, and config.json denies it")
    inputs = None if given is None else float(_positive(given, ()))
    scales = E4M3[small] * np.float32(factor)
    return StoredFloat4(module, scheme, rows, width, packed.array(), scales, factor, inputs), faults


def _sizes(packed: Tensor, scheme: StoredScheme) -> tuple[int, int]:
    """Rows and columns of a matrix of two codes in a byte; DamageError where it is none of whole groups."""
    if len(packed.shape) != 2 or 2 * packed.shape[1] % scheme.size:
        raise DamageError(f"{packed.name} is no matrix of whole groups")
    shaped(packed, ("U8",), packed.shape)
    return packed.shape[0], 2 * packed.shape[1]


def _positive(stored: Tensor, shape: tuple[int, ...] = (1,)) -> Array:
    """The one number of a tensor; DamageError where it is no divisor."""
    found = shaped(stored, ("F32",), shape).array()
    if not (np.isfinite(found).all() and (found > 0).all()):
        raise DamageError(f"{stored.name} is not a positive number")
    return found
