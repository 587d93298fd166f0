"""Codes of mlx checkpoints decoded by numpy alone: part of `verify`'s second reader.

Imports nothing that takes part in writing (formats, packing, grids, store), on purpose.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcompress.validate.float4 import StoredFloat4
from llmcompress.validate.float8_blocks import StoredFloat8, no_numbers
from llmcompress.validate.matrix import E4M3, StoredMatrix, StoredScheme, beyond, shaped, zero_scales
from llmcompress.validate.stored import Array, DamageError, Tensor, unpack, words_for

MLX_PARTS = ("weight", "scales", "biases")
MLX_MARKERS = ("scales",)
MLX_KEYS = frozenset({"quantization", "rope_theta", "partial_rotary_factor", "rope_scaling"})
"""Keys of config.json that mlx-lm reads and a source may lack."""
_KEYS = ("group_size", "bits", "mode")
_SIZES, _BITS = (32, 64, 128), (2, 3, 4, 5, 6, 8)
_FLOATS = {"mxfp4": (4, 32, "mxfp4"), "mxfp8": (8, 32, "mxfp8"), "nvfp4": (4, 16, "nvfp4-plain")}
MLX_FLOATS = {kind for _, _, kind in _FLOATS.values()}
"""Grids of modes without biases; before that, by mode, their bits, groups and names."""


@dataclass(frozen=True)
class ShiftedMatrix(StoredMatrix):
    """words [rows, in * bits / 32]; scale, start [rows, groups] float32: values are scale * code + start."""

    words: Tensor
    scale: Array
    start: Array

    def codes(self, rows: slice) -> Array:
        return unpack(self.words.array()[rows], self.scheme.bits, self.width)[0]

    def decode(self, rows: slice) -> Array:
        scale, start = self._spread(rows)
        values: Array = self.codes(rows).astype(np.float32) * scale + start
        return values

    def reach(self, rows: slice, weight: Array) -> Array:
        scale, start = self._spread(rows)
        end = start + ((1 << self.scheme.bits) - 1) * scale
        low, high, step = np.minimum(start, end), np.maximum(start, end), np.abs(scale)
        reach: Array = (
            step / 2 + beyond(weight, low, high) + 1e-4 * step + 1e-6 * (np.abs(weight) + np.abs(start))
        )  # ties in float32
        return reach

    def _spread(self, rows: slice) -> tuple[Array, Array]:
        return np.repeat(self.scale[rows], self.scheme.size, 1), np.repeat(self.start[rows], self.scheme.size, 1)


def mlx_scheme(module: str, settings: Mapping[str, Any]) -> StoredScheme:
    """What config.json says of a module; that it is quantised at all, its tensors tell."""
    own = settings.get(module)
    merged = {**settings, **(own if isinstance(own, dict) else {})}
    bits, size, mode = int(merged["bits"]), int(merged["group_size"]), merged["mode"]
    if mode in _FLOATS:
        if (bits, size) != _FLOATS[mode][:2]:
            raise DamageError(f"{module} is {mode} with {bits} bits in groups of {size}")
        return StoredScheme(bits, size, True, kind=_FLOATS[mode][2])
    if mode != "affine" or bits not in _BITS or size not in _SIZES:
        raise DamageError(f"{module} has mode {mode!r} with {bits} bits in groups of {size}, which mlx has not")
    symmetric = bool(settings.get("symmetric", False))
    return StoredScheme(bits, size, symmetric, kind="" if symmetric else f"int{bits}-g{size}-offset")


def mlx_wrongs(config: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Faults of a quantization_config, and of what else mlx-lm reads in config.json."""
    said, turned = config.get("quantization"), config.get("rope_parameters")
    wrong = [f"quantization_config has no {key!r}" for key in _KEYS if key not in settings]
    if said != {key: value for key, value in settings.items() if key != "quant_method"}:
        wrong.append("quantization, which mlx-lm reads, and quantization_config differ")
    if isinstance(turned, Mapping) and "rope_theta" in turned:
        scaling = None
        if turned.get("rope_type", "default") != "default":
            scaling = {key: value for key, value in turned.items() if key != "rope_theta"}
        wanted = {"rope_theta": turned["rope_theta"], "partial_rotary_factor": turned.get("partial_rotary_factor")}
        for key, value in {**wanted, "rope_scaling": scaling}.items():
            if value is not None and config.get(key) != value:
                wrong.append(f"{key}, which mlx-lm reads, is not that of rope_parameters")
    return wrong


def read_mlx(module: str, scheme: StoredScheme, tensors: Mapping[str, Tensor]) -> tuple[StoredMatrix, list[str]]:
    """The matrix of a module and its faults; DamageError if the matrix cannot be decoded."""
    words, scales = tensors[f"{module}.weight"], tensors[f"{module}.scales"]
    if len(words.shape) != 2 or 32 * words.shape[1] % (scheme.bits * scheme.size):
        raise DamageError(f"{words.name} is no matrix of whole groups")
    rows, width = words.shape[0], 32 * words.shape[1] // scheme.bits
    shaped(words, ("U32",), (rows, words_for(width, scheme.bits)))
    groups = (rows, width // scheme.size)
    if scheme.kind in MLX_FLOATS:
        stored = shaped(scales, ("U8",), groups).array()
        if scheme.kind == "nvfp4-plain":
            values, bad = E4M3[stored], stored > 0x7E
        else:
            values, bad = np.ldexp(np.float32(1), stored.astype(np.int32) - 127), stored == 255
        wrong = [f"{scales.name} has scales that are no numbers"] if bad.any() else []
        wrong += zero_scales(scales.name, values)
        if scheme.kind == "mxfp8":
            return StoredFloat8(module, scheme, rows, width, words, values, 1, scheme.size), wrong + no_numbers(words)
        packed = np.ascontiguousarray(words.array()).view(np.uint8)
        return StoredFloat4(module, scheme, rows, width, packed, values), wrong
    biases = tensors[f"{module}.biases"]
    scale, start = (shaped(part, ("BF16", "F16", "F32"), groups).floats() for part in (scales, biases))
    wrong = []
    if not (np.isfinite(scale).all() and np.isfinite(start).all()):
        wrong.append(f"{module} has scales or biases that are not finite")
    wrong += zero_scales(module, scale)
    if scheme.symmetric and not (start == -(1 << (scheme.bits - 1)) * scale).all():
        wrong.append(f"{module} is symmetric and has biases that are not those of its scales")
    return ShiftedMatrix(module, scheme, rows, width, words, scale, start), wrong
