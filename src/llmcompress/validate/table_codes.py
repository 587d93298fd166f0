"""NF4, codebooks and LLM.int8() decoded by numpy alone: the part of `verify`'s second reader for grids with tables.

Imports nothing that takes part in writing (formats, packing, grids, store), on purpose.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from llmcompress.validate.matrix import StoredMatrix, StoredScheme, nearest, shaped
from llmcompress.validate.progressive import PROGRESSIVE_PARTS, progressive_scheme, read_progressive
from llmcompress.validate.stored import Array, DamageError, Tensor, unpack, words_for

_STATE = "weight.quant_state.bitsandbytes__nf4"
TABLE_PARTS = {
    "bitsandbytes": (
        *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", _STATE),
        *("SCB", "weight_format"),
    ),
    "codebook": ("weight_packed", "codebook", "weight_shape"),
    "int8-outliers": ("weight", "SCB", "outlier_index", "outlier_weight"),
    "qoq": PROGRESSIVE_PARTS,
}
MARKERS = {
    "bitsandbytes": ("weight.absmax", "SCB"),
    "codebook": ("codebook",),
    "int8-outliers": ("outlier_index",),
    "qoq": ("qweight", "scale_group"),
}

_BLOCK, _NESTED = 64, 256
_SLACK = 1e-6  # relative error of float32 products and ties


@dataclass(frozen=True)
class Nf4Matrix(StoredMatrix):
    """packed uint8 [rows, in/2], the first of two codes in the high bits; levels [16]; scale [rows, in/64] float32."""

    packed: Array
    levels: Array
    scale: Array

    def decode(self, rows: slice) -> Array:
        packed = np.ascontiguousarray(self.packed[rows])
        codes = np.stack([packed >> 4, packed & 15], axis=2).reshape(packed.shape[0], -1)
        values: Array = self.levels[codes] * np.repeat(self.scale[rows], _BLOCK, axis=1)
        return values

    def reach(self, rows: slice, weight: Array) -> Array:
        scale = np.repeat(self.scale[rows], _BLOCK, axis=1)
        far: Array = nearest(weight, (level * scale for level in self.levels)) + 4 * _SLACK * np.abs(scale)
        return far


@dataclass(frozen=True)
class CodebookMatrix(StoredMatrix):
    """words [rows, ...] of codes; table float32 [rows, levels]."""

    words: Tensor
    table: Array

    def decode(self, rows: slice) -> Array:
        codes = unpack(self.words.array()[rows], self.scheme.bits, self.width)[0]
        values: Array = np.take_along_axis(self.table[rows], codes.astype(np.int64), axis=1)
        return values

    def reach(self, rows: slice, weight: Array) -> Array:
        table = self.table[rows]
        most = np.abs(table).max(axis=1, keepdims=True)
        columns = (table[:, level : level + 1] for level in range(table.shape[1]))
        far: Array = nearest(weight, columns) + _SLACK * most
        return far


@dataclass(frozen=True)
class Int8Matrix(StoredMatrix):
    """codes int8 [rows, in]; scale [rows] float32, absmax not yet divided; index [k] of outliers float32 [rows, k]."""

    codes: Array
    scale: Array
    index: Array
    outliers: Array

    def decode(self, rows: slice) -> Array:
        values: Array = self.codes[rows].astype(np.float32) * self.scale[rows, None] * np.float32(1 / 127)
        values[:, self.index] = self.outliers[rows]
        return values

    def reach(self, rows: slice, weight: Array) -> Array:
        scale = self.scale[rows, None]
        far: Array = scale / 254 + np.maximum(np.abs(weight) - scale, 0) + 1e-4 * scale / 127 + _SLACK * np.abs(weight)
        far[:, self.index] = 2.0**-11 * np.abs(weight[:, self.index]) + 2.0**-25
        return far


def table_scheme(module: str, settings: Mapping[str, Any]) -> StoredScheme | None:
    """The scheme that config.json declares for a linear of these formats; None if the linear is not quantised."""
    if settings["quant_method"] == "bitsandbytes":
        if any(module == name or module.endswith(f".{name}") for name in settings["llm_int8_skip_modules"]):
            return None
        if settings["load_in_8bit"]:
            return StoredScheme(8, -1, True, kind="int8-absmax")
        return StoredScheme(4, _BLOCK, True, kind="nf4-double" if settings["bnb_4bit_use_double_quant"] else "nf4")
    size = settings["modules"].get(module)
    if size is None:
        return None
    if settings["quant_method"].endswith("qoq"):
        return progressive_scheme(module, size)
    if settings["quant_method"].endswith("codebook"):
        return StoredScheme(int(size), -1, True, kind=f"codebook{size}-row")
    return StoredScheme(8, -1, True, kind=f"int8-absmax-o{size}")


def missing_table_parts(form: str, parts: set[str]) -> set[str]:
    """Parts that a quantised module needs besides `parts`."""
    needed = set(TABLE_PARTS[form])
    if form == "bitsandbytes":
        eight = {"SCB", "weight_format"}
        nested = {"weight.nested_absmax", "weight.nested_quant_map"}
        needed = {"weight", *eight} if "SCB" in parts else needed - eight - (set() if parts & nested else nested)
    return needed - parts


def read_table(
    module: str, scheme: StoredScheme, tensors: Mapping[str, Tensor], form: str
) -> tuple[StoredMatrix, list[str]]:
    """The matrix of a module and the matrix's faults; DamageError if the matrix cannot be decoded."""
    part = {name: tensors[f"{module}.{name}"] for name in TABLE_PARTS[form] if f"{module}.{name}" in tensors}
    if form == "qoq":
        return read_progressive(module, scheme, part)
    if form == "codebook":
        return _read_codebook(module, scheme, part)
    return _read_nf4(module, scheme, part) if "SCB" not in part else _read_int8(module, scheme, part)


