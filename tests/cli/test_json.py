"""`--json`: stdout holds one JSON document or nothing, whatever the command and however it ends."""

import json
import shutil

import pytest
from every import all_commands, arguments, with_option

import llmcompress.cli.console
import llmcompress.store.headers
from llmcompress.cli.log import finite
from tinyruns import FEW

SHORT = ["--samples", 2, "--length", 16]
EVAL = ["--length", 16, "--windows", 2]
GPU = [("kernels", "check"), ("kernels", "bench")]  # commands that say so where there is none


@pytest.fixture(scope="module")
def compressed(shallow_model_dir, tmp_path_factory):
    """An output, with its work directory."""
    from llmcompress.engine.execute import run
    from llmcompress.engine.plan.make_plan import make_plan
    from llmcompress.engine.plan.run_options import Options
    from llmcompress.recipe import parse

    out = tmp_path_factory.mktemp("json") / "out"
    recipe = parse({"steps": [{"method": "rtn", "bits": 4, "group_size": 64}]})
    run(make_plan(recipe, shallow_model_dir, Options(out=out, keep_work=True)))
    return out


@pytest.fixture
def others(compressed, shallow_model_dir, tmp_path):
    """Commands that are no runs, with arguments that work."""
    matrix = tmp_path / "a.gguf"
    return {
        ("export",): [f"{compressed}.work", "--format", "dense", "-o", tmp_path / "dense"],
        ("eval",): [compressed, "--ref", shallow_model_dir, *EVAL],
        ("compare",): [compressed, "--ref", shallow_model_dir, *EVAL],
        ("verify",): [compressed],
        ("inspect",): [compressed],
        ("list",): ["methods"],
        ("calib", "pack"): [shallow_model_dir, "-o", tmp_path / "ids.safetensors", *SHORT],
        ("imatrix",): [shallow_model_dir, "-o", tmp_path / "b.gguf", *SHORT],
        ("imatrix-merge",): [matrix, matrix, "-o", tmp_path / "c.gguf"],
        ("depth",): [shallow_model_dir, "-o", tmp_path / "depth", "--drop", 1, "--keep-first", 0, *SHORT],
        ("width",): [shallow_model_dir, "-o", tmp_path / "width", "--ratio", 0.5, *SHORT],
        ("lora",): [shallow_model_dir, compressed, "-o", tmp_path / "lora", "--rank", 4, *SHORT],
        ("recover",): [
            compressed,
            "--ref",
            shallow_model_dir,
            "-o",
            tmp_path / "recovered",
            "--steps",
            2,
            "--samples",
            32,
            "--length",
            16,
        ],
        ("draft",): [
            shallow_model_dir,
            "-o",
            tmp_path / "draft",
            *("--steps", 8, "--samples", 32, "--written", 0, "--length", 16, "--vocab", 64),
        ],
        ("fit",): [
            shallow_model_dir,
            "--bpw",
            5,
            "--bits",
            "4,8",
            "--method",
            "rtn",
            "-o",
            tmp_path / "fit.yaml",
            *SHORT,
        ],
        ("report",): [compressed, "-o", tmp_path / "page.html"],
        ("stats", "list"): [tmp_path],
        ("stats", "prune"): [tmp_path, "--all"],
        ("recipe", "list"): [],
        ("recipe", "show"): ["gptq-w4"],
        ("recipe", "check"): ["gptq-w4", shallow_model_dir],
        ("kernels", "cache"): ["--cache", tmp_path],
        ("sweep",): ["rtn-w8", shallow_model_dir, "--bits", "4,8", "--group-size", "64", "-o", tmp_path / "sweep"],
    }


def case(words, others, shallow_model_dir, tmp_path):
    if words in others:
        return [*words, *others[words]]
    if "--output" in all_commands()[words] and "--dry-run" in all_commands()[words]:
        return arguments(words, shallow_model_dir, tmp_path)
    raise AssertionError(f"`llmcompress {' '.join(words)}` has --json and no case here")


@pytest.mark.parametrize("words", [words for words in with_option("--json") if words not in GPU], ids=" ".join)
def test_stdout_is_one_json_document(words, main, capsys, others, shallow_model_dir, tmp_path):
    if words == ("imatrix-merge",):
        assert main("imatrix", shallow_model_dir, "-o", tmp_path / "a.gguf", *SHORT, "-q") == 0
        capsys.readouterr()
    assert main(*case(words, others, shallow_model_dir, tmp_path), "--json") == 0
    shown = capsys.readouterr().out
    assert isinstance(json.loads(shown), dict | list)
    assert shown.endswith(("}\n", "]\n"))


@pytest.mark.parametrize("words", with_option("--json"), ids=" ".join)
def test_stdout_is_empty_when_a_command_is_refused(words, main, capsys, others, shallow_model_dir, tmp_path):
    given = [*words] if words in GPU else case(words, others, shallow_model_dir, tmp_path)
    missing = tmp_path / "missing"
    if words in (("recipe", "list"), ("kernels", "cache"), *GPU):
        given.append("--no-such-option")  # nothing else can be wrong with it
    given = [missing if item in (shallow_model_dir, *others.get(words, [])[:1]) else item for item in given]
    code = main(*given, "--json")
    shown = capsys.readouterr()
    if words == ("recipe", "check"):  # a bad result is a result
        assert code == 2
        assert json.loads(shown.out)["ok"] is False
    else:
        assert (code, shown.out) == (2, "")
    assert [line[:7] for line in shown.err.splitlines() if not line.startswith("  hint: ")] == ["error: "]


