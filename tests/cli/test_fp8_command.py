"""`llmcompress fp8`, and rounded inputs on the command line: what is planned, written, inspected and refused."""

import json

import pytest


def test_the_command_writes_floats_with_rounded_inputs(main, tiny_model_dir, tmp_path, capsys):
    out = tmp_path / "out"
    assert main("fp8", tiny_model_dir, "-o", out, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert {(record["grid"], record["inputs"]) for record in report["linears"]} == {("fp8-row", "fp8-token")}
    assert report["calibration"] is None
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["format"] == "float-quantized"
    assert "w8a8" in (out / "README.md").read_text()
    assert main("inspect", out) == 0
    assert "8 bits float, channel, inputs 8 bits float by token (dynamic scale)" in capsys.readouterr().out
    assert main("verify", out, "--source", tiny_model_dir) == 0


def test_the_recipe_of_the_command_is_the_one_in_configs(main, tiny_model_dir, capsys):
    from pathlib import Path

    from llmcompress.recipe import load, parse
    from llmcompress.yamlfile import read_yaml

    assert main("fp8", tiny_model_dir, "--print-recipe") == 0
    printed = parse(read_yaml(capsys.readouterr().out))
    assert printed == load(Path(__file__).parents[2] / "configs" / "fp8.yaml")


def test_a_plan_names_what_becomes_of_inputs(main, tiny_model_dir, capsys):
    arguments = ("rtn", tiny_model_dir, "--bits", "8", "--group-size", "-1", "--activations", "int8-tensor")
    assert main("plan", *arguments, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert {matrix["inputs"] for matrix in facts["matrices"]} == {"int8-tensor"}
    assert facts["passes"] == 1
    assert facts["targets"]["vllm"] == "ok"
    assert facts["output"].endswith("tiny-llama-rtn-w8a8row")
    assert main("plan", *arguments) == 0
    shown = capsys.readouterr().out
    assert "inputs" in shown
    assert "int8-tensor" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--bits", "8", "--activations", "int8-token"), "one symmetric scale per row"),
        (("--activations", "fp8-token"), "not multiplied by any engine"),
        (("--type", "fp8", "--bits", "8", "--group-size", "64"), "one scale per row"),
        (("--type", "fp8", "--bits", "8", "--asym"), "no zero points"),
        (("--activations", "int8-token", "--format", "gptq"), "inputs are rounded"),
        (("--activations", "int8-token", "--format", "dense"), "inputs are rounded"),
    ],
)
def test_what_no_file_can_say_is_refused_in_one_line(main, tiny_model_dir, tmp_path, capsys, options, words):
    assert main("rtn", tiny_model_dir, "-o", tmp_path / "out", *options) == 2
    shown = capsys.readouterr().err
    assert " ".join(shown.split()).count("error: ") == 1
    assert words in " ".join(shown.split())
    assert "hint: " in shown
    assert not (tmp_path / "out").exists()
