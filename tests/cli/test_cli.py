"""The command line as a user meets it: what it prints, what it refuses, and its exit codes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import typer
from typer import rich_utils
from typer.testing import CliRunner

from forkserver import call
from llmcompress.cli.commands import register
from llmcompress.cli.options import field_options
from llmcompress.grids.grid_type import grid_types
from llmcompress.recipe import methods

COMMAND = [sys.executable, "-m", "llmcompress"]
SMALL = ["--bits", "4", "--group-size", "64", "--samples", "4", "--length", "32"]


def one_line_error(done, code, *words):
    """The run failed with `code` and one clear error line, without a traceback."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in done.stderr
    return lines[0]


@pytest.fixture(scope="module")
def compressed(tiny_model_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "out"
    done = call("gptq", tiny_model_dir, "-o", out, *SMALL, "--json", "--keep-work", "--strict", "damping")
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout)


def test_json_is_the_only_thing_on_stdout_and_says_what_was_done(compressed):
    out, report = compressed
    assert report["output"] == str(out)
    assert report["peak_memory_bytes"] > 1e8
    assert report["recipe"]["steps"][0]["bits"] == 4
    assert json.loads((out / "report.json").read_text())["tensors"] == report["tensors"]


def test_eval_has_the_published_keys_and_gates(compressed, tiny_model_dir):
    out, _ = compressed
    arguments = ["eval", out, "--ref", tiny_model_dir, "--length", "64", "--windows", "6", "--json"]
    done = call(*arguments)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    for key in ("perplexity", "ref_perplexity", "kl", "kl_p99", "top1", "tv"):
        low, high = figures[f"{key}_ci"]
        assert low <= figures[key] <= high
    assert figures["tokens"] == 6 * 63
    assert 0 < figures["kl"] < 1
    gated = call(*arguments, "--fail-if", "kl > 0.000001")
    one_line_error(gated, 3, "the gate was kl > 1e-06")
    assert json.loads(gated.stdout) == figures
    assert call(*arguments, "--fail-if", "kl > 100").returncode == 0
    one_line_error(call(*arguments, "--fail-if", "nonsense"), 2, "is not a condition")


def test_an_original_against_itself_is_exact(tiny_model_dir):
    done = call("eval", tiny_model_dir, "--ref", tiny_model_dir, "--length", "64", "--windows", "2", "--json")
    figures = json.loads(done.stdout)
    assert figures["kl"] == 0
    assert figures["top1"] == 1


def test_generate_shows_and_saves_both_continuations(compressed, tiny_model_dir, tmp_path):
    out, _ = compressed
    command = ["eval", out, "--ref", tiny_model_dir, "--length", "32", "--windows", "1", "--generate", "The water"]
    done = call(*command, "--json", "--output", tmp_path / "eval.json")
    assert done.returncode == 0, done.stderr
    samples = json.loads(done.stdout)["generated"]
    assert set(samples) == {str(out), str(tiny_model_dir)}
    assert all(text.strip() for text in samples.values())
    written = json.loads((tmp_path / "eval.json").read_text())["written"]
    assert written == {"prompt": "The water", "model": samples[str(out)], "reference": samples[str(tiny_model_dir)]}


def test_verify_passes_and_finds_damage(compressed, tiny_model_dir, tmp_path):
    import shutil

    out, _ = compressed
    assert call("verify", out, "--source", tiny_model_dir).returncode == 0
    broken = tmp_path / "broken"
    shutil.copytree(out, broken)
    data = bytearray((broken / "model.safetensors").read_bytes())
    data[-1000] ^= 4
    (broken / "model.safetensors").write_bytes(data)
    one_line_error(call("verify", broken), 3)


def test_export_writes_another_format_with_the_same_values(compressed, tiny_model_dir, tmp_path):
    out, _ = compressed
    done = call("export", f"{out}.work", "--format", "gptq", "--format", "dense", "-o", tmp_path / "other", "--json")
    assert done.returncode == 0, done.stderr
    assert [item["format"] for item in json.loads(done.stdout)] == ["gptq", "dense"]
    kl = []
    for folder in (out, tmp_path / "other-gptq"):
        figures = json.loads(
            call("eval", folder, "--ref", tiny_model_dir, "--length", "32", "--windows", "4", "--json").stdout
        )
        kl.append(figures["kl"])
    assert kl[0] == kl[1]
    one_line_error(
        call("export", tiny_model_dir, "--format", "gptq"), 2, "is not quantised, so it has no codes to export"
    )
    one_line_error(call("export", tmp_path, "--format", "gptq"), 2, "is not a work directory")


