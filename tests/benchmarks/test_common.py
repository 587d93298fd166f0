"""What is kept of measurements in benchmarks/common.py, and what they refuse."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import common  # noqa: E402


def test_a_row_is_measured_once_and_of_one_thing_alone(tmp_path):
    out, asked = tmp_path / "new" / "rows.json", Namespace(model="a", text="t")
    measured = []

    def measure():
        measured.append(1)
        return {"kl": 0.5}

    for _ in range(2):
        assert common.Results(out, asked, "model", "text").once("gptq", measure) == {"kl": 0.5}
    assert len(measured) == 1
    assert [file.name for file in out.parent.iterdir()] == ["rows.json"]
    with pytest.raises(SystemExit, match=r"has rows of {'model': 'a', 'text': 't'}, not of {'model': 'b'"):
        common.Results(out, Namespace(model="b", text="t"), "model", "text")


def test_two_of_one_name_are_refused():
    common.one_each(["a", "b"], "recipes")
    with pytest.raises(SystemExit, match="two recipes are called a"):
        common.one_each(["a", "b", "a"], "recipes")


def test_a_command_that_fails_ends_the_script_with_its_words(tmp_path):
    with pytest.raises(SystemExit, match=r"(?s)no such thing.*failed with 7"):
        common.run([sys.executable, "-c", "import sys; print('no such thing'); sys.exit(7)"], tmp_path / "log")


def test_the_first_windows_are_the_text_from_its_start(tiny_model_dir, tiny_eval_text, tmp_path):
    command = [sys.executable, BENCHMARKS / "first_windows.py", tiny_model_dir, tiny_eval_text]
    subprocess.run([*command, "3", "16", tmp_path / "ids.safetensors"], check=True)
    rows = load_file(tmp_path / "ids.safetensors")["input_ids"]
    ids = AutoTokenizer.from_pretrained(tiny_model_dir)(tiny_eval_text.read_text())["input_ids"]
    assert rows.tolist() == [ids[:16], ids[16:32], ids[32:48]]
    said = subprocess.run([*command, "9999", "512", tmp_path / "x"], capture_output=True, text=True, check=False)
    assert said.returncode == 1
    assert "windows of 512, not 9999" in said.stderr


@pytest.mark.slow
def test_a_table_of_recipes_goes_on_and_refuses_another_text(tiny_model_dir, tiny_eval_text, tmp_path):
    ids = tmp_path / "ids.safetensors"
    common.pack(tiny_model_dir, ids, "default", 4, 64)
    recipe = tmp_path / "rtn.yaml"
    recipe.write_text("# mine\nsteps: [{method: rtn, bits: 4, group_size: 32}]\n")
    command = [sys.executable, BENCHMARKS / "methods.py", tiny_model_dir, ids, tiny_eval_text, recipe]
    command += ["--length", "64", "--windows", "2", "--work", tmp_path, "--out", tmp_path / "rows.json"]
    tables = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert tables[0] == tables[1]
    assert recipe.read_text().startswith("# mine")
    assert json.loads((tmp_path / "rows.json").read_text())["rows"].keys() == {"rtn"}
    other = [*command, "--windows", "3"]
    assert subprocess.run(other, capture_output=True, check=False).returncode == 1
