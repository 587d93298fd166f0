"""Quantised matrices of a directory decoded by numpy alone, and what its config says of each.

A second reader: imports nothing that takes part in writing (formats, packing, grids, store), on purpose.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from llmcompress.validate.awq import nibbles, skipped
from llmcompress.validate.stored import Array, DamageError, Tensor, unpack, words_for

_BLOCK = 1 << 22  # weights decoded at once

PARTS = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),
}


@dataclass(frozen=True)
class Scheme:
    """What a config says of a module; size -1 is one group per row. order: groups may follow the activation order."""

    bits: int
    size: int
    symmetric: bool
    order: bool = False

    @property
    def name(self) -> str:
        group = "row" if self.size == -1 else f"g{self.size}"
        return f"int{self.bits}-{group}-{'sym' if self.symmetric else 'asym'}"


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix: scale and zero [out, groups] float32, index [in] the group of each input, words of codes.

    layout: how codes lie in the words: streams along the inputs, of an output per row or column, or eight outputs each.
    """

    module: str
    scheme: Scheme
    rows: int
    width: int
    scale: Array
    zero: Array
    index: Array
    words: Tensor
    layout: Literal["rows", "columns", "awq"]

    def codes(self, rows: slice) -> tuple[Array, bool]:
        """Codes uint8 [rows, in], and whether their padding is zero."""
        words = self.words.array()
        if self.layout == "awq":
            first = rows.start // 8
            wide = nibbles(words[:, first : -(-rows.stop // 8)])
            return wide[:, rows.start - 8 * first : rows.stop - 8 * first].T, True
        part = words[rows] if self.layout == "rows" else words[:, rows].T
        return unpack(part, self.scheme.bits, self.width)

    def decode(self, rows: slice) -> Array:
        """Values float32 [rows, in]."""
        codes = self.codes(rows)[0].astype(np.float32)
        values: Array = (codes - self.zero[rows][:, self.index]) * self.scale[rows][:, self.index]
        return values

    def blocks(self) -> Iterator[slice]:
        """Slices of rows that fit in memory together with their decoded values."""
        step = max(1, _BLOCK // self.width)
        return (slice(start, min(start + step, self.rows)) for start in range(0, self.rows, step))


def format_of(config: Mapping[str, Any]) -> str:
    """Name of the format by config.json; DamageError if it is none that is known."""
    settings = config.get("quantization_config")
    if settings is None:
        return "dense"
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if not isinstance(method, str) or method not in PARTS:
        raise DamageError(f"quant_method {method!r} is not known")
    return method


def quantised_modules(tensors: Mapping[str, Tensor], form: str) -> dict[str, set[str]]:
    """Modules that have any part of a quantised matrix -> the parts they have."""
    found: dict[str, set[str]] = {}
    for name in tensors:
        module, _, part = name.rpartition(".")
        if part in PARTS.get(form, ()):
            found.setdefault(module, set()).add(part)
    return found


def scheme_of(module: str, config: Mapping[str, Any]) -> Scheme | None:
    """What config.json says of a linear: how it is quantised, or None for not at all."""
    settings = config["quantization_config"]
    schemes = {"gptq": _gptq_scheme, "awq": _awq_scheme, "compressed-tensors": _packed_scheme}
    return schemes[settings["quant_method"]](module, settings)


def read_matrix(module: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[Matrix, list[str]]:
    """The matrix of a module and what is wrong with it; DamageError where it cannot be decoded at all."""
    scheme = scheme_of(module, config)
    if scheme is None:
        raise DamageError(f"{module} is quantised, and config.json says that it is not")
    settings = config["quantization_config"]
    readers = {"gptq": _read_gptq, "awq": _read_awq, "compressed-tensors": _read_packed}
    matrix, wrong = readers[settings["quant_method"]](module, scheme, tensors, settings)
    if not np.isfinite(matrix.scale).all():
        wrong.append(f"{module} has scales that are not finite")
    if not matrix.scale.all():
        wrong.append(f"{module} has scales of zero")
    if scheme.symmetric and not (matrix.zero == 1 << (scheme.bits - 1)).all():
        wrong.append(f"{module} is symmetric and has other zero points than {1 << (scheme.bits - 1)}")
    if not all(matrix.codes(rows)[1] for rows in matrix.blocks()):
        wrong.append(f"{module} has padding bits that are not zero")
    return matrix, wrong


def _gptq_scheme(module: str, settings: Mapping[str, Any]) -> Scheme | None:
    merged = dict(settings)
    for rule, values in (settings.get("dynamic") or {}).items():
        if re.match(rule[2:] if rule[:2] in ("-:", "+:") else rule, module):
            if rule.startswith("-:"):
                return None
            merged |= values
            break
    if not re.search(r"(^|\.)\d+\.", module) and not settings.get("lm_head"):
        return None
    order = bool(settings.get("desc_act"))
    return Scheme(int(merged["bits"]), int(merged["group_size"]), bool(merged["sym"]), order)


def _awq_scheme(module: str, settings: Mapping[str, Any]) -> Scheme | None:
    if True in skipped(module, settings):
        return None
    return Scheme(int(settings["bits"]), int(settings["group_size"]), not settings["zero_point"])


def _packed_scheme(module: str, settings: Mapping[str, Any]) -> Scheme | None:
    def names(target: str) -> bool:
        return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module

    if any(names(target) for target in settings.get("ignore") or ()):
        return None
    groups = list(settings["config_groups"].values())
    exact = [group for group in groups if any(names(target) for target in group["targets"])]
    chosen = exact or [group for group in groups if "Linear" in group["targets"]]
    if not chosen:
        return None
    if len(chosen) > 1:
        raise DamageError(f"{module} belongs to more than one config group")
    weights = chosen[0]["weights"]
    size = weights["group_size"] if weights["strategy"] == "group" else -1
    return Scheme(int(weights["num_bits"]), int(size), bool(weights["symmetric"]))


def _groups(module: str, scheme: Scheme, width: int) -> int:
    size = width if scheme.size == -1 else scheme.size
    if size < 1 or width % size:
        raise DamageError(f"{module} has {width} inputs, which groups of {size} do not divide")
    return width // size


def _shaped(tensor: Tensor, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
    if tensor.dtype not in dtypes or tensor.shape != shape:
        raise DamageError(
            f"{tensor.name} is {tensor.dtype} {list(tensor.shape)} and should be {dtypes[0]} {list(shape)}"
        )
    return tensor


def _read_gptq(
    module: str, scheme: Scheme, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[Matrix, list[str]]:
    words, zeros, scales, order = (tensors[f"{module}.{part}"] for part in PARTS["gptq"])
    if len(order.shape) != 1 or len(words.shape) != 2:
        raise DamageError(f"{module} has a qweight or g_idx of the wrong number of dimensions")
    width, rows = order.shape[0], words.shape[1]
    groups = _groups(module, scheme, width)
    _shaped(words, ("I32",), (words_for(width, scheme.bits), rows))
    _shaped(zeros, ("I32",), (groups, words_for(rows, scheme.bits)))
    _shaped(scales, ("F16",), (groups, rows))
    index = _shaped(order, ("I32",), (width,)).array().astype(np.int64)
    if index.min() < 0 or index.max() >= groups:
        raise DamageError(f"{module}.g_idx names groups outside of 0 ... {groups - 1}")
    wrong = []
    if not (np.bincount(index, minlength=groups) == width // groups).all():
        wrong.append(f"{module}.g_idx has groups of unequal size")
    if not scheme.order and not (index == np.arange(width) // (width // groups)).all():
        wrong.append(f"{module}.g_idx is not in natural order, and desc_act is false")
    points, clean = unpack(zeros.array(), scheme.bits, rows)
    if not clean:
        wrong.append(f"{module}.qzeros has padding bits that are not zero")
    zero = points.astype(np.float32).T
    if settings["checkpoint_format"] == "gptq":
        zero = (zero + 1) % (1 << scheme.bits)
    scale = np.ascontiguousarray(scales.floats().T)
    return Matrix(module, scheme, rows, width, scale, zero, index, words, "columns"), wrong


def _read_awq(
    module: str, scheme: Scheme, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[Matrix, list[str]]:
    words, zeros, scales = (tensors[f"{module}.{part}"] for part in PARTS["awq"])
    if len(words.shape) != 2 or scheme.bits != 4:
        raise DamageError(f"{module} has a qweight of the wrong number of dimensions, or no 4 bits")
    width, rows = words.shape[0], 8 * words.shape[1]
    groups = _groups(module, scheme, width)
    _shaped(words, ("I32",), (width, rows // 8))
    _shaped(zeros, ("I32",), (groups, rows // 8))
    _shaped(scales, ("F16",), (groups, rows))
    zero = nibbles(zeros.array()).astype(np.float32).T
    scale = np.ascontiguousarray(scales.floats().T)
    index = np.arange(width) // (width // groups)
    return Matrix(module, scheme, rows, width, scale, zero, index, words, "awq"), []


def _read_packed(
    module: str, scheme: Scheme, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[Matrix, list[str]]:
    words, scales, shape = (tensors[f"{module}.{part}"] for part in PARTS["compressed-tensors"][:3])
    rows, width = (int(extent) for extent in _shaped(shape, ("I64",), (2,)).array())
    if rows < 1 or width < 1:
        raise DamageError(f"{shape.name} is {rows} x {width}")
    groups = _groups(module, scheme, width)
    _shaped(words, ("I32",), (rows, words_for(width, scheme.bits)))
    _shaped(scales, ("BF16", "F16", "F32"), (rows, groups))
    zero: Array = np.full((rows, groups), 1 << (scheme.bits - 1), np.float32)
    wrong = []
    stored = tensors.get(f"{module}.weight_zero_point")
    if scheme.symmetric and stored is not None:
        wrong.append(f"{module} is symmetric and has a weight_zero_point, which some engines refuse")
    if not scheme.symmetric:
        if stored is None:
            raise DamageError(f"{module} is asymmetric and has no weight_zero_point")
        _shaped(stored, ("I32",), (words_for(rows, scheme.bits), groups))
        points, clean = unpack(stored.array().T, scheme.bits, rows)
        zero = points.astype(np.float32).T
        if not clean:
            wrong.append(f"{stored.name} has padding bits that are not zero")
    index = np.arange(width) // (width // groups)
    return Matrix(module, scheme, rows, width, scales.floats(), zero, index, words, "rows"), wrong
