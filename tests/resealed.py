"""An output whose report is renewed after a change, as a faulty writer would have left it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from llmcompress.validate.stored import read_tensors


def reseal(out: Path, **changes: Any) -> None:
    """Record the tensors and files of a directory as they are now, and make the digest of the report anew."""
    report = json.loads((out / "report.json").read_text())
    report["tensors"] = {name: tensor.sha256() for name, tensor in read_tensors(out).items()}
    report["files"] = {
        str(file.relative_to(out)): {"bytes": file.stat().st_size, "sha256": _sha256(file.read_bytes())}
        for file in sorted(out.rglob("*"))
        if file.is_file() and file.name != "report.json"
    }
    seal(out / "report.json", {**report, **changes})


def seal(file: Path, report: dict[str, Any]) -> None:
    """Write a report with a digest that fits it."""
    report.pop("sha256", None)
    text = _text(report)
    file.write_bytes(_text({**report, "sha256": _sha256(text)}))


def _text(report: dict[str, Any]) -> bytes:
    return (json.dumps(report, indent=2) + "\n").encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
