"""Streams that are closed, full or gone, a place that is gone, and an environment that lacks everything."""

import os
import shutil

import pytest
from attempts import Attempt

from rounds import in_turn

pytestmark = pytest.mark.slow

SHORT = ["--samples", "2", "--length", "16"]
COMMANDS = {
    "rtn": ["rtn", "model", "-o", "out", "--bits", "4", "--group-size", "64"],
    "gptq": ["gptq", "model", "-o", "out", "--bits", "4", "--group-size", "64", *SHORT],
    "gguf": ["gguf", "model", "-o", "out", "--type", "Q4_0"],
    "depth": ["depth", "model", "-o", "out", "--drop", "1", *SHORT],
    "plan": ["plan", "rtn", "model", "--bits", "4"],
    "json": ["plan", "rtn", "model", "--bits", "4", "--json"],
    "inspect": ["inspect", "model"],
    "list": ["list", "formats"],
    "help": ["--help"],
    "refused": ["rtn", "nowhere"],
    "unknown": ["nothing"],
    "eval": ["eval", "model", "--length", "16", "--windows", "1"],
    "log": ["rtn", "model", "-o", "out", "--bits", "4", "--group-size", "64", "-q", "--log-format", "json"],
}
WRITING = ("rtn", "gptq", "gguf", "depth", "log")
CLOSED = [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
ENVIRONMENTS = {
    "no home": {"HOME": "/nonexistent"},
    "an empty home": {"HOME": ""},
    "no temporary place": {"TMPDIR": "/nonexistent"},
    "a cache that is no folder": {"HF_HOME": "/dev/null"},
    "ascii": {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    "a language nobody knows": {"LC_ALL": "xx_YY.UTF-8", "LANGUAGE": "xx"},
    "a traceback": {"LLMCOMPRESS_TRACEBACK": "0"},
    "a narrow terminal": {"COLUMNS": "1", "LINES": "1"},
    "no columns": {"COLUMNS": "-5"},
    "colours": {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "dumb"},
}


def attempt(kind, label, model, **more):
    return Attempt(
        f"{kind} {label}",
        COMMANDS[label],
        lambda place: shutil.copytree(model, place / "model", copy_function=os.link),
        source="model",
        output="out" if label in WRITING else None,
        left=("out.work",),
        **more,
    )


def test_closed_streams(attack, tiny_model_dir):
    attack("closed streams", [
        attempt(f"closed {closed}", label, tiny_model_dir, closed=closed)
        for number, closed in enumerate(CLOSED) for label in in_turn([*COMMANDS], number, 4)
    ])  # fmt: skip


def test_environments(attack, tiny_model_dir):
    attack("environments", [
        attempt(name, label, tiny_model_dir, environment=variables)
        for number, (name, variables) in enumerate(ENVIRONMENTS.items())
        for label in in_turn(("rtn", "gptq", "plan", "refused", "inspect", "log"), number, 3)
    ])  # fmt: skip
