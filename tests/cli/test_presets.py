"""Presets: what one can say; `nf4` and `int8` from the command line, with defaults and the way through eval."""

import json

import pytest
import yaml

from llmcompress.api.presets import PRESETS, Preset
from llmcompress.errors import RecipeError
from llmcompress.transforms.rotate import Rotate
from llmcompress.transforms.smoothquant import SmoothQuant


def recipe(main, capsys, *arguments):
    assert main(*arguments, "--print-recipe") == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_presets_are_recipes_for_bitsandbytes(main, capsys, tiny_model_dir):
    plain = recipe(main, capsys, "nf4", tiny_model_dir)
    [step] = plain["steps"]
    assert (step["method"], step["type"], step["double_quant"]) == ("rtn", "nf4", True)
    assert plain["output"]["format"] == "bitsandbytes"
    [step] = recipe(main, capsys, "nf4", tiny_model_dir, "--calibration", "default", "--no-double-quant")["steps"]
    assert (step["method"], step["double_quant"]) == ("gptq", False)
    [step] = recipe(main, capsys, "int8", tiny_model_dir)["steps"]
    assert (step["method"], step["type"], step["bits"], step["outliers"]) == ("rtn", "int8", 8, "none")
    beside = recipe(main, capsys, "int8", tiny_model_dir, "--outliers", "topk", "--outlier-count", 4)
    assert beside["output"]["format"] == "int8-outliers"
    assert beside["steps"][0]["outlier_count"] == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--type", "nf4", "--bits", 3), "type nf4 has 4 bits, not 3"),
        (("--type", "nf4", "--group-size", 64), "neither group sizes nor zero points"),
        (("--type", "codebook", "--bits", 8), "type codebook has 2 or 3 or 4 bits"),
        (("--outliers", "topk"), "beside type int8 only"),
        (("--type", "nf4", "--format", "gptq"), "cannot hold nf4-double"),
    ],
)
def test_contradictions_end_in_one_line(main, capsys, tiny_model_dir, tmp_path, options, words):
    assert main("rtn", tiny_model_dir, "-o", tmp_path / "out", *options) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_nf4_goes_through_the_command_line_and_is_read_back(main, capsys, tiny_model_dir, tiny_eval_text, tmp_path):
    out = tmp_path / "out"
    assert main("nf4", tiny_model_dir, "-o", out, "--json") == 0
    capsys.readouterr()
    assert main("verify", out, "--source", tiny_model_dir, "--json") == 0
    capsys.readouterr()
    assert (
        main("eval", out, "--ref", tiny_model_dir, "--text", tiny_eval_text, "--windows", 4, "--length", 64, "--json")
        == 0
    )
    assert 0.001 < json.loads(capsys.readouterr().out)["kl"] < 0.1


def test_int8_rounds_inputs_in_eval(main, capsys, tiny_model_dir, tiny_eval_text, tmp_path):
    """Weights alone in int8 lose far less than inputs and weights do."""
    figures = []
    for format_ in ("bitsandbytes", "dense"):
        out = tmp_path / format_
        assert main("int8", tiny_model_dir, "-o", out, "--format", format_, "--json") == 0
        capsys.readouterr()
        assert (
            main(
                "eval", out, "--ref", tiny_model_dir, "--text", tiny_eval_text, "--windows", 4, "--length", 64, "--json"
            )
            == 0
        )
        figures.append(json.loads(capsys.readouterr().out)["kl"])
    assert figures[0] > 1.2 * figures[1]
    assert figures[0] < 0.01


def test_a_preset_puts_transforms_before_its_method():
    preset = Preset(
        "smooth",
        "",
        transforms=(SmoothQuant,),
        fixed={"bits": 8, "group_size": -1, "activations": "int8-token"},
        offered=("clip",),
    )
    found = preset.recipe({"alpha": 0.6, "clip": "minmax", "set": {"o_proj": {"skip": True}}, "kv_cache": "fp8"})
    smooth, method = found.steps
    assert (smooth.name, smooth.alpha, smooth.flows) == ("smoothquant", 0.6, True)
    assert (method.name, method.bits, method.activations, method.clip) == ("rtn", 8, "int8-token", "minmax")
    assert method.set == {"o_proj": {"skip": True}}
    assert (found.output.format, found.kv_cache.code) == ("compressed-tensors", "fp8")


@pytest.mark.parametrize(
    ("said", "clip"),
    [({}, "minmax"), ({"clip": None}, "minmax"), ({"clip": "search"}, "search"), ({"calibration": "default"}, "search"),
     ({"calibration": "default", "clip": "minmax"}, "minmax")],
)  # fmt: skip
def test_nf4_covers_every_weight_unless_a_text_says_what_matters(said, clip):
    assert PRESETS["nf4"].recipe(said).method.clip == clip


def test_a_preset_of_a_transform_alone_has_no_options_of_a_method():
    preset = Preset("rotate", "", method=None, transforms=(Rotate,), format="dense")
    assert {"residual", "values", "seed"} <= preset.fields.keys()
    assert not {"bits", "set"} & preset.fields.keys()
    found = preset.recipe({"seed": 7, "values": False})
    assert found.method is None
    assert [(step.name, step.seed, step.values) for step in found.transforms] == [("rotate", 7, False)]
    assert found.output.format == "dense"


def test_options_of_a_preset_are_checked_as_those_of_a_recipe_are():
    preset = Preset("smooth", "", transforms=(SmoothQuant,), offered=("clip",))
    with pytest.raises(RecipeError, match="smoothquant: alpha"):
        preset.recipe({"alpha": 2.0})
