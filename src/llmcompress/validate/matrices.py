"""Quantised matrices of a directory decoded by numpy alone.

A second reader: imports nothing that takes part in writing (formats, packing, grids, store), on purpose.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from llmcompress.validate.awq import nibbles
from llmcompress.validate.declared_schemes import PARTS, STORED, format_of, scheme_of
from llmcompress.validate.float4 import FLOAT4_PARTS, read_factored, read_float4
from llmcompress.validate.float8_blocks import MXFP8, read_float8
from llmcompress.validate.matrix import (
    E4M3,
    FLOATS,
    INTEGERS,
    PACKED,
    StoredMatrix,
    StoredScheme,
    beyond,
    shaped,
    zero_scales,
)
from llmcompress.validate.mlx_codes import MLX_MARKERS, read_mlx
from llmcompress.validate.stored import Array, DamageError, Tensor, unpack, words_for
from llmcompress.validate.table_codes import MARKERS, TABLE_PARTS, read_table

_MARKERS = {**MARKERS, "mlx": MLX_MARKERS}


@dataclass(frozen=True)
class AffineMatrix(StoredMatrix):
    """scale and zero [out, groups] float32, index [in]: the group of each input, words: packed codes.

    layout: a word holds codes along the inputs, with an output per row or per column, or codes of eight outputs (awq).
    """

    scale: Array
    zero: Array
    index: Array
    words: Tensor
    layout: Literal["rows", "columns", "awq"]
    input_scale: float | None = None

    def codes(self, rows: slice) -> tuple[Array, bool]:
        """Codes uint8 [rows, in], and whether the padding bits are zero."""
        words = self.words.array()
        if self.scheme.stored != PACKED:
            raw = words[rows].view(np.uint8)
            return (raw ^ 0x80 if self.scheme.stored == INTEGERS else raw), True
        if self.layout == "awq":
            first = rows.start // 8
            wide = nibbles(words[:, first : -(-rows.stop // 8)])
            return wide[:, rows.start - 8 * first : rows.stop - 8 * first].T, True
        part = words[rows] if self.layout == "rows" else words[:, rows].T
        return unpack(part, self.scheme.bits, self.width)

    def decode(self, rows: slice) -> Array:
        """Values float32 [rows, in]."""
        codes = self.codes(rows)[0]
        levels = E4M3[codes] if self.scheme.stored == FLOATS else codes.astype(np.float32)
        values: Array = (levels - self.zero[rows][:, self.index]) * self.scale[rows][:, self.index]
        return values

    def reach(self, rows: slice, weight: Array) -> Array:
        """The largest error of rounding each weight to its nearest code: half a step plus its distance to the range."""
        step = np.abs(self.scale[rows])[:, self.index]
        if self.scheme.stored == FLOATS:
            low, high = -448 * step, 448 * step
            _, exponent = np.frexp(np.abs(weight) / step)  # the value lies in [2^(exponent-1), 2^exponent)
            step = step * np.exp2(np.clip(exponent - 1, -6, 8) - 3)
        else:
            scale, zero = self.scale[rows], self.zero[rows]
            ends = np.stack([-zero * scale, ((1 << self.scheme.bits) - 1 - zero) * scale])
            low, high = ends.min(0)[:, self.index], ends.max(0)[:, self.index]
        reach = beyond(weight, low, high)
        reach += (0.5 + 1e-4) * step
        reach += 1e-6 * np.abs(weight)  # ties decided in float32
        return reach


def quantised_modules(tensors: Mapping[str, Tensor], form: str) -> dict[str, set[str]]:
    """The parts of every module that has a part which only quantised matrices have, by module."""
    parts = PARTS.get(form, ())
    marks = _MARKERS.get(form, parts)
    modules = {name[: -len(mark) - 1] for mark in marks for name in tensors if name.endswith(f".{mark}")}
    return {module: {part for part in parts if f"{module}.{part}" in tensors} for module in sorted(modules)}


def read_matrix(
    module: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[StoredMatrix, list[str]]:
    """The matrix of a module and the matrix's faults; DamageError if the matrix cannot be decoded."""
    scheme = scheme_of(module, config)
    if scheme is None:
        raise DamageError(f"{module} is quantised, and config.json says that it is not")
    if (form := format_of(config)) in TABLE_PARTS:
        return read_table(module, scheme, tensors, form)
    if form == "mlx":
        return read_mlx(module, scheme, tensors)
    if form == "modelopt" and scheme.kind == "nvfp4":
        return read_factored(module, scheme, tensors)
    if form == "fp8":
        return read_float8(module, scheme, tensors, "weight_scale_inv")
    if scheme.stored in FLOAT4_PARTS:
        return read_float4(module, scheme, tensors)
    if scheme.stored == MXFP8 or (scheme.stored == FLOATS and scheme.size != -1):
        return read_float8(module, scheme, tensors, apart=form == "modelopt")
    settings = config["quantization_config"]
    readers = {
        "gptq": _read_gptq, "awq": _read_awq, "compressed-tensors": _read_packed, "modelopt": _read_float8,
        "auto-round": _read_auto_round,
    }  # fmt: skip
    matrix, wrong = readers[form](module, scheme, tensors, settings)
    if not np.isfinite(matrix.scale).all():
        wrong.append(f"{module} has scales that are not finite")
    wrong += zero_scales(module, matrix.scale)
    if scheme.stored == FLOATS:
        if any(((piece & 0x7F) == 0x7F).any() for piece in matrix.words.chunks()):
            wrong.append(f"{module} has codes that are no numbers")
    elif scheme.symmetric and not (matrix.zero == 1 << (scheme.bits - 1)).all():
        wrong.append(f"{module} is symmetric and has other zero points than {1 << (scheme.bits - 1)}")
    if not all(matrix.codes(rows)[1] for rows in matrix.blocks()):
        wrong.append(f"{module} has padding bits that are not zero")
    return matrix, wrong