def test_plan_prints_every_matrix_and_touches_nothing(tiny_model_dir, tmp_path):
    out = tmp_path / "out"
    done = call("plan", "gptq", tiny_model_dir, "-o", out, *SMALL, "--json")
    plan = json.loads(done.stdout)
    assert len(plan["matrices"]) == 28
    assert plan["output_bytes"] > 0
    assert json.loads(call("gptq", tiny_model_dir, "-o", out, *SMALL, "--dry-run", "--json").stdout) == plan
    people = call("plan", "gptq", tiny_model_dir, "-o", out, *SMALL)
    assert "model.layers.0.self_attn.q_proj" in people.stdout
    assert f"{plan['output_bytes']:,} bytes exactly" in people.stdout
    assert list(tmp_path.iterdir()) == []


def test_print_recipe_gives_what_run_takes(tiny_model_dir, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(call("rtn", tiny_model_dir, "--bits", "8", "--set", "mlp.*: {bits: 4}", "--print-recipe").stdout)
    done = call("run", recipe, tiny_model_dir, "-o", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    assert {item["grid"] for item in json.loads(done.stdout)["linears"]} == {"int8-g128-sym", "int4-g128-sym"}


def test_calib_pack_makes_the_windows_a_run_would_use(compressed, tiny_model_dir, tmp_path):
    _, report = compressed
    ids = tmp_path / "ids.safetensors"
    packed = json.loads(
        call("calib", "pack", tiny_model_dir, "-o", ids, "--samples", "4", "--length", "32", "--json").stdout
    )
    assert packed["sha256"] == report["calibration"]["sha256"]
    again = json.loads(
        call("gptq", tiny_model_dir, "-o", tmp_path / "out", *SMALL, "--calibration", ids, "--json").stdout
    )
    assert again["tensors"] == report["tensors"]


def test_inspect_and_list_look_without_loading(compressed, tiny_model_dir):
    out, _ = compressed
    facts = json.loads(call("inspect", out, "--json", "--tensors").stdout)
    assert facts["quantization"]["quant_method"] == "compressed-tensors"
    assert len(facts["tensor_list"]) == facts["tensors"]
    assert "llama" in call("inspect", tiny_model_dir).stdout
    for what in ("methods", "grids", "formats", "archs", "sources", "ledger", "targets"):
        assert json.loads(call("list", what, "--json").stdout)
        piped = call("list", what).stdout.split("\n")
        assert len(piped) > 2
        assert not [line for line in piped if line != line.rstrip()]
    one_line_error(call("list", "format"), 2, "did you mean 'formats'")


def test_a_strict_kind_ends_with_3_before_writing(random_model_dir, tmp_path):
    out = tmp_path / "out"
    done = call("rtn", random_model_dir("llama"), "-o", out, "--format", "dense", "--strict", "group_size")
    assert done.returncode == 3
    assert "error: --strict: 1 ledger entries, first group_size" in done.stderr
    assert not out.exists()


def test_sigterm_and_deadline_stop_at_a_safe_point_and_the_same_command_goes_on(compressed, tiny_model_dir, tmp_path):
    _, report = compressed
    out = tmp_path / "out"
    command = ["gptq", tiny_model_dir, "-o", out, *SMALL]
    one_line_error(call(*command, "--deadline", "0"), 75, "run the same command again")
    assert len(list(tmp_path.glob("out.work/section-*.safetensors"))) == 1
    process = subprocess.Popen([*COMMAND, *map(str, command)], stderr=subprocess.PIPE, text=True)
    while len(list(tmp_path.glob("out.work/section-*.safetensors"))) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode in (0, 75), errors  # 0 only if the last layer was under way
    if process.returncode == 75:
        assert not out.exists()
        done = call(*command, "--json")
        assert json.loads(done.stdout)["tensors"] == report["tensors"]


@pytest.fixture(scope="module")
def commands():
    app = typer.Typer()
    register(app)
    return app


@pytest.mark.parametrize("name", ["gptq", "rtn", "awq", "smoothquant", "wanda", "fp8", "nf4", "int8", "gguf"])
def test_help_shows_what_is_usually_asked_for_first(name, commands, monkeypatch):
    """Bits, groups, calibration and output on one page; a grid's options under its name, the others after them."""
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", 100)
    shown = CliRunner().invoke(commands, [name, "--help"])
    panels = {line.split()[1]: number for number, line in enumerate(shown.stdout.splitlines()) if line.startswith("╭")}
    order = list(panels)
    assert order[:4] == ["Arguments", "Options", "Calibration", "Output"]
    assert order[-1] == "Running"
    assert panels[order[4]] <= 60
    assert panels.keys() - {*order[:4], "Advanced", "Running", "Types", "Budget"} <= {*grid_types()}


def test_options_of_a_grid_stand_under_its_name():
    options = field_options(methods()["gptq"])
    found = {name: item[0].__metadata__[0].rich_help_panel for name, item in options.items()}
    for grid in grid_types().values():
        for name in grid.options.model_fields if grid.options and grid.chosen else ():
            assert found[name] == grid.name
    assert all(found[name] is None for name in ("type", "bits", "group_size"))
