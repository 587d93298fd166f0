"""Every shipped recipe runs on the tiny trained model, and what it writes is verified and near its source."""

from pathlib import Path

import pytest
import torch

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.recipe import load
from llmcompress.validate.evaluate import measure
from llmcompress.validate.gguf_verify import verify_gguf
from llmcompress.validate.load import open_streamed
from llmcompress.validate.verify import passed, verify

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_shipped_recipe_runs(file, shallow_model_dir, tmp_path, windows):
    recipe = load(file)
    short = recipe.calibration.model_copy(update={"samples": 8, "length": 64})
    gguf = recipe.output.format == "gguf"
    out = tmp_path / ("out.gguf" if gguf else "out")
    run(make_plan(recipe.model_copy(update={"calibration": short}), shallow_model_dir, Options(out=out)))
    checks = (verify_gguf if gguf else verify)(out, shallow_model_dir)
    assert passed(checks), [check for check in checks if not check.ok]
    subject = open_streamed(out, dtype=torch.float32, source=shallow_model_dir if gguf else None)
    reference = open_streamed(shallow_model_dir, dtype=torch.float32)
    assert float(measure(subject, reference, windows[:6]).kl.mean()) < (0.9 if recipe.pruner else 0.3)
