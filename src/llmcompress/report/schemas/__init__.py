"""JSON schemas, made from the documents that the code itself reads and writes; those of files are published beside."""

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from llmcompress.engine.write.report_schema import Report, Timing
from llmcompress.report.schemas.printed import PRINTED, NullForNotFinite
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
    """The schema of a file, as published, or of what a command of PRINTED prints with --json."""
    if name in PRINTED:
        return made(name)
    return (Path(__file__).parent / f"{name}.schema.json").read_text(encoding="utf-8")


def made(name: str) -> str:
    """The schema generated from the code; a published schema must equal it."""
    kind, generator = (PRINTED[name], NullForNotFinite) if name in PRINTED else (SCHEMAS[name], GenerateJsonSchema)
    found = TypeAdapter(kind).json_schema(schema_generator=generator)
    return json.dumps({"$schema": DIALECT, **found}, indent=2) + "\n"
