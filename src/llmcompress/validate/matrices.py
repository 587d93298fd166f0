"""Quantised matrices of a directory decoded by numpy alone, and what its config says of each.

A second reader: imports nothing that takes part in writing (formats, packing, grids, store), on purpose.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcompress.validate.matrix import Matrix, Scheme, shaped
from llmcompress.validate.stored import Array, DamageError, Tensor, unpack, words_for
from llmcompress.validate.tables import MARKERS, TABLE_PARTS, missing_table_parts, read_table, table_scheme

PARTS: Mapping[str, tuple[str, ...]] = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),
    **TABLE_PARTS,
}


@dataclass(frozen=True)
class Affine(Matrix):
    """scale and zero [out, groups] float32, index [in] the group of each input, words of codes."""

    scale: Array
    zero: Array
    index: Array
    words: Tensor
    along_rows: bool

    def codes(self, rows: slice) -> tuple[Array, bool]:
        """Codes uint8 [rows, in], and whether their padding is zero."""
        part = self.words.array()[rows] if self.along_rows else self.words.array()[:, rows].T
        return unpack(part, self.scheme.bits, self.width)

    def decode(self, rows: slice) -> Array:
        """Values float32 [rows, in]."""
        codes = self.codes(rows)[0].astype(np.float32)
        values: Array = (codes - self.zero[rows][:, self.index]) * self.scale[rows][:, self.index]
        return values

    def reach(self, rows: slice, weight: Array) -> Array:
        """Half a step, and what the grid does not cover."""
        scale, zero = self.scale[rows], self.zero[rows]
        ends = np.stack([-zero * scale, ((1 << self.scheme.bits) - 1 - zero) * scale])
        low, high = ends.min(0)[:, self.index], ends.max(0)[:, self.index]
        step = np.abs(scale)[:, self.index]
        outside = np.maximum(np.maximum(weight - high, low - weight), 0)
        reach: Array = step / 2 + outside + 1e-4 * step + 1e-6 * np.abs(weight)  # ties decided in float32
        return reach


def format_of(config: Mapping[str, Any]) -> str:
    """Name of the format by config.json; DamageError if it is none that is known."""
    settings = config.get("quantization_config")
    if settings is None:
        return "dense"
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    form = method.removeprefix("llmcompress-") if isinstance(method, str) else None
    if form is None or form not in PARTS:
        raise DamageError(f"quant_method {method!r} is not known")
    return form


def quantised_modules(tensors: Mapping[str, Tensor], form: str) -> dict[str, set[str]]:
    """Modules that have any part that only quantised matrices have -> the parts they have."""
    parts = PARTS.get(form, ())
    marks = MARKERS.get(form, parts)
    modules = {name[: -len(mark) - 1] for mark in marks for name in tensors if name.endswith(f".{mark}")}
    return {module: {part for part in parts if f"{module}.{part}" in tensors} for module in sorted(modules)}


def missing_parts(form: str, parts: set[str]) -> set[str]:
    """Parts that a quantised module lacks which has these."""
    return missing_table_parts(form, parts) if form in TABLE_PARTS else set(PARTS[form]) - parts - {"weight_zero_point"}


def scheme_of(module: str, config: Mapping[str, Any]) -> Scheme | None:
    """What config.json says of a linear: how it is quantised, or None for not at all."""
    settings = config["quantization_config"]
    readers = {"gptq": _gptq_scheme, "compressed-tensors": _packed_scheme}
    return readers.get(settings["quant_method"], table_scheme)(module, settings)


def read_matrix(module: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[Matrix, list[str]]:
    """The matrix of a module and what is wrong with it; DamageError where it cannot be decoded at all."""
    scheme = scheme_of(module, config)
    if scheme is None:
        raise DamageError(f"{module} is quantised, and config.json says that it is not")
    if (form := format_of(config)) in TABLE_PARTS:
        return read_table(module, scheme, tensors, form)
    read = _read_gptq if config["quantization_config"]["quant_method"] == "gptq" else _read_packed
    matrix, wrong = read(module, scheme, tensors, config["quantization_config"])
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


def _read_gptq(
    module: str, scheme: Scheme, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[Affine, list[str]]:
    words, zeros, scales, order = (tensors[f"{module}.{part}"] for part in PARTS["gptq"])
    if len(order.shape) != 1 or len(words.shape) != 2:
        raise DamageError(f"{module} has a qweight or g_idx of the wrong number of dimensions")
    width, rows = order.shape[0], words.shape[1]
    groups = _groups(module, scheme, width)
    shaped(words, ("I32",), (words_for(width, scheme.bits), rows))
    shaped(zeros, ("I32",), (groups, words_for(rows, scheme.bits)))
    shaped(scales, ("F16",), (groups, rows))
    index = shaped(order, ("I32",), (width,)).array().astype(np.int64)
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
    return Affine(module, scheme, rows, width, scale, zero, index, words, along_rows=False), wrong


def _read_packed(
    module: str, scheme: Scheme, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[Affine, list[str]]:
    words, scales, shape = (tensors[f"{module}.{part}"] for part in PARTS["compressed-tensors"][:3])
    rows, width = (int(extent) for extent in shaped(shape, ("I64",), (2,)).array())
    if rows < 1 or width < 1:
        raise DamageError(f"{shape.name} is {rows} x {width}")
    groups = _groups(module, scheme, width)
    shaped(words, ("I32",), (rows, words_for(width, scheme.bits)))
    shaped(scales, ("BF16", "F16", "F32"), (rows, groups))
    zero: Array = np.full((rows, groups), 1 << (scheme.bits - 1), np.float32)
    wrong = []
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
    return Affine(module, scheme, rows, width, scales.floats(), zero, index, words, along_rows=True), wrong
