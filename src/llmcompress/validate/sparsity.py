"""Checks that pruned matrices have the recorded number of zeros in the recorded pattern."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from llmcompress.validate.directory import ROWS, Directory
from llmcompress.validate.findings import Check, guarded_list, summary
from llmcompress.validate.matrix import StoredMatrix
from llmcompress.validate.stored import DamageError

_AGREEMENT = 1e-5  # shares are recorded with six digits


def sparsity(directory: Directory, matrices: Mapping[str, StoredMatrix]) -> Check | None:
    """The check of all matrices with recorded sparsity; None if there are none."""
    recorded = {name: record for name, record in directory.records.items() if "sparsity" in record}
    if not recorded:
        return None
    wrong: list[str] = []
    for module, record in recorded.items():
        wrong += guarded_list(partial(_wrongs, directory, matrices, module, record))
    return summary("sparsity", wrong, f"{len(recorded)} matrices have the zeros that were recorded")


def _wrongs(
    directory: Directory, matrices: Mapping[str, StoredMatrix], module: str, record: Mapping[str, Any]
) -> list[str]:
    matrix, tensor = matrices.get(module), directory.tensors.get(f"{module}.weight")
    if matrix is None and tensor is None:
        return [f"{module} cannot be decoded"]
    kept, run = _pattern(module, record)
    zeros = broken = total = 0
    rows, width = (int(extent) for extent in record["shape"])
    for start in range(0, rows, ROWS):
        part = slice(start, min(start + ROWS, rows))
        if matrix is not None:
            values = matrix.decode(part)
        elif tensor is not None:
            values = tensor.floats(part, transposed=directory.transposed(record, tensor, tensor))
        zeros += int((values == 0).sum())
        total += values.size
        if run:
            broken += int(((values.reshape(-1, width // run, run) != 0).sum(-1) > kept).sum())
    if broken:
        return [f"{module} has {broken} runs of {run} with more than {kept} weights"]
    if not abs(zeros / total - float(record["sparsity"])) <= _AGREEMENT:
        return [f"{module} has {zeros / total:.4%} zeros, report.json says {float(record['sparsity']):.4%}"]
    return []


def _pattern(module: str, record: Mapping[str, Any]) -> tuple[int, int]:
    """n and m of an n:m pattern; zeros without a pattern."""
    if record.get("pattern") is None:
        return 0, 0
    found = re.fullmatch(r"(\d+):(\d+)", str(record["pattern"]))
    if found is None or int(found[2]) < 1 or int(record["shape"][1]) % int(found[2]):
        raise DamageError(f"report.json has no usable pattern for {module}")
    return int(found[1]), int(found[2])
