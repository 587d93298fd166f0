"""`fit` on the command line: a recipe that runs, one document, one line for what cannot be, and nothing left behind."""

import json
import os
import re
import signal

import pytest
import yaml

from llmcompress.api.fitting import size_in_bytes
from llmcompress.cli import watching
from llmcompress.engine.budget import group_losses
from llmcompress.errors import RecipeError

SHORT = ("--samples", 2, "--length", 32, "--group-size", "32,128", "--threads", 1)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where losses of the tiny model are kept."""
    return tmp_path_factory.mktemp("kept") / "kept.json"


def test_the_recipe_runs_and_eval_shows_both_divergences(tiny_model_dir, kept, tmp_path, main, capsys):
    recipe, out = tmp_path / "new" / "recipe.yaml", tmp_path / "out"
    asked = ("fit", tiny_model_dir, "--size", "2.5MB", "--format", "gptq", "--sensitivity", kept, *SHORT)
    assert main(*asked, "-o", recipe) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    expected = yaml.safe_load(recipe.read_text())["expected"]
    assert f"weight files of {expected['output_bytes']:,} bytes exactly" in shown.err
    assert main(*asked, "-o", recipe) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(*asked, "--kl", 60, "-o", recipe, "--overwrite") == 0
    assert yaml.safe_load(recipe.read_text())["expected"]["output_bytes"] < expected["output_bytes"]
    assert main(*asked, "-o", recipe, "--overwrite") == 0
    assert main("run", recipe, tiny_model_dir, "-o", out, "-q") == 0
    assert sum(file.stat().st_size for file in out.glob("*.safetensors")) == expected["output_bytes"] <= 2_500_000
    capsys.readouterr()
    protocol = ("--length", 32, "--windows", 2)
    assert main("eval", out, "--ref", tiny_model_dir, *protocol, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["kl_expected"] == expected["kl"]
    assert main("eval", out, "--ref", tiny_model_dir, *protocol) == 0
    assert "as `fit` expected" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "out"]


def test_json_is_one_document_and_the_printed_recipe_is_yaml(tiny_model_dir, kept, main, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ("fit", tiny_model_dir, "--bpw", 5, "--format", "gptq", "--sensitivity", kept, *SHORT)
    assert main(*asked, "--json") == 0
    shown = capsys.readouterr()
    data = json.loads(shown.out)
    assert shown.err == ""
    assert sum(len(item["names"]) for item in data["matrices"]) == 28
    assert sum(item["kl"] for item in data["matrices"]) == pytest.approx(data["expected"]["kl"], rel=1e-4)
    assert data["recipe"]["expected"] == data["expected"]
    assert main(*asked) == 0
    assert yaml.safe_load(capsys.readouterr().out) == data["recipe"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "nothing says how large the result is to be"),
        (("--size", "90MB", "--bpw", 4), "--size and --bpw both say how large"),
        (("--size", "1kB"), "is not possible: the smallest grids make"),
        (("--size", "90 apples"), "is no size"),
        (("--bpw", "nan"), "is no number"),
        (("--kl", 0), "is no number"),
        (("--bpw", 1), "is not possible"),
        (("--bpw", 4, "--bits", "3,7"), "--bits 7 is none"),
        (("--bpw", 4, "--bits", "3;4"), "no list of numbers"),
        (("--bpw", 4, "--group-size", "0"), "--group-size 0 is none"),
        (("--bpw", 4, "--type", "nvfp4,int9"), "--type int9 is none"),
        (("--bpw", 4, "--type", "nvfp4"), "there is only one grid for each matrix"),
        (("--bpw", 4, "--format", "awq"), "widths cannot be mixed"),
        (("--bpw", 4, "--format", "gptq", "--target", "transformers"), "widths cannot be mixed"),
        (("--bpw", 4, "--format", "gguf"), "use llmcompress gguf"),
        (("--bpw", 4, "--format", "gtpq"), "unknown format"),
        (("--bpw", 4, "--target", "vlm"), "unknown target"),
        (("--bpw", 4, "--set", "nothing: {bits: 4}"), "matches no matrix"),
        (("--bpw", 4, "--length", 4000), "longer than the model's"),
    ],
)
def test_what_cannot_be_is_one_line_and_writes_nothing(
    options, words, tiny_model_dir, tmp_path, main, capsys, monkeypatch
):
    monkeypatch.setattr(group_losses, "measured_losses", None)
    given = (*options, *(() if "--length" in options else ("--length", 32)))
    kept, recipe = tmp_path / "kept.json", tmp_path / "recipe.yaml"
    assert main("fit", tiny_model_dir, *given, "--sensitivity", kept, "-o", recipe) == 2
    shown = capsys.readouterr().err
    assert shown.count("error: ") == 1
    assert words in shown
    assert list(tmp_path.iterdir()) == []


def test_every_start_gets_further_and_the_recipe_is_that_of_one_start(tiny_model_dir, tmp_path, main, capsys):
    """By deadlines, by SIGTERM and by a kill: what is finished is not measured again."""
    asked = ("fit", tiny_model_dir, "--bpw", 5, "--bits", "4,8", "--format", "gptq", *SHORT)
    recipe, whole = tmp_path / "recipe.yaml", tmp_path / "whole.yaml"
    assert main(*asked, "-o", whole, "--sensitivity", tmp_path / "whole.json") == 0
    capsys.readouterr()
    done = []
    for _ in range(8):
        assert main(*asked, "-o", recipe, "--sensitivity", tmp_path / "a.json", "--deadline", 0) == 75
        shown = capsys.readouterr()
        assert shown.out == ""
        assert f"finished layers are kept in {recipe}.work" in shown.err
        done.append(re.search(r"(\d) of 9 steps done", shown.err)[1])
        assert not recipe.exists()
        (tmp_path / "recipe.yaml.work" / "record-gradient.partial").unlink(missing_ok=True)  # as a kill may
    assert "".join(done) == "12345678"
    assert main(*asked, "--bits", "2,8", "-o", recipe, "--sensitivity", tmp_path / "b.json") == 2
    assert "holds another run: grids" in capsys.readouterr().err
    assert main(*asked, "-o", recipe, "--sensitivity", tmp_path / "a.json") == 0
    assert recipe.read_bytes() == whole.read_bytes()
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert not (tmp_path / "recipe.yaml.work").exists()


def test_sigterm_stops_after_the_step_and_too_little_memory_is_refused(
    tiny_model_dir, tmp_path, main, capsys, monkeypatch
):
    asked = ("fit", tiny_model_dir, "--bpw", 5, "--bits", "4,8", *SHORT, "-o", tmp_path / "recipe.yaml")
    assert main(*asked, "--max-memory", 0.1) == 2
    assert "--max-memory allows 0.10" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    at = watching.Steps.at

    def terminated(steps, done, of):
        if done == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        at(steps, done, of)

    monkeypatch.setattr(watching.Steps, "at", terminated)
    assert main(*asked, "--junit", tmp_path / "a.xml", "--log-format", "json") == 75
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [event["event"] for event in events] == ["started", "planned", *["progress"] * 3, "stopped"]
    assert events[1]["memory_bytes"] > 250_000_000
    assert "<skipped" in (tmp_path / "a.xml").read_text()


def test_sizes_have_units():
    assert [size_in_bytes("--size", text) for text in ("90MB", "1.5 GB", "2", "7kB", "12B", ".5GB")] == [
        90_000_000,
        1_500_000_000,
        2_000_000_000,
        7_000,
        12,
        500_000_000,
    ]
    for text in ("", "MB", "-1GB", "1e9", "90M", "1 TB"):
        with pytest.raises(RecipeError, match="is no size"):
            size_in_bytes("--size", text)
