"""Figures of an evaluation saved in a file, so that a resumed sweep does not measure a candidate again."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmcompress import __version__
from llmcompress.store.sealed import sealed, unsealed
from llmcompress.store.unfinished import write_whole
from llmcompress.validate.request import Request
from llmcompress.validate.session import evaluate_paths, evaluated_files
from llmcompress.validate.token_statistics import not_finite


def cached_figures(request: Request, kept: Path, watch: Callable[[int, int], None]) -> dict[str, Any]:
    """Figures of `evaluate_paths` for a directory with a report.json; from `kept` if saved for an equal request."""
    asked = _identity(request)
    try:
        found = unsealed(kept.read_bytes())
    except (OSError, ValueError):
        found = {}
    if found.get("of") == asked and isinstance(found.get("figures"), dict):
        return found["figures"]  # type: ignore[no-any-return]
    figures = evaluate_paths(request, watch)
    if not_finite(figures) is not None:  # JSON cannot say it
        return figures
    write_whole(kept, sealed({"of": asked, "figures": figures}), overwrite=True)
    return figures


def _identity(request: Request) -> dict[str, Any]:
    """Everything except the machine that the figures depend on."""
    asked = asdict(request)
    for place in ("model", "ref", "text", "cache", "timing", "ref_cache"):
        del asked[place]
    digest = hashlib.sha256()
    for file in evaluated_files(request.text):
        digest.update(file.read_bytes())
    report = hashlib.sha256(
        (request.model / "report.json").read_bytes()
    ).hexdigest()  # the report also holds the hashes of the source
    return {**asked, "llmcompress": __version__, "report": report, "text": digest.hexdigest()}
