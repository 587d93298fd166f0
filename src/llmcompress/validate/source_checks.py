"""Checks that a directory holds every tensor of its source, unchanged or with the error that the report recorded."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llmcompress.validate.declared_schemes import PARTS
from llmcompress.validate.decoded_source import source_tensors
from llmcompress.validate.directory import HEADS, ROWS, Directory
from llmcompress.validate.expert_parts import parts_of_stack
from llmcompress.validate.findings import AGREEMENT, Check, guarded_list, lacks_adapter, summary
from llmcompress.validate.kv_scale_checks import cache_scales
from llmcompress.validate.matrix import StoredMatrix
from llmcompress.validate.removed_parts import (
    cut_tensors,
    depends_on_depth,
    drops_layers,
    holds_cut_width,
    narrower_wrongs,
    narrows,
    renumbered_tensors,
)
from llmcompress.validate.source_files import config_differences, side_file_wrongs
from llmcompress.validate.stored import DamageError, Tensor, read_json

_FOLDED = 8 * 2.0**-24  # relative: factors are multiplied one after the other in float32
_LAST_BITS = 2.0**-21  # of a float32: a format may store the reciprocal of a factor
_ROUNDING = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-24, "F64": 2.0**-53}


def against_source(
    directory: Directory, matrices: Mapping[str, StoredMatrix], source: Path, adapter: Path | None = None
) -> list[Check]:
    """Compare a directory with its source model. matrices: the directory's decodable matrices.

    adapter: what was merged into the source.
    """
    if unmerged := lacks_adapter(directory.report, adapter):
        return unmerged
    try:
        originals = _unstacked(directory.report, source_tensors(source, adapter))
        config = read_json(source / "config.json")
        shallow = drops_layers(directory.report)
        originals = renumbered_tensors(directory.report, originals) if shallow else originals
    except (DamageError, OSError) as error:
        return [Check("source", False, f"the source cannot be read: {error}")]
    narrow = narrows(directory.report)
    changed = {key for key in config_differences(directory, config) if not (shallow and depends_on_depth(key))}
    changed = {key for key in changed if not (narrow and holds_cut_width(directory, config, key))}
    wrong = [f"config.json has another {key!r} than the source" for key in sorted(changed)]
    wrong += guarded_list(lambda: side_file_wrongs(directory, source))
    if narrow:
        wrong += guarded_list(lambda: narrower_wrongs(directory, originals))
        originals, directory = _uncut(directory, originals)
    wrong += guarded_list(lambda: _completeness(directory, matrices, originals))
    if directory.rotated:
        there = "rotated as recorded: whether values are near the source's is for `eval` to say"
        return [summary("source", wrong, f"{len(originals)} tensors, each of its shape"), Check("bound", True, there)]
    bound = guarded_list(lambda: _bound_wrongs(directory, matrices, originals))
    return [
        summary("source", wrong, f"{len(originals)} tensors, each unchanged or quantised"),
        summary("bound", bound, f"{len(directory.records)} matrices as near to the source as recorded"),
    ]


def _unstacked(report: Mapping[str, Any], originals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The source's tensors, every stack of experts that the report names in parts; DamageError for no such stack."""
    stacked = report.get("unstacked") or {}
    if not isinstance(stacked, Mapping) or not all(isinstance(stack, Mapping) for stack in stacked.values()):
        raise DamageError("report.json does not say what became of tensors that hold all experts")
    found: dict[str, Tensor] = {}
    for name, tensor in originals.items():
        parts = parts_of_stack(tensor, stacked[name]) if name in stacked else [tensor]
        found.update((part.name, part) for part in parts)
    return found


def _uncut(directory: Directory, originals: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Directory]:
    """The source's tensors and the directory without the tensors whose channels were removed."""
    names = cut_tensors(directory, originals)
    left = {name: tensor for name, tensor in directory.tensors.items() if name not in names}
    return {name: tensor for name, tensor in originals.items() if name not in names}, replace(directory, tensors=left)


