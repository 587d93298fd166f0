"""Published JSON schemas: files beside this one, made from the documents that the code itself reads and writes."""

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from llmcompress.engine.write.report_schema import Report, Timing
from llmcompress.validate.evaluation import Evaluation
from llmcompress.validate.long_evaluation import LongEvaluation
from llmcompress.validate.task_evaluation import TaskEvaluation

SCHEMAS: dict[str, Any] = {
    "report": Report,
    "evaluation": Evaluation,
    "tasks": TaskEvaluation,
    "long": LongEvaluation,
    "timings": Timing,
}
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema_text(name: str) -> str:
    """The published schema of a document."""
    return (Path(__file__).parent / f"{name}.schema.json").read_text(encoding="utf-8")


def made(name: str) -> str:
    """The schema generated from the code, which the published schema must equal."""
    found = TypeAdapter(SCHEMAS[name]).json_schema()
    return json.dumps({"$schema": DIALECT, **found}, indent=2) + "\n"
