"""`gptq` and `rtn` within a size: the bytes of `fit` and `run`, from any start, and nothing left behind."""

import json

import pytest
import yaml

from llmcompress.engine.budget import group_losses
from llmcompress.engine.run import guidance

SHORT = ("--samples", 2, "--length", 32, "--threads", 1)


def files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_one_command_writes_what_two_write_wherever_it_was_stopped(shallow_model_dir, tmp_path, main, capsys):
    both, out = tmp_path / "two" / "out", tmp_path / "one" / "out"
    fit = ("fit", shallow_model_dir, "--bpw", 5, "--group-size", 32, *SHORT, "--target", "vllm")
    assert main(*fit, "-o", both.with_name("recipe.yaml")) == 0
    assert main("run", both.with_name("recipe.yaml"), shallow_model_dir, "-o", both, "--threads", 1) == 0
    asked = ("gptq", shallow_model_dir, "--bpw", 5, "--group-size", 32, *SHORT, "--target", "vllm", "-o", out)
    starts = 0
    while (code := main(*asked, "--deadline", 0)) == 75:
        assert not out.exists()
        starts += 1
    assert code == 0
    assert starts == 4 + 1  # steps of measuring but one, layers but one
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert (recipe := yaml.safe_load((out / "llmcompress.yaml").read_text()))["expected"][
        "bits_per_quantised_weight"
    ] <= 5
    ours, theirs = files(out), files(both)
    for report in (ours, theirs):
        report["report.json"] = {**json.loads(report["report.json"]), "ledger": None, "sha256": None}
    assert ours == theirs
    assert recipe["expected"]["output_bytes"] == sum(file.stat().st_size for file in out.glob("*.safetensors"))
    capsys.readouterr()
    assert main("eval", out, "--ref", shallow_model_dir, "--length", 32, "--windows", 2) == 0
    assert "as `fit` expected" in capsys.readouterr().out


def refused_pass(*arguments, **options):
    raise AssertionError("a second pass of gradients")


def test_one_pass_of_gradients_tells_losses_and_guides_the_run(shallow_model_dir, tmp_path, main, capsys, monkeypatch):
    """The bytes are those of a run that makes a pass of its own, wherever the one command was stopped."""
    both, out = tmp_path / "two" / "out", tmp_path / "one" / "out"
    asked = ("gptq", shallow_model_dir, "--bpw", 5, "--group-size", 32, "--guided", *SHORT)
    assert main("plan", *asked, "-o", both, "--json") == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    both.parent.mkdir()
    both.with_name("recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    assert main("run", both.with_name("recipe.yaml"), shallow_model_dir, "-o", both, "--threads", 1) == 0
    monkeypatch.setattr(guidance, "fisher_information", refused_pass)
    starts = 0
    while (code := main(*asked, "-o", out, "--deadline", 0)) == 75:
        starts += 1
    assert code == 0
    assert starts == 4 + 1  # steps of measuring but one, layers but one
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    ours, theirs = files(out), files(both)
    for report in (ours, theirs):
        report["report.json"] = {**json.loads(report["report.json"]), "ledger": None, "sha256": None}
    assert ours == theirs


def test_gradients_of_losses_are_kept_with_stats_for_other_runs(shallow_model_dir, tmp_path, main, capsys, monkeypatch):
    store = tmp_path / "store"
    asked = ("gptq", shallow_model_dir, "--group-size", 32, "--guided", *SHORT, "--stats", store)
    monkeypatch.setattr(guidance, "fisher_information", refused_pass)
    assert main(*asked, "--bpw", 5, "-o", tmp_path / "out") == 0
    assert main(*asked, "--bits", 3, "-o", tmp_path / "other") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out", "store"]


def test_what_is_left_of_an_interrupted_measuring_is_of_no_use_to_other_text(shallow_model_dir, tmp_path, main):
    """Neither taken nor added to."""
    asked = ("gptq", shallow_model_dir, "--group-size", 32, "--guided", "-o", tmp_path / "out", "--threads", 1)
    assert main(*asked, "--bpw", 5, "--samples", 2, "--length", 32, "--deadline", 0) == 75
    left = sorted((tmp_path / "out.work.guidance").rglob("*"))
    assert main(*asked, "--bits", 4, "--samples", 3, "--length", 32) == 0
    assert sorted((tmp_path / "out.work.guidance").rglob("*")) == left
    assert main(*asked, "--bpw", 5, "--samples", 2, "--length", 32, "--overwrite", "--restart") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_target_may_be_repaired_for(shallow_model_dir, tmp_path, main):
    asked = ("gptq", shallow_model_dir, "--bpw", 5, "--group-size", 32, *SHORT, "--target", "vllm", "--repair")
    assert main("plan", *asked, "-o", tmp_path / "out") == 0


def test_a_plan_chooses_as_the_run_does_and_writes_nothing(shallow_model_dir, tmp_path, main, capsys):
    kept = tmp_path / "kept.json"
    asked = ("rtn", shallow_model_dir, "--kl", 0.01, *SHORT, "--sensitivity", kept)
    assert main("plan", *asked, "-o", tmp_path / "out", "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
    assert main(*asked, "-o", tmp_path / "out", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["recipe"] == planned["recipe"]
    assert report["recipe"]["expected"]["kl"] <= 0.01
    assert any(entry["kind"] == "budget" for entry in report["ledger"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.json", "out"]


def test_the_name_of_the_output_says_what_was_asked(shallow_model_dir, tmp_path, main, capsys):
    model, kept = tmp_path / "m", tmp_path / "kept.json"
    model.symlink_to(shallow_model_dir)
    for option, value, name in (("--size", "2MB", "0.002GB"), ("--bpw", 4.5, "4.5bpw"), ("--kl", 0.5, "kl0.5")):
        assert main("plan", "gptq", model, option, value, *SHORT, "--sensitivity", kept) == 0
        assert f"-gptq-{name}.work" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--bpw", 4, "--bits", 4), "--bpw and --bits both say how wide"),
        (("--size", "2MB", "--bpw", 4), "--size and --bpw both say how large"),
        (("--bpw", 8, "--activations", "int8-token"), "whose inputs are not rounded"),
        (("--sensitivity", "s.json"), "--sensitivity is of use with"),
        (("--bpw", 1), "is not possible: the smallest grids make"),
        (("--kl", 0), "is no number"),
        (("--bpw", 4, "--type", "nvfp4"), "several --type"),
        (("--bpw", 4, "--format", "gguf"), "use llmcompress gguf"),
        (("--bpw", 4, "--format", "awq"), "widths cannot be mixed"),
    ],
)
def test_what_cannot_be_is_one_line_and_writes_nothing(
    options, words, shallow_model_dir, tmp_path, main, capsys, monkeypatch
):
    monkeypatch.setattr(group_losses, "measured_losses", None)
    assert main("gptq", shallow_model_dir, *options, *SHORT, "-o", tmp_path / "out") == 2
    shown = capsys.readouterr().err
    assert shown.count("error: ") == 1
    assert words in shown
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_there_is_refused_before_anything_is_measured(
    shallow_model_dir, tmp_path, main, capsys, monkeypatch
):
    monkeypatch.setattr(group_losses, "measured_losses", None)
    (tmp_path / "out").mkdir()
    assert main("gptq", shallow_model_dir, "--bpw", 5, *SHORT, "-o", tmp_path / "out") == 2
    assert "already exists" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []
