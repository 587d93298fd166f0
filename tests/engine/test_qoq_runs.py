"""W4A8KV4 in the manner of QServe on the tiny trained model: the recipe, its output, and what becomes of it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import PlanError, RecipeError
from llmcompress.recipe import load, parse
from llmcompress.validate.load import open_streamed
from llmcompress.validate.verify import passed, verify
from tinyruns import kl

CALIBRATION = {"source": "default", "samples": 16, "length": 64}
W4A8 = {"method": "gptq", "type": "progressive", "activations": "int8-token"}
MODULE = "model.layers.1.mlp.down_proj"


def made(model, out, step, format_="qoq", before=()):
    recipe = {"calibration": CALIBRATION, "steps": [*before, step], "output": {"format": format_}}
    run(make_plan(parse(recipe), model, Options(out=out)))
    return out


def test_the_recipe_of_qserve_gives_a_model_near_its_source(tiny_model_dir, tmp_path, windows):
    shipped = load(Path(__file__).parents[2] / "configs" / "w4a8kv4.yaml")
    recipe = shipped.model_copy(
        update={"calibration": parse({"calibration": CALIBRATION, "steps": [W4A8]}).calibration}
    )
    run(make_plan(recipe, tiny_model_dir, Options(out=tmp_path / "out")))
    assert kl(tmp_path / "out", tiny_model_dir, windows) < 0.05
    checks = verify(tmp_path / "out", tiny_model_dir)
    assert passed(checks), [check for check in checks if not check.ok]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    kept = {name.removeprefix(f"{MODULE}."): (part.dtype, tuple(part.shape)) for name, part in tensors.items()
            if name.startswith(MODULE)}  # fmt: skip
    assert kept == {
        "qweight": (torch.int32, (256, 64)),
        "scale_row": (torch.float16, (256,)),
        "scale_group": (torch.uint8, (256, 4)),
        "zero_group": (torch.uint8, (256, 4)),
    }


def test_gptq_is_nearer_to_the_source_than_rounding_and_inputs_are_rounded_in_eval(tiny_model_dir, tmp_path, windows):
    rounded = made(tiny_model_dir, tmp_path / "rtn", {**W4A8, "method": "rtn"})
    solved = made(tiny_model_dir, tmp_path / "gptq", W4A8)
    weights_alone = made(tiny_model_dir, tmp_path / "w4", {**W4A8, "activations": "none"})
    assert kl(solved, tiny_model_dir, windows) < 0.8 * kl(rounded, tiny_model_dir, windows)
    with_inputs, without = (open_streamed(path, dtype=torch.float32) for path in (solved, weights_alone))
    assert with_inputs.weights.inputs(MODULE).spec.name == "int8-token"
    assert without.weights.inputs(MODULE) is None


def test_dense_output_holds_the_values_of_the_codes(tiny_model_dir, tmp_path):
    step = {"method": "rtn", "type": "progressive", "group_size": 32}
    coded = open_streamed(made(tiny_model_dir, tmp_path / "qoq", step), dtype=torch.float32).weights
    dense = load_file(made(tiny_model_dir, tmp_path / "dense", step, "dense") / "model.safetensors")
    stored = dense[f"{MODULE}.weight"]
    assert torch.equal(coded.read(f"{MODULE}.weight").to(stored.dtype), stored)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": 3}, "type progressive has 4 bits"),
        ({"group_size": -1}, "groups of 32, 64, 128, not -1"),
        ({"clip": "output"}, "clip: output searches ranges of integers"),
    ],
)
def test_contradictions_are_refused_before_anything_is_read(tiny_model_dir, tmp_path, options, words):
    with pytest.raises((PlanError, RecipeError), match=words):
        made(tiny_model_dir, tmp_path / "out", {**W4A8, **options})


def test_a_group_size_that_does_not_fit_is_refused_with_those_that_do(random_model_dir, tmp_path):
    model = random_model_dir("llama", hidden_size=64, intermediate_size=96)
    with pytest.raises(PlanError, match="group size 64 does not divide the 96 inputs") as refused:
        made(model, tmp_path / "out", {"method": "rtn", "type": "progressive", "group_size": 64})
    assert refused.value.hint == "use --group-size 32"
