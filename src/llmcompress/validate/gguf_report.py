"""The report of a GGUF file, and whether file and report are what the run wrote."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmcompress.store.gguf_header import GgufHeader
from llmcompress.store.output_file import BESIDE, SINGLE_FILE, beside, report_of
from llmcompress.validate.findings import Check, guarded, summary
from llmcompress.validate.published import REPORT, content_wrong, directory_checks, misfit, recorded_files, report_edits
from llmcompress.validate.stored import DamageError, read_json

_RECIPE = "llmcompress.yaml"


def report_checks(header: GgufHeader, has_source: bool) -> tuple[Mapping[str, Any], list[Check]]:
    """The report of a file, empty where none can be used, and the checks of both.

    Without a report a file can be held to its source alone; where that is not given either, nothing is proved.
    """
    own, shared = report_of(header.path), header.path.with_name(REPORT)
    file = next((path for path in (own, shared) if os.path.lexists(path)), None)
    if file is None and header.path.with_name(_RECIPE).exists():  # of a directory, which is more than its GGUF files
        return {}, [Check("report", False, f"{REPORT} is missing")]
    if file is None:
        missing = "none beside the file, which only its source can prove then (--source)"
        return {}, [Check("report", False, missing, warning=has_source)]
    try:
        report = read_json(file)
    except DamageError as error:
        return {}, [Check("report", False, str(error))]
    tensors, linears = report.get("tensors"), report.get("linears")
    if report.get("format") != "gguf" or not isinstance(tensors, dict) or not isinstance(linears, list):
        return {}, [Check("report", False, f"{file.name} is not that of a GGUF file")]
    wrong = [f"{file.name} {found}"] if (found := misfit(file)) else report_edits(file.read_bytes())
    edited = summary("report", wrong, "as it was written")
    if file == shared:
        return report, [edited, *directory_checks(header.path.parent, report)]
    right = "as recorded, and what lies beside it"
    return report, [edited, guarded("file", lambda: summary("file", _file_wrongs(header.path, report), right))]


def _file_wrongs(path: Path, report: Mapping[str, Any]) -> list[str]:
    """Faults of a single file, and of the files that belong to it."""
    recorded = recorded_files(report)
    places = {SINGLE_FILE: path, **{name: beside(path, name) for name in BESIDE}}
    wrong = [f"{name} is recorded, and belongs to no GGUF file" for name in recorded.keys() - places.keys()]
    for name, place in places.items():
        there = os.path.lexists(place)
        if name in recorded:
            found = content_wrong(place, recorded[name]) if there else "is missing"
            wrong += [f"{place.name} {found}"] if found else []
        elif name != REPORT and there:
            wrong.append(f"{place.name} was not written by the run")
    return wrong if SINGLE_FILE in recorded else [*wrong, f"the report does not record {SINGLE_FILE}"]
