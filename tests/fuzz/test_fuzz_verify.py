"""Damaged outputs before `verify` and `inspect`: a verdict or a refusal, never a traceback."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from llmcompress.cli.checks import inspect
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.recipe import parse
from llmcompress.validate.verify import verify
from mutations import SCALARS, fuzz, measured, spoilt

KEYS = ["quantization_config", "config_groups", "weights", "targets", "ignore", "bits", "sym", "linears", "tensors",
        "name", "grid", "method", "relative_error", "permuted", "transposed", "format", "quant_method"]  # fmt: skip
VALUES = ['"gptq"', '"int4-g64-sym"', '"int9-g0-sym"', '"Linear"', '["re:["]', '"re:("', '"-:["', '{"x": {}}', *SCALARS]


@pytest.mark.parametrize(
    ("format_", "inputs"),
    [
        ("compressed-tensors", 20),
        pytest.param("compressed-tensors", 50, marks=pytest.mark.slow),
        pytest.param("gptq", 50, marks=pytest.mark.slow),
    ],
)
def test_damaged_outputs(format_, inputs, random_model_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["llmcompress", "inspect"])  # what it prints has to follow the schema of that
    model, out = random_model_dir("llama", num_hidden_layers=1), tmp_path / "out"
    made = parse({"steps": [{"method": "rtn", "bits": 4, "group_size": 32}], "output": {"format": format_}})
    run(make_plan(made, model, Options(out=out)))
    whole = Path(shutil.copytree(out, tmp_path / "whole"))
    names = ["config.json", "report.json", "quantize_config.json"]
    names = [name for name in names if (whole / name).exists()]

    def check(dice):
        for name in names:  # also what an input left that failed
            shutil.copy(whole / name, out / name)
        name = dice.choose(names)
        (out / name).write_bytes(spoilt(json.loads((whole / name).read_text()), dice, KEYS, VALUES))
        measured(lambda: verify(out, model), 1 << 40)
        measured(lambda: inspect(out, tensors=False, json_=False), 1 << 40)
        measured(lambda: inspect(out, tensors=False, json_=True), 1 << 40)
        capsys.readouterr()

    fuzz(inputs, check)
