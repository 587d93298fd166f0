"""A written directory as `verify` reads it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcompress.validate.matrices import Matrix
from llmcompress.validate.stored import Tensor

ROWS = 512  # of a matrix, compared at once
HEADS = {"lm_head", "embed_out"}
_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")  # store matrices [in, out]


@dataclass(frozen=True)
class Directory:
    """form: name of its format. report: that of the run, empty if it is of no use."""

    path: Path
    config: Mapping[str, Any]
    form: str
    tensors: Mapping[str, Tensor]
    report: Mapping[str, Any]

    @property
    def records(self) -> dict[str, Mapping[str, Any]]:
        """What the report says of each linear, by its on-disk name."""
        return {record["name"]: record for record in self.report.get("linears", ())}

    def transposed(self, record: Mapping[str, Any], original: Tensor, written: Matrix | Tensor) -> bool:
        """Whether the source stores a linear as [in, out]. record: what the report says of it."""
        if "transposed" in record:
            return bool(record["transposed"])
        if isinstance(written, Matrix) and written.rows != written.width:
            return original.shape != (written.rows, written.width)
        return self.config.get("model_type") in _CONV1D
