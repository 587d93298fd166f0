"""Outputs that an earlier start has finished. A command of several runs does not repeat finished runs."""

import json
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from llmcompress import __version__
from llmcompress.calib.base import fingerprint
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.run.tokens import calibration_tokens
from llmcompress.engine.write.run_report import source_record
from llmcompress.recipe import Recipe
from llmcompress.store.output_file import is_single, report_of
from llmcompress.store.side_files import side_files


def planned_or_finished(
    recipe: Recipe, model: Path, options: Options, tokens: Tensor | None = None
) -> tuple[Plan, dict[str, Any] | None]:
    """A plan, and the report of an existing output that is what the plan would write; None if there is no such output.

    Any other existing output is refused, as always. tokens: the calibration tokens, where they are drawn already.
    """
    over = make_plan(recipe, model, replace(options, overwrite=True))
    report = finished_report(over, tokens)
    return (over, report) if report is not None else (make_plan(recipe, model, options), None)


def finished_report(plan: Plan, tokens: Tensor | None = None) -> dict[str, Any] | None:
    """The report of the output at a plan's place if it is what the plan would write; else None.

    That is: of the same recipe, model and adapter, text, importance matrix and version, with the same side files.
    """
    file = report_of(plan.out) if is_single(plan.out) else plan.out / "report.json"
    try:
        report = json.loads(file.read_text(encoding="utf-8")) if plan.out.exists() else None
    except (OSError, ValueError, RecursionError):
        return None
    facts = {"llmcompress": __version__, "recipe": plan.recipe.as_data(), "compute_dtype": plan.dtype}
    if not isinstance(report, dict) or any(report.get(key) != value for key, value in facts.items()):
        return None
    if report.get("source") != source_record(plan.headers) or not _same_files(plan, report):
        return None
    drawn = None
    if plan.calibrated:
        drawn = fingerprint(calibration_tokens(plan) if tokens is None else tokens)
    said = report.get("calibration")
    return report if (said.get("sha256") if isinstance(said, dict) else said) == drawn else None


def _same_files(plan: Plan, report: Mapping[str, Any]) -> bool:
    """Whether a report tells of the importance matrix and the adapter of a plan, and of its side files as they are now.

    GGUF files hold side files, such as the tokenizer, among their keys: they begin as the plan's would.
    """
    for key, given in (("imatrix", plan.importance), ("adapter", plan.headers.merged)):
        said = report.get(key)
        if (said.get("sha256") if isinstance(said, dict) else None) != (None if given is None else given.sha256):
            return False
    for file in plan.files:
        place = plan.out if is_single(plan.out) else plan.out / file.name
        try:
            with place.open("rb") as held:
                if held.read(len(file.header)) != file.header:
                    return False
        except OSError:
            return False
    recorded = report.get("files")
    if is_single(plan.out) or not isinstance(recorded, dict):
        return True
    copied = {str(file.relative_to(plan.headers.path)): file for file in side_files(plan.headers.path)}
    known = {name: recorded[name].get("sha256") for name in copied if isinstance(recorded.get(name), dict)}
    return all(sha256(copied[name].read_bytes()).hexdigest() == said for name, said in known.items())