@pytest.mark.parametrize("words", with_option("--json"), ids=" ".join)
def test_every_command_has_a_schema_of_its_document(words, main, capsys):
    assert main("schema", *({("report",): ["page"]}.get(words, words))) == 0
    assert json.loads(capsys.readouterr().out)["$schema"]


@pytest.mark.parametrize("words", [words for words in with_option("--dry-run") if words[0] != "plan"], ids=" ".join)
def test_a_plan_is_one_json_document_too(words, main, capsys, others, shallow_model_dir, tmp_path):
    assert main(*case(words, others, shallow_model_dir, tmp_path), "--json", "--dry-run") == 0
    found = json.loads(capsys.readouterr().out)
    assert all("seconds" not in item for item in (found if isinstance(found, list) else [found]))
    assert not (tmp_path / "out").exists()


def test_what_a_document_lacks_or_has_too_many_is_noticed(main, capsys, compressed, monkeypatch):
    """The fixture of conftest.py holds every document to its schema."""
    real = llmcompress.cli.console.print_json
    monkeypatch.setattr(llmcompress.cli.console, "print_json", lambda data: real({**data, "extra": 1}))
    with pytest.raises(pytest.fail.Exception, match=r"is not what `schema inspect` says: .*extra"):
        main("inspect", compressed, "--json")


def test_several_files_are_a_list(main, capsys, shallow_model_dir, tmp_path):
    assert main("gguf", shallow_model_dir, "-o", tmp_path / "out", "--type", "Q8_0", "--type", "Q4_0", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    for file in sorted((tmp_path / "out").glob("*.gguf")):
        assert main("inspect", file, "--tensors", "--json") == 0
        assert json.loads(capsys.readouterr().out)["tensor_list"]


def test_stdout_is_empty_when_a_run_stops_or_fails(main, capsys, random_model_dir, tmp_path, monkeypatch):
    model, out = random_model_dir("llama"), tmp_path / "out"
    command = ["rtn", model, "-o", out, "--bits", 8, "--group-size", 32, "--json"]
    assert main(*command, "--deadline", 0) == 75
    assert capsys.readouterr().out == ""
    section = next(tmp_path.glob("out.work/section-*.safetensors"))
    section.write_bytes(section.read_bytes()[:-8])
    assert main(*command) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "is damaged" in shown.err


def test_a_document_comes_with_a_gate_that_failed(main, capsys, compressed, shallow_model_dir, tmp_path):
    broken = shutil.copytree(compressed, tmp_path / "broken")
    (broken / "report.json").unlink()
    assert main("verify", broken, "--json") == 3
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert main("eval", compressed, "--ref", shallow_model_dir, *EVAL, "--fail-if", "kl >= 0", "--json") == 3
    assert json.loads(capsys.readouterr().out)["kl"] >= 0
    assert main("rtn", shallow_model_dir, "-o", tmp_path / "out", "--set", "o_proj: {skip: true}",
                "--strict", "unquantised", "--json") == 3  # fmt: skip
    shown = capsys.readouterr()
    assert shown.out == ""  # nothing was published
    assert "goes on from" in shown.err


def test_a_recipe_is_printed_as_json_too(main, capsys, shallow_model_dir):
    assert main("gptq", shallow_model_dir, "--bits", 3, "--print-recipe", "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"][0]["bits"] == 3


def test_a_plan_names_the_step_whose_values_are_stored(main, capsys, shallow_model_dir):
    assert main("plan", "wanda", shallow_model_dir, "--sparsity", 0.5, "--set", "o_proj: {skip: true}", "--json") == 0
    pruned = json.loads(capsys.readouterr().out)["matrices"]
    assert {(item["method"], item["pruner"], item["grid"]) for item in pruned} == {("wanda", "wanda", None)}
    assert main("plan", "rtn", shallow_model_dir, "--group-size", 64, "--json") == 0
    rounded = json.loads(capsys.readouterr().out)["matrices"]
    assert {(item["method"], item["pruner"]) for item in rounded} == {("rtn", None)}


def test_what_a_models_code_prints_is_not_in_the_document(main, capsys, compressed, monkeypatch):
    read = llmcompress.store.headers.read_json

    def noisy(path):
        print("hello from a library")
        return read(path)

    monkeypatch.setattr(llmcompress.store.headers, "read_json", noisy)
    assert main("inspect", compressed, "--json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["layers"] == FEW
    assert "hello from a library" in shown.err
    assert main("inspect", compressed) == 0
    assert "hello from a library" in capsys.readouterr().out


def test_what_json_does_not_know_is_null():
    assert finite({"a": [float("inf"), 1.5, float("nan")], "b": (1, "x", None, True)}) == {
        "a": [None, 1.5, None],
        "b": [1, "x", None, True],
    }