def _read_nf4(module: str, scheme: StoredScheme, part: Mapping[str, Tensor]) -> tuple[StoredMatrix, list[str]]:
    state = json.loads(part[_STATE].array().tobytes())
    rows, width = (int(extent) for extent in state["shape"])
    if rows < 1 or width < 1 or width % _BLOCK:
        raise DamageError(f"{module} is {rows} x {width}, whose rows are no whole blocks of {_BLOCK}")
    blocks = rows * width // _BLOCK
    double = scheme.kind == "nf4-double"
    wrong = []
    expected = {"quant_type": "nf4", "blocksize": _BLOCK}
    expected |= {"nested_blocksize": _NESTED, "nested_dtype": "float32"} if double else {}
    wrong += [f"{module} has {key} {state.get(key)!r}" for key, value in expected.items() if state.get(key) != value]
    if double != ("weight.nested_absmax" in part):
        raise DamageError(f"{module} is {scheme.kind} by config.json, which its tensors deny")
    packed = shaped(part["weight"], ("U8",), (rows * width // 2, 1)).array().reshape(rows, width // 2)
    levels = shaped(part["weight.quant_map"], ("F32",), (16,)).floats()
    if np.abs(levels - _normal_levels()).max() > 1e-6:
        wrong.append(f"{module} has other levels than those of nf4")
    stored = shaped(part["weight.absmax"], ("U8",) if double else ("F32",), (blocks,))
    scale = stored.array().astype(np.float32)
    if double:
        values = shaped(part["weight.nested_quant_map"], ("F32",), (256,)).floats()
        if np.abs(values - _dynamic_values()).max() > 1e-6:
            wrong.append(f"{module} has another nested_quant_map than the dynamic one")
        nested = shaped(part["weight.nested_absmax"], ("F32",), (-(-blocks // _NESTED),)).floats()
        spread = np.repeat(nested, _NESTED)[:blocks]
        scale = values[stored.array()] * spread + np.float32(state["nested_offset"])
    if not np.isfinite(scale).all():
        wrong.append(f"{module} has scales that are not finite")
    return Nf4Matrix(module, scheme, rows, width, packed, levels, scale.reshape(rows, -1)), wrong


def _read_codebook(module: str, scheme: StoredScheme, part: Mapping[str, Tensor]) -> tuple[StoredMatrix, list[str]]:
    rows, width = (int(extent) for extent in shaped(part["weight_shape"], ("I64",), (2,)).array())
    if rows < 1 or width < 1:
        raise DamageError(f"{module} is {rows} x {width}")
    words = shaped(part["weight_packed"], ("I32",), (rows, words_for(width, scheme.bits)))
    table = shaped(part["codebook"], ("F16",), (rows, 1 << scheme.bits)).floats()
    wrong = []
    if (np.diff(table, axis=1) < 0).any():
        wrong.append(f"{module} has a codebook whose values do not ascend")
    matrix = CodebookMatrix(module, scheme, rows, width, words, table)
    if not all(unpack(words.array()[block], scheme.bits, width)[1] for block in matrix.blocks()):
        wrong.append(f"{module} has padding bits that are not zero")
    return matrix, wrong


def _read_int8(module: str, scheme: StoredScheme, part: Mapping[str, Tensor]) -> tuple[StoredMatrix, list[str]]:
    weight = part["weight"]
    if weight.dtype != "I8" or len(weight.shape) != 2:
        raise DamageError(f"{weight.name} is {weight.dtype} {list(weight.shape)} and should be a matrix of I8")
    rows, width = weight.shape
    scale = shaped(part["SCB"], ("F32",), (rows,)).floats()
    wrong = []
    if (scale < 0).any():
        wrong.append(f"{module}.SCB holds values below zero")
    index, outliers = np.zeros(0, np.int64), np.zeros((rows, 0), np.float32)
    if "weight_format" in part and int(shaped(part["weight_format"], ("U8",), ()).array()) != 0:
        wrong.append(f"{module}.weight_format is not that of rows")
    if "outlier_index" in part:
        count = int(scheme.kind.rpartition("o")[2])
        places = shaped(part["outlier_index"], ("I32",), (count,)).array().astype(np.int64)
        weights = shaped(part["outlier_weight"], ("F16",), (rows, count)).floats()
        held = int((places >= 0).sum())
        index, outliers = places[:held], weights[:, :held]
        if (places[held:] != -1).any() or (np.diff(index) <= 0).any() or (held and index[-1] >= width):
            raise DamageError(f"{module}.outlier_index does not ascend within {width} channels")
        if weights[:, held:].any():
            wrong.append(f"{module}.outlier_weight holds weights of no channel")
        if weight.array()[:, index].any():
            wrong.append(f"{module} has codes in outlier channels")
    if not all(
        (weight.array()[block] != -128).all() for block in (slice(at, at + 4096) for at in range(0, rows, 4096))
    ):
        wrong.append(f"{module} has codes of -128")
    return Int8Matrix(module, scheme, rows, width, weight.array(), scale, index, outliers), wrong


def _normal_levels() -> Array:
    """The levels of NF4 by definition: quantiles of a normal distribution, seven below zero and eight above.

    The outermost level is the quantile of 1 - (1/32 + 1/30) / 2, midway between those of 15 and 16 steps.
    """
    quantile, last = NormalDist().inv_cdf, 1 - (1 / 32 + 1 / 30) / 2
    above = [quantile(float(share)) for share in np.linspace(last, 0.5, 9)[:-1]]
    below = [-quantile(float(share)) for share in np.linspace(last, 0.5, 8)[:-1]]
    levels: Array = np.array(sorted([*below, 0.0, *above])) / above[0]
    return levels


def _dynamic_values() -> Array:
    """The dynamic map: 2^e midpoints of equal parts of [0.1, 1] times 10^(e - 6) for e = 0 ... 6, both signs; 0; 1."""
    halves = [10.0 ** (e - 6) * (0.1 + 0.9 * (np.arange(1 << e) + 0.5) / (1 << e)) for e in range(7)]
    positive = np.concatenate(halves)
    values: Array = np.sort(np.concatenate([positive, -positive, [0.0, 1.0]]))
    return values
