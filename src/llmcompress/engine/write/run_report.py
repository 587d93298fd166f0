"""The content of report.json: what was done, to which model, with what result. It holds no times and no paths."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcompress import __version__
from llmcompress.engine.write.report_schema import REPORT_SCHEMA
from llmcompress.ledger import Ledger
from llmcompress.store.headers import ModelHeaders

if TYPE_CHECKING:
    from llmcompress.engine.plan.plan import Plan


def build_report(
    plan: "Plan",
    records: Mapping[str, list[dict[str, Any]]],
    ledger: Ledger,
    calibration: Mapping[str, Any] | None,
    tensors: Mapping[str, str],
    kv_cache: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of report.json; the same inputs give the same bytes.

    records: lists of records on matrices and sites. tensors: SHA-256 (hex) of each tensor of the output by its name.
    """
    return {
        "schema_version": REPORT_SCHEMA,
        "llmcompress": __version__,
        "format": plan.format.name,
        "recipe": plan.recipe.as_data(),
        "source": source_record(plan.headers),
        "calibration": dict(calibration) if calibration is not None else None,
        "imatrix": None
        if plan.importance is None
        else {"file": plan.importance.file, "sha256": plan.importance.sha256},
        "kv_cache": kv_cache,
        "compute_dtype": plan.dtype,
        "output_bytes": plan.estimate.output_bytes,
        **plan.estimate.bits(),
        **records,
        "ledger": ledger.as_json(),
        "tensors": dict(tensors),
        **_unstacked(plan.headers),
        **({} if plan.headers.merged is None else {"adapter": {"sha256": plan.headers.merged.sha256}}),
    }


def _unstacked(headers: ModelHeaders) -> dict[str, Any]:
    """What became of tensors of the source that are many matrices, where there are such."""
    stacks = {name: {**asdict(stack), "parts": list(stack.parts)} for name, stack in headers.unstacked.items()}
    return {"unstacked": stacks} if stacks else {}


def source_record(headers: ModelHeaders) -> dict[str, Any]:
    """The record of the source model in the report: hashes that tell the model from any other."""
    config = headers.path / "config.json"
    return {
        "headers_sha256": headers.fingerprint,
        "config_sha256": file_sha256(config) if config.is_file() else None,
        "files_sha256": {file.name: file_sha256(file) for file in headers.files},
        "bytes": headers.nbytes,
    }


def file_sha256(file: Path) -> str:
    """SHA-256 (hex) of the content of a file."""
    total = hashlib.sha256()
    with file.open("rb") as handle:
        while chunk := handle.read(1 << 22):
            total.update(chunk)
    return total.hexdigest()
