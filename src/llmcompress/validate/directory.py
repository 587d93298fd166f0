"""A written directory as `verify` reads it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llmcompress import npzfile
from llmcompress.validate.matrix import StoredMatrix
from llmcompress.validate.stored import Array, DamageError, Tensor

ROWS = 128  # rows of a matrix compared at once
HEADS = {"lm_head", "embed_out"}
CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")  # store matrices [in, out]


@dataclass(frozen=True)
class Directory:
    """form: name of the format. report: the run's report.json, empty if it cannot be used."""

    path: Path
    config: Mapping[str, Any]
    form: str
    tensors: Mapping[str, Tensor]
    report: Mapping[str, Any]

    @property
    def records(self) -> dict[str, Mapping[str, Any]]:
        """The report's record of each linear, by on-disk name."""
        return {record["name"]: record for record in self.report.get("linears", ())}

    @property
    def rotated(self) -> bool:
        """Whether a rotation mixed the source's channels."""
        return is_rotated(self.report)

    @cached_property
    def scales(self) -> Mapping[str, Array]:
        """Factors that multiplied a source tensor before writing, by tensor and axis; DamageError."""
        return read_scales(self.path / "transforms.npz")

    def original(self, tensor: Tensor, part: slice = slice(None), *, transposed: bool = False) -> Array:
        """Rows, or columns as rows, of a source tensor times its recorded factors, in float32."""
        values = tensor.floats(part, transposed=transposed)
        offset = self.scales.get(f"{tensor.name}/offset", np.float64(0))
        along, across = (1, 0) if transposed else (0, 1)
        rows, columns = (self.scales.get(f"{tensor.name}/{axis}") for axis in (along, across))
        if rows is None and columns is None:
            return values
        wide = values.astype(np.float64) + offset
        if rows is not None:
            wide *= rows[part].reshape(-1, *[1] * (values.ndim - 1))
        if columns is not None:
            wide *= columns
        return (wide - offset).astype(np.float32)

    def transposed(self, record: Mapping[str, Any], original: Tensor, written: StoredMatrix | Tensor) -> bool:
        """Whether the source stores a linear as [in, out]. record: the linear's record in the report."""
        if "transposed" in record:
            return bool(record["transposed"])
        if isinstance(written, StoredMatrix) and written.rows != written.width:
            return original.shape != (written.rows, written.width)
        return self.config.get("model_type") in CONV1D


def is_rotated(report: Mapping[str, Any]) -> bool:
    """Whether a run rotated the channels of its model."""
    recipe = report.get("recipe")
    steps = recipe.get("steps") if isinstance(recipe, Mapping) else None
    found = steps if isinstance(steps, list) else []
    return any(isinstance(step, Mapping) and step.get("method") == "rotate" for step in found)


def read_scales(file: Path) -> Mapping[str, Array]:
    """The recorded scales of an output in float64, none if there is no such file; DamageError."""
    return {name: array.astype(np.float64) for name, array in read_arrays(file).items()} if file.exists() else {}


def read_arrays(file: Path) -> dict[str, Array]:
    """All arrays of an .npz; DamageError."""
    try:
        return npzfile.read_arrays(file)
    except ValueError as error:
        raise DamageError(str(error)) from None
