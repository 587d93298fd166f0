"""`recipe list|show|check`, and `run` with the name of a recipe that comes with llmcompress."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from llmcompress.api.recipes import packaged_recipes, recipe_file
from llmcompress.calib import default as shipped
from llmcompress.errors import LlmcompressError, RecipeError
from llmcompress.recipe import load, parse

ROOT = Path(__file__).parents[2]
WISHES = {  # of issue-like words to the recipe that answers them
    "smallest for llama.cpp": "gguf-smallest",
    "vLLM W4A16": "gptq-w4",
    "vLLM W8A8": "w8a8",
    "W4 with 8-bit down_proj": "gptq-w4-down8",
    "rotate, GPTQ 3 bits": "rotate-gptq-w3",
    "AWQ, then a K-quant": "awq-gguf-q4-k-m",
}


def test_list_names_every_recipe_with_when_to_use_it(main, capsys):
    assert main("recipe", "list", "--json") == 0
    listed = {item["recipe"]: item["comment"] for item in json.loads(capsys.readouterr().out)}
    assert list(listed) == sorted(file.stem for file in (ROOT / "configs").glob("*.yaml"))
    assert set(WISHES.values()) <= set(listed)
    for name, comment in listed.items():
        assert len(comment) > 40, name
        assert comment.endswith("."), name
        assert not comment.startswith("#"), name
    assert main("recipe", "list") == 0
    assert "gguf-smallest" in capsys.readouterr().out


def test_show_prints_the_file_as_it_is(main, capsys):
    assert main("recipe", "show", "gptq-w4") == 0
    shown = capsys.readouterr().out
    assert shown == (ROOT / "configs" / "gptq-w4.yaml").read_text()
    assert parse(yaml.safe_load(shown)) == load(recipe_file("gptq-w4"))


def test_a_wheel_holds_the_recipes(monkeypatch, tmp_path):
    assert '"configs" = "llmcompress/configs"' in (ROOT / "pyproject.toml").read_text()
    package = tmp_path / "site-packages" / "llmcompress"
    shutil.copytree(ROOT / "configs", package / "configs")
    monkeypatch.setattr(shipped, "PACKAGE", package)
    assert packaged_recipes()["gptq-w4"].file.parent == package / "configs"
    shutil.rmtree(package)
    with pytest.raises(LlmcompressError, match="lacks its configs"):
        packaged_recipes()


def test_run_takes_a_name(main, tiny_model_dir, tmp_path):
    assert main("run", "rtn-w8", tiny_model_dir, "-o", tmp_path / "out", "-q") == 0
    assert load(tmp_path / "out" / "llmcompress.yaml") == load(ROOT / "configs" / "rtn-w8.yaml")


def test_a_file_goes_before_a_name_and_a_folder_does_not(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("rtn-w8").mkdir()  # such as an output
    assert recipe_file("rtn-w8") == packaged_recipes()["rtn-w8"].file
    Path("rtn-w8").rmdir()
    Path("rtn-w8").write_text("steps: [{method: rtn}]")
    assert recipe_file("rtn-w8") == Path("rtn-w8")
    assert recipe_file("./rtn-w9") == Path("rtn-w9")
    with pytest.raises(RecipeError, match="did you mean 'rtn-w8'"):
        recipe_file("rtn-w9")


@pytest.mark.parametrize("name", sorted(WISHES.values()))
def test_check_finds_nothing_wrong_with_what_is_shipped(name, main, capsys, tiny_model_dir):
    assert main("recipe", "check", name, tiny_model_dir) == 0
    assert capsys.readouterr().out == f"{name}: sound, and can be carried out on {tiny_model_dir}\n"


WRONG = {
    "steps: [{method: gptq, bits: 7}, {method: rtnn}]": [
        "step 1: gptq: bits = 7: input should be 2, 3, 4, 5, 6 or 8",
        "step 2: unknown method 'rtnn' (did you mean 'rtn'?",
    ],
    "{step: [], calibration: {samples: 0}, output: {format: gptqq}, steps: [{method: rtn}]}": [
        "unknown key 'step' in recipe (did you mean 'steps'?",
        "calibration of recipe: samples = 0",
    ],
    "{output: {format: gptqq}, steps: [{method: rtn}]}": ["unknown format 'gptqq' (did you mean 'gptq'?"],
    "steps: [{method: gptq}, {method: awq}]": ["step 2, awq, comes after gptq"],
    "steps: [{method: awq}, {method: rotate}, {method: rtn}]": ["step 2, rotate, comes after awq"],
    "steps: [{method: rotate, residual: false, values: false}]": [
        "step 1: rotate: with residual and values both false"
    ],
    "steps: [{method: awq}]": ["awq makes weights fit for rounding, and no step rounds them"],
    "steps: [{method: rtn}, {method: gptq}]": ["step 2, gptq, is the second one that rounds"],
    "steps: [{method: gptq}, {method: wanda, sparsity: 0.5}]": ["step 2, wanda, comes after gptq"],
    "steps: []": ["recipe has no steps"],
    "steps: [3]": ["step 1: a step needs a method"],
    "nonsense": ["recipe is not a mapping"],
    "a: [": ["is not valid YAML"],
}


@pytest.mark.parametrize("text", WRONG)
def test_check_names_every_problem_in_a_line(text, main, capsys, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(text)
    assert main("recipe", "check", recipe) == 2
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert len(lines) == len(WRONG[text])
    for line, words in zip(lines, WRONG[text], strict=True):
        assert line.startswith(f"{recipe}: ")
        assert words in line
    count = len(lines)
    assert shown.err == f"error: {recipe} has {count} problem{'s' * (count > 1)}\n"
    assert main("recipe", "check", recipe, "--json") == 2
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    steps = [line.split("step ")[1][:1] if f"{recipe}: step " in line else None for line in lines]
    assert [item["step"] for item in found["problems"]] == [step and int(step) for step in steps]


def test_check_plans_on_a_model_and_writes_nothing(main, capsys, random_model_dir, tmp_path):
    recipe, model = tmp_path / "mine.yaml", random_model_dir("llama")
    recipe.write_text("steps: [{method: gptq, group_size: 48, set: {'mlp.down_proj': {bits: 8}}}]")
    assert main("recipe", "check", recipe) == 0
    before = sorted(model.parent.rglob("*"))
    assert main("recipe", "check", recipe, model) == 2
    assert "group size 48 does not divide the 64 inputs" in capsys.readouterr().out
    recipe.write_text("steps: [{method: gptq, group_size: 32}]")
    assert main("recipe", "check", recipe, model) == 2
    assert "windows of 512 tokens are longer than the model's 128 positions" in capsys.readouterr().out
    recipe.write_text("{calibration: {length: 64}, steps: [{method: gptq, group_size: 32}]}")
    assert main("recipe", "check", recipe, model) == 0
    assert main("recipe", "check", recipe, tmp_path / "missing") == 2
    assert "missing" in capsys.readouterr().out
    assert sorted(model.parent.rglob("*")) == before
    assert list(tmp_path.iterdir()) == [recipe]


def test_a_recipe_that_is_not_there_is_a_problem(main, capsys, tmp_path):
    assert main("recipe", "check", tmp_path / "missing.yaml") == 2
    assert "cannot be read" in capsys.readouterr().out