def _groups(module: str, scheme: StoredScheme, width: int) -> int:
    size = width if scheme.size == -1 else scheme.size
    if size < 1 or width % size:
        raise DamageError(f"{module} has {width} inputs, which groups of {size} do not divide")
    return width // size


def _read_gptq(
    module: str, scheme: StoredScheme, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[AffineMatrix, list[str]]:
    words, order = tensors[f"{module}.qweight"], tensors[f"{module}.g_idx"]
    if len(order.shape) != 1 or len(words.shape) != 2:
        raise DamageError(f"{module} has a qweight or g_idx of the wrong number of dimensions")
    width = order.shape[0]
    matrix, faults = _read_columns(module, scheme, tensors, width, settings["checkpoint_format"] == "gptq")
    groups = _groups(module, scheme, width)
    index = shaped(order, ("I32",), (width,)).array().astype(np.int64)
    if index.min() < 0 or index.max() >= groups:
        raise DamageError(f"{module}.g_idx names groups outside of 0 ... {groups - 1}")
    wrong = []
    if not (np.bincount(index, minlength=groups) == width // groups).all():
        wrong.append(f"{module}.g_idx has groups of unequal size")
    if not scheme.order and not (index == matrix.index).all():
        wrong.append(f"{module}.g_idx is not in natural order, and desc_act is false")
    return replace(matrix, index=index), wrong + faults


def _read_auto_round(
    module: str, scheme: StoredScheme, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[AffineMatrix, list[str]]:
    words = tensors[f"{module}.qweight"]
    if len(words.shape) != 2:
        raise DamageError(f"{module} has a qweight of the wrong number of dimensions")
    return _read_columns(module, scheme, tensors, words.shape[0] * 32 // scheme.bits, less_one=True)


def _read_columns(
    module: str, scheme: StoredScheme, tensors: Mapping[str, Tensor], width: int, less_one: bool
) -> tuple[AffineMatrix, list[str]]:
    """Codes of an output in a column, groups in natural order. less_one: zero points are stored less one."""
    words, zeros, scales = (tensors[f"{module}.{part}"] for part in PARTS["auto-round"])
    rows, groups = words.shape[1], _groups(module, scheme, width)
    shaped(words, ("I32",), (words_for(width, scheme.bits), rows))
    shaped(zeros, ("I32",), (groups, words_for(rows, scheme.bits)))
    shaped(scales, ("F16",), (groups, rows))
    points, clean = unpack(zeros.array(), scheme.bits, rows)
    zero = points.astype(np.float32).T
    if less_one:
        zero = (zero + 1) % (1 << scheme.bits)
    wrong = [] if clean else [f"{module}.qzeros has padding bits that are not zero"]
    scale = np.ascontiguousarray(scales.floats().T)
    index = np.arange(width) // (width // groups)
    return AffineMatrix(module, scheme, rows, width, scale, zero, index, words, "columns"), wrong


def _read_awq(
    module: str, scheme: StoredScheme, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[AffineMatrix, list[str]]:
    words, zeros, scales = (tensors[f"{module}.{part}"] for part in PARTS["awq"])
    if len(words.shape) != 2 or scheme.bits != 4:
        raise DamageError(f"{module} has a qweight of the wrong number of dimensions, or no 4 bits")
    width, rows = words.shape[0], 8 * words.shape[1]
    groups = _groups(module, scheme, width)
    shaped(words, ("I32",), (width, rows // 8))
    shaped(zeros, ("I32",), (groups, rows // 8))
    shaped(scales, ("F16",), (groups, rows))
    zero = nibbles(zeros.array()).astype(np.float32).T
    scale = np.ascontiguousarray(scales.floats().T)
    index = np.arange(width) // (width // groups)
    return AffineMatrix(module, scheme, rows, width, scale, zero, index, words, "awq"), []


def _read_packed(
    module: str, scheme: StoredScheme, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[AffineMatrix, list[str]]:
    fixed, wrong = _input_scale(module, scheme, tensors)
    if scheme.stored != PACKED:
        return _read_bytes(module, scheme, tensors, fixed), wrong
    words, scales, shape = (tensors[f"{module}.{part}"] for part in PARTS["compressed-tensors"][:3])
    rows, width = (int(extent) for extent in shaped(shape, ("I64",), (2,)).array())
    if rows < 1 or width < 1:
        raise DamageError(f"{shape.name} is {rows} x {width}")
    groups = _groups(module, scheme, width)
    shaped(words, ("I32",), (rows, words_for(width, scheme.bits)))
    shaped(scales, ("BF16", "F16", "F32"), (rows, groups))
    zero: Array = np.full((rows, groups), 1 << (scheme.bits - 1), np.float32)
    stored = tensors.get(f"{module}.weight_zero_point")
    if scheme.symmetric and stored is not None:
        wrong.append(f"{module} is symmetric and has a weight_zero_point, which some engines refuse")
    if not scheme.symmetric:
        if stored is None:
            raise DamageError(f"{module} is asymmetric and has no weight_zero_point")
        shaped(stored, ("I32",), (words_for(rows, scheme.bits), groups))
        points, clean = unpack(stored.array().T, scheme.bits, rows)
        zero = points.astype(np.float32).T
        if not clean:
            wrong.append(f"{stored.name} has padding bits that are not zero")
    index = np.arange(width) // (width // groups)
    return AffineMatrix(module, scheme, rows, width, scales.floats(), zero, index, words, "rows", fixed), wrong


def _read_bytes(module: str, scheme: StoredScheme, tensors: Mapping[str, Tensor], fixed: float | None) -> AffineMatrix:
    codes, scales = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
    if len(codes.shape) != 2:
        raise DamageError(f"{codes.name} is no matrix")
    rows, width = codes.shape
    shaped(codes, (STORED[scheme.stored],), (rows, width))
    shaped(scales, ("BF16", "F16", "F32"), (1,) if scheme.kind == "fp8-tensor" else (rows, 1))
    scale = np.broadcast_to(scales.floats().reshape(-1, 1), (rows, 1))
    zero: Array = np.full((rows, 1), 0 if scheme.stored == FLOATS else 128, np.float32)
    index = np.zeros(width, np.int64)
    return AffineMatrix(module, scheme, rows, width, scale, zero, index, codes, "rows", fixed)


def _read_float8(
    module: str, scheme: StoredScheme, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[AffineMatrix, list[str]]:
    """8-bit floats of ModelOpt with a scale for each row, or for all."""
    codes, scales = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
    if len(codes.shape) != 2:
        raise DamageError(f"{codes.name} is no matrix")
    rows, width = shaped(codes, ("F8_E4M3",), codes.shape).shape
    one = scheme.kind == "fp8-tensor"
    fixed, wrong = _input_scale(module, scheme, tensors, bare=True)
    scale = shaped(scales, ("F32",), () if one else (rows,)).array().reshape(-1, 1)
    index, zero = np.zeros(width, np.int64), np.zeros((rows, 1), np.float32)
    wide = np.broadcast_to(scale, (rows, 1))
    return AffineMatrix(module, scheme, rows, width, wide, zero, index, codes, "rows", fixed), wrong


def _input_scale(
    module: str, scheme: StoredScheme, tensors: Mapping[str, Tensor], *, bare: bool = False
) -> tuple[float | None, list[str]]:
    """The fixed scale of a module's inputs, None if there is none, and the scale's faults. bare: F32 of no extent."""
    stored = tensors.get(f"{module}.input_scale")
    fixed = scheme.inputs is not None and scheme.inputs.endswith("-tensor")
    if stored is None or not fixed:
        stray = [] if stored is None else [f"{stored.name} is there, and config.json knows of no fixed scale of inputs"]
        return None, stray
    if bare:
        value = float(shaped(stored, ("F32",), ()).array())
    else:
        value = float(shaped(stored, ("BF16", "F16", "F32"), (1,)).floats()[0])
    good = np.isfinite(value) and value > 0
    return value, [] if good else [f"{stored.name} is {value}, which is no scale"]
