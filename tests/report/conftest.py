"""Outputs of the tiny model, evaluated and timed once for all tests of pages."""

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from llmcompress.api.evaluation import EvaluationResult
from llmcompress.cli import app
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.process.progress import Progress
from llmcompress.engine.write.timings import Timings
from llmcompress.recipe import parse
from llmcompress.validate.session import Request, continuations, evaluate_whole

STEPS = {
    "four": ("compressed-tensors", {"method": "gptq", "bits": 4, "group_size": 64}),
    "three": ("gptq", {"method": "rtn", "bits": 3, "group_size": 64}),
    "small.gguf": ("gguf", {"method": "rtn", "gguf": {"type": "Q4_0"}}),
}


class Made(NamedTuple):
    """Paths: outputs by name, evaluations by name, the file of timings."""

    outputs: dict[str, Path]
    evaluations: dict[str, Path]
    timings: Path

    def arguments(self, *names: str) -> list[object]:
        """Of `llmcompress report`."""
        evaluations = [part for name in names for part in ("--evaluation", self.evaluations[name])]
        return [*(self.outputs[name] for name in names), *evaluations, "--timings", self.timings]


def compress(model: Path, out: Path, name: str, timings: Path | None = None) -> None:
    format_, step = STEPS[name]
    calibration = {"samples": 4, "length": 32}
    plan = make_plan(
        parse({"calibration": calibration, "steps": [step], "output": {"format": format_}}), model, Options(out=out)
    )
    timed = None if timings is None else Timings(timings, plan, Progress())
    run(plan, timed)
    if timed is not None:
        timed.end()


@pytest.fixture(scope="session")
def made(tiny_model_dir: Path, tiny_eval_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Read-only."""
    folder = tmp_path_factory.mktemp("reported")
    timings = folder / "timings.jsonl"
    outputs, evaluations = {}, {}
    for name in STEPS:
        outputs[name] = folder / name
        compress(tiny_model_dir, outputs[name], name, timings)
        request = Request(outputs[name], tiny_model_dir, str(tiny_eval_text), 48, 6, 6, "cpu", "float32")
        evaluations[name] = folder / f"{name}.eval.json"
        result = EvaluationResult(request, evaluate_whole(request, lambda done, of: None))
        written = continuations(request, "The water", 24)
        result.with_written("The water", written).save(evaluations[name])
    return Made(outputs, evaluations, timings)


@pytest.fixture(scope="session")
def structural(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Outputs whose structure is another, by the command that made them, and what `lora` repairs. Read-only."""
    folder = tmp_path_factory.mktemp("structure")
    short, many = (["--samples", count, "--length", 16, "-q"] for count in (2, 16))
    commands = {
        "rtn": ["rtn", tiny_model_dir, "--group-size", 64, "-q"],
        "depth": ["depth", tiny_model_dir, "--drop", 1, "--keep-first", 1, *short],
        "width": ["width", tiny_model_dir, "--ratio", 0.5, *short],
        "lora": ["lora", tiny_model_dir, folder / "rtn", "--rank", 2, *short],
        "draft": ["draft", tiny_model_dir, "--steps", 2, "--vocab", 200, "--written", 16, *many],
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, command in commands.items():
            patch.setattr(sys, "argv", ["llmcompress", *map(str, command), "-o", str(folder / name)])
            with pytest.raises(SystemExit) as end:
                app.main()
            assert not end.value.code
    return {name: folder / name for name in commands}