def _completeness(
    directory: Directory, matrices: Mapping[str, StoredMatrix], originals: Mapping[str, Tensor]
) -> list[str]:
    tied = bool(directory.config.get("tie_word_embeddings"))
    dense = directory.form == "dense"
    rounded = {f"{name}.weight" for name, record in directory.records.items() if dense or "pruner" in record}
    wrong, accounted = [], set()
    for name, original in originals.items():
        module = name.removesuffix(".weight")
        if module in matrices:
            accounted |= {f"{module}.{part}" for part in (*PARTS[directory.form], "weight")}
            shape = (matrices[module].rows, matrices[module].width)
            if original.shape not in (shape, shape[::-1]):
                wrong.append(f"{module} is {shape[0]} x {shape[1]}, in the source {list(original.shape)}")
        elif name in directory.tensors:
            accounted.add(name)
            written = directory.tensors[name]
            if name in rounded:
                if (written.dtype, written.shape) != (original.dtype, original.shape):
                    wrong.append(f"{name} has another type or shape than in the source")
            elif not written.equals(original) and not _as_scaled(directory, written, original):
                wrong.append(f"{name} differs from the source")
        elif not (tied and name.removesuffix(".weight") in HEADS):
            wrong.append(f"{name} of the source is missing")
    for name in sorted(directory.tensors.keys() - accounted - cache_scales(directory.tensors).keys()):
        head = name.rpartition(".")[0] in HEADS and (
            directory.rotated
            or name.rpartition(".")[0] in matrices
            or any(directory.tensors[name].equals(table) for other, table in originals.items() if "emb" in other)
        )
        if not head:  # the head was untied from the embedding
            wrong.append(f"{name} does not come from the source")
    return wrong


def _as_scaled(directory: Directory, written: Tensor, original: Tensor) -> bool:
    """Whether a tensor equals the source's times the recorded scales, to rounding; a rotation leaves only the shape."""
    if (written.dtype, written.shape) != (original.dtype, original.shape):
        return False
    if directory.rotated:
        return True
    if not any(f"{original.name}/{axis}" in directory.scales for axis in (0, 1)):
        return False
    expected = directory.original(original).astype(np.float64)
    offset = float(directory.scales.get(f"{original.name}/offset", np.float64(0)))
    slack = (_ROUNDING[written.dtype] + _FOLDED) * (np.abs(expected) + offset) + 1e-30
    return bool((np.abs(written.floats() - expected) <= 1.01 * slack).all())


def _bound_wrongs(
    directory: Directory, matrices: Mapping[str, StoredMatrix], originals: Mapping[str, Tensor]
) -> list[str]:
    wrong = []
    for module, record in directory.records.items():
        original = originals.get(f"{module}.weight")
        if original is None or not (record["grid"] or {"pruner", "recovered"} & record.keys()):
            continue
        written = matrices.get(module) or directory.tensors.get(f"{module}.weight")
        if written is None:
            wrong.append(f"{module} cannot be decoded")
            continue
        transposed = directory.transposed(record, original, written)
        nearest = record.get("method") == "rtn" and not {"pruner", "recovered"} & record.keys()
        nearest = nearest and isinstance(written, StoredMatrix)
        error, norm, far = 0.0, 0.0, 0
        rows = original.shape[1 if transposed else 0]
        for start in range(0, rows, ROWS):
            part = slice(start, min(start + ROWS, rows))
            theirs = directory.original(original, part, transposed=transposed)
            mine = (
                written.decode(part)
                if isinstance(written, StoredMatrix)
                else written.floats(part, transposed=transposed)
            )
            difference = np.abs(theirs - mine)
            error += float(np.square(difference).sum(dtype=np.float64))
            norm += float(np.square(theirs).sum(dtype=np.float64))
            if nearest and isinstance(written, StoredMatrix):
                far += int((difference > written.reach(part, theirs)).sum())
        if far:
            wrong.append(f"{module} has {far} values further from the source than rounding takes them")
        stored_as = written.dtype if isinstance(written, Tensor) else None
        wrong += _error_wrongs(module, record, float(np.sqrt(error / norm)) if norm else 0.0, stored_as)
    return wrong


def _error_wrongs(module: str, record: Mapping[str, Any], error: float, stored_as: str | None) -> list[str]:
    recorded = record.get("relative_error")
    slack = _ROUNDING[stored_as] * (1 + error) if stored_as in _ROUNDING else 0.0
    if not isinstance(recorded, (int, float)):
        return [f"{module} has no relative_error in report.json"]
    if not abs(error - recorded) <= AGREEMENT * recorded + slack + _LAST_BITS:
        return [f"{module} has a relative error of {error:.6g}, report.json says {recorded:.6g}"]
    if not (error < 1 or record.get("loss", 1) < 1):  # what makes up for errors moves weights, to keep outputs
        return [f"{module} is no nearer to the source than zeros would be (relative error {error:.3g})"]
    return []
