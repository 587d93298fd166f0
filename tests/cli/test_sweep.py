"""`sweep`: several runs from one calibration, a table, and going on after whatever happened."""

import json
import os
import shutil
import signal
from pathlib import Path
from xml.etree import ElementTree

import pytest

import llmcompress.engine.execute
import llmcompress.engine.run.start
import llmcompress.engine.run.sweep_tokens
import llmcompress.validate.evaluation_cache
from llmcompress.cli.sweep_recipes import listed, variants
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import LlmcompressError, RecipeError, RunError
from llmcompress.recipe import load, parse

MODELS = Path(__file__).parents[1] / "models"
TEXT = "calibration: {samples: 4, length: 32}\nsteps:\n  - {method: gptq, group_size: 64, percdamp: 0.02}\n"


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(TEXT)
    return file


@pytest.fixture
def swept(main, capsys, tmp_path, recipe, tiny_model_dir):
    """swept(*options): the exit code and the JSON document of a sweep of bits and methods."""

    def sweep(*options, lists=("--bits", "3,4", "--method", "gptq,rtn")):
        fixed = ["-o", tmp_path / "out", "--format", "dense", "--json"]
        code = main("sweep", recipe, tiny_model_dir, *lists, *fixed, *options)
        shown = capsys.readouterr()
        return code, json.loads(shown.out) if shown.out else shown.err

    return sweep


@pytest.fixture
def counted(monkeypatch):
    """Recipes of the runs that are begun, and how often tokens are drawn and text is evaluated."""
    counts = {"runs": [], "draws": 0, "evaluations": 0}
    real, draw, evaluate = (
        llmcompress.engine.execute.run,
        llmcompress.engine.run.sweep_tokens.calibration_tokens,
        llmcompress.validate.evaluation_cache.evaluate_paths,
    )

    def counting_run(plan, *arguments):
        counts["runs"].append(plan.out.name)
        return real(plan, *arguments)

    def counting_draw(plan):
        counts["draws"] += 1
        return draw(plan)

    def counting_evaluation(*arguments):
        counts["evaluations"] += 1
        return evaluate(*arguments)

    monkeypatch.setattr(llmcompress.engine.execute, "run", counting_run)
    monkeypatch.setattr(llmcompress.engine.run.sweep_tokens, "calibration_tokens", counting_draw)
    monkeypatch.setattr(llmcompress.engine.run.start, "calibration_tokens", lambda plan: pytest.fail("drawn again"))
    monkeypatch.setattr(llmcompress.validate.evaluation_cache, "evaluate_paths", counting_evaluation)
    return counts


NAMES = ["gptq-w3", "gptq-w4", "rtn-w3", "rtn-w4"]
EVALUATE = ["--evaluate", MODELS / "tiny-llama-eval.txt", "--eval-length", 32, "--eval-windows", 2]


def test_runs_share_a_calibration_and_are_what_they_would_be_alone(swept, counted, recipe, tiny_model_dir, tmp_path):
    code, found = swept(*EVALUATE)
    assert code == 0
    assert [row["run"] for row in found["runs"]] == counted["runs"] == NAMES
    assert counted["draws"] == 1
    for row in found["runs"]:
        assert (row["state"], row["error"], row["finished_before"]) == ("done", None, False)
        assert row["run"] == f"{row['method']}-w{row['bits']}"
        assert row["figures"]["kl"] > 0
    kl = {row["run"]: row["figures"]["kl"] for row in found["runs"]}
    assert kl["gptq-w4"] < kl["gptq-w3"] < kl["rtn-w3"]
    alone = load(recipe)
    step = alone.steps[0].model_copy(update={"bits": 3})
    alone = alone.model_copy(update={"steps": (step,), "output": alone.output.model_copy(update={"format": "dense"})})
    llmcompress.engine.run.start.calibration_tokens = llmcompress.engine.run.tokens.calibration_tokens
    run(make_plan(alone, tiny_model_dir, Options(out=tmp_path / "alone")))
    for file in (tmp_path / "alone").iterdir():
        assert (tmp_path / "out" / "gptq-w3" / file.name).read_bytes() == file.read_bytes(), file.name


def test_what_is_finished_is_not_done_again(swept, counted, tmp_path):
    assert swept(*EVALUATE, lists=("--bits", "3,4"))[0] == 0
    assert (counted["runs"], counted["evaluations"]) == (["gptq-w3", "gptq-w4"], 2)
    code, found = swept(*EVALUATE, lists=("--bits", "3,4,8"))
    assert code == 0
    assert (counted["runs"], counted["evaluations"]) == (["gptq-w3", "gptq-w4", "gptq-w8"], 3)
    assert [row["finished_before"] for row in found["runs"]] == [True, True, False]
    assert all(row["figures"]["kl"] > 0 for row in found["runs"])
    code, _ = swept(*EVALUATE, "--eval-windows", 3, lists=("--bits", "3,4,8"))
    assert counted["evaluations"] == 6  # another protocol
    report = json.loads((tmp_path / "out" / "gptq-w3" / "report.json").read_text())
    report["source"]["headers_sha256"] = "that of another model"
    (tmp_path / "out" / "gptq-w3" / "report.json").write_text(json.dumps(report))
    code, said = swept(lists=("--bits", "3"))
    assert code == 2
    assert "gptq-w3: " in said
    assert "already exists" in said
    assert swept("--overwrite", lists=("--bits", "3"))[0] == 0
    assert counted["runs"][-1] == "gptq-w3"


def test_it_goes_on_after_a_deadline_with_the_run_that_was_under_way(swept, counted, tmp_path):
    for number in range(1, 5):
        code, found = swept("--deadline", 0, lists=("--bits", "3,4"))
        assert code == 75
        assert (
            len(list(tmp_path.glob("out/gptq-w3.work/section-*"))) == number % 4 or found["runs"][0]["state"] == "done"
        )
    assert [row["state"] for row in found["runs"]] == ["done", "stopped"]
    assert counted["runs"] == ["gptq-w3"] * 4
    assert not (tmp_path / "out" / "gptq-w4.work").exists()
    code, found = swept(lists=("--bits", "3,4"))
    assert code == 0
    assert [row["finished_before"] for row in found["runs"]] == [True, False]


def test_sigterm_stops_it_between_runs_and_within_them(swept, counted, monkeypatch):
    begun = llmcompress.engine.execute.run

    def terminated(plan, *arguments):
        if plan.out.name == "gptq-w4":
            os.kill(os.getpid(), signal.SIGTERM)
        return begun(plan, *arguments)

    monkeypatch.setattr(llmcompress.engine.execute, "run", terminated)
    code, found = swept()
    assert code == 75
    assert [row["state"] for row in found["runs"]] == ["done", "stopped", "not begun", "not begun"]


def test_a_run_that_fails_does_not_stop_the_others(swept, main, capsys, monkeypatch, recipe, tiny_model_dir, tmp_path):
    real = llmcompress.engine.execute.run

    def failing(plan, *arguments):
        if plan.out.name == "gptq-w4":
            raise RunError("the disk is full", "make room")
        if plan.out.name == "rtn-w3":
            raise RuntimeError("out of luck")
        return real(plan, *arguments)

    monkeypatch.setattr(llmcompress.engine.execute, "run", failing)
    file = tmp_path / "sweep.xml"
    code, found = swept("--junit", file)
    assert code == 1
    assert [row["state"] for row in found["runs"]] == ["done", "failed", "failed", "done"]
    assert [row["error"] for row in found["runs"]][1:3] == ["the disk is full", "RuntimeError: out of luck"]
    cases = {case.get("name"): [child.tag for child in case] for case in ElementTree.parse(file).iter("testcase")}
    assert cases == {"sweep": ["error"], "gptq-w3": [], "gptq-w4": ["error"], "rtn-w3": ["error"], "rtn-w4": []}
    lists = ["--bits", "3,4", "--method", "gptq,rtn", "-o", tmp_path / "out", "--format", "dense"]
    assert main("sweep", recipe, tiny_model_dir, *lists, "-q") == 1
    shown = capsys.readouterr()
    rows = [line.split() for line in shown.out.splitlines()]
    assert [row[0] for row in rows] == ["run", *NAMES]
    assert "finished before" in shown.out
    assert "failed: the disk is full" in shown.out
    assert "error: 2 of 4 runs failed, first gptq-w4: the disk is full" in shown.err


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        (["--bits", "3,x"], "is not a list"),
        (["--bits", "3,,4"], "is not a list"),
        (["--bits", ""], "an empty value"),
        (["--bits", "4,4"], "names something twice"),
        (["--bits", "4,7"], "bits = 7"),
        (["--method", "gptq,gptqq"], "did you mean 'gptq'"),
        (["--method", "gptq,fp8", "--bits", "4"], "fp8 has its own bits"),
        (["--method", "smoothquant", "--group-size", "64"], "smoothquant has its own group size"),
        (["--group-size", "64,100"], "gptq-g100: group size 100 does not divide"),
        ([], "nothing is swept"),
        (["--bits", "4", "--strict", "nonsense"], "is not a kind of ledger entry"),
        (["--bits", "4", "--max-memory", "0.01"], "gptq-w4: up to"),
    ],
)
def test_bad_lists_are_refused_before_anything_runs(lists, words, swept, counted, tmp_path):
    code, said = swept(lists=lists)
    assert code == 2
    assert words in said
    assert counted["runs"] == []
    assert not (tmp_path / "out").exists()


def test_a_dry_run_plans_all_and_touches_nothing(swept, tmp_path):
    code, found = swept("--dry-run")
    assert code == 0
    assert [plan["output"].rpartition("/")[2] for plan in found] == NAMES
    assert not (tmp_path / "out").exists()


def test_what_no_run_could_take_is_refused_first(swept, main, capsys, tiny_model_dir, recipe, tmp_path):
    odd = shutil.copytree(tiny_model_dir, tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps({**config, "hidden_act": "nothing"}))
    words = ["sweep", recipe, odd, "-o", tmp_path / "out", "--bits", "4,8"]
    ends = []
    for more in ([], ["--dry-run"]):
        ends.append((main(*words, *more), capsys.readouterr().err))
    assert [code for code, _ in ends] == [2, 2]
    assert all("transformers cannot build a 'llama' model" in said for _, said in ends)


def test_gates_of_every_run(swept, tmp_path):
    code, found = swept("--strict", "unquantised", "--set", "x", lists=("--bits", "4"))
    assert code == 2  # a sweep has no --set: that is for the recipe
    (tmp_path / "recipe.yaml").write_text(TEXT.replace("percdamp: 0.02", "set: {o_proj: {skip: true}}"))
    code, found = swept("--strict", "unquantised", "--junit", tmp_path / "a.xml", lists=("--bits", "4,8"))
    assert code == 3
    assert [row["state"] for row in found["runs"]] == ["failed", "failed"]
    failed = [case.get("name") for case in ElementTree.parse(tmp_path / "a.xml").iter("testcase") if len(case)
              and case[0].tag == "failure"]  # fmt: skip
    gates = ["gptq-w4: --strict unquantised", "gptq-w8: --strict unquantised"]
    assert failed == ["gptq-w4", "gptq-w8", *gates]
    assert not list(tmp_path.glob("out/*/report.json"))
    code, found = swept(lists=("--bits", "4,8"))
    assert [row["state"] for row in found["runs"]] == ["done", "done"]
    code, found = swept("--strict", "unquantised", lists=("--bits", "4,8"))
    assert code == 3  # of outputs that are there


def test_figures_that_are_not_finite_fail_the_sweep(swept, main, capsys, monkeypatch, recipe, tiny_model_dir, tmp_path):
    nothing = {"perplexity": float("nan"), "ref_perplexity": 3.0, "kl": float("nan"), "kl_ci": [float("nan")] * 2}
    nothing |= {"tokens": 62, "windows": 2, "kv_cache": None}
    monkeypatch.setattr(llmcompress.validate.evaluation_cache, "evaluate_paths", lambda *_: nothing)
    code, found = swept(*EVALUATE, "--junit", tmp_path / "a.xml", lists=("--bits", "4"))
    assert code == 3
    (row,) = found["runs"]
    assert (row["state"], row["error"]) == ("failed", "figures of the model are not finite")
    assert row["figures"]["kl"] is row["figures"]["kl_ci"][0] is None
    cases = {
        case.get("name"): [child.tag for child in case]
        for case in ElementTree.parse(tmp_path / "a.xml").iter("testcase")
    }
    assert cases == {"sweep": [], "gptq-w4": ["failure"]}
    assert not (tmp_path / "out" / "gptq-w4.eval.json").exists()
    assert (
        main("sweep", recipe, tiny_model_dir, "--bits", 4, "-o", tmp_path / "out", "--format", "dense", *EVALUATE) == 3
    )
    assert "failed: figures of the model are not finite" in capsys.readouterr().out


def test_gguf_files_are_swept_and_found_again(main, capsys, tiny_model_dir, tmp_path):
    recipe = tmp_path / "gguf.yaml"
    recipe.write_text("calibration: {samples: 2, length: 16}\nsteps:\n  - {method: gptq, gguf: {type: Q4_0}}\n"
                      "output: {format: gguf}\n")  # fmt: skip
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    command = ["sweep", recipe, model, "--method", "rtn,gptq", "-o", tmp_path / "out", *EVALUATE, "--json"]
    for before in (False, True):
        assert main(*command) == 0
        found = json.loads(capsys.readouterr().out)["runs"]
        assert [row["finished_before"] for row in found] == [before, before]
        assert [row["bits"] for row in found] == [None, None]
        assert found[0]["figures"]["kl"] > 0
    assert len(list(tmp_path.glob("out/*/*.gguf"))) == 2
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "{# another #}")
    assert main(*command) == 2  # what lies there is no longer what would be written
    assert "already exists" in capsys.readouterr().err


def test_tokens_that_the_model_wrote_are_kept_for_the_next_start(swept, counted, recipe, tmp_path, monkeypatch):
    recipe.write_text(
        "calibration: {source: self, samples: 4, length: 16}\nsteps:\n  - {method: gptq, group_size: 64}\n"
    )
    assert swept("--deadline", 0, lists=("--bits", "3,4"))[0] == 75
    monkeypatch.setattr(
        llmcompress.engine.run.sweep_tokens, "calibration_tokens", lambda plan: pytest.fail("written again")
    )
    assert swept(lists=("--bits", "3,4"))[0] == 0


# -- variants ---------------------------------------------------------------------------------------------------------


def made(text, **lists):
    found = variants(parse(text), lists.get("names"), lists.get("bits"), lists.get("group_sizes"))
    return {item.name: item.recipe for item in found}


def test_a_method_takes_the_place_of_the_one_that_rounds():
    base = {
        "steps": [{"method": "rotate", "seed": 3}, {"method": "gptq", "percdamp": 0.05, "sym": False}],
        "kv_cache": {"code": "fp8"},
    }
    found = made(base, names=["gptq", "rtn"], bits=[3], group_sizes=[-1, 64])
    assert list(found) == ["gptq-w3-row", "gptq-w3-g64", "rtn-w3-row", "rtn-w3-g64"]
    for name, recipe in found.items():
        rotate, step = recipe.steps
        assert (rotate.name, rotate.seed, recipe.kv_cache.code) == ("rotate", 3, "fp8")
        assert (step.name, step.bits, step.sym) == (name.partition("-")[0], 3, False)
    assert found["gptq-w3-g64"].steps[1].percdamp == 0.05
    assert found["rtn-w3-row"].steps[1].group_size == -1


def test_a_preset_takes_the_place_of_all_steps_as_its_command_has_them(main, capsys, tiny_model_dir):
    base = {"calibration": {"samples": 7}, "steps": [{"method": "gptq", "set": {"o_proj": {"skip": True}}}]}
    found = made(base, names=["awq", "smoothquant"])
    for name, recipe in found.items():
        assert main(name, tiny_model_dir, "--print-recipe", "--set", "o_proj: {skip: true}", "--json") == 0
        alone = parse(json.loads(capsys.readouterr().out))
        assert recipe.steps == alone.steps
        assert recipe.calibration.samples == 7
    assert made(base, names=["awq"], bits=[3])["awq-w3"].steps[-1].bits == 3
    pruned = {"steps": [{"method": "wanda", "sparsity": 0.5}, {"method": "gptq"}]}
    assert [step.name for step in made(pruned, names=["awq"])["awq"].steps] == ["awq", "wanda", "rtn"]
    assert [step.name for step in made(pruned, names=["rtn"])["rtn"].steps] == ["wanda", "rtn"]


def test_types_of_gguf_have_no_bits_to_sweep():
    base = {"steps": [{"method": "gptq", "gguf": {"type": "Q4_K_M"}}], "output": {"format": "gguf"}}
    assert [step.name for step in made(base, names=["rtn"])["rtn"].steps] == ["rtn"]
    with pytest.raises(RecipeError, match="types of GGUF"):
        made(base, bits=[4])
    with pytest.raises(RecipeError, match="no quantising step"):
        made({"steps": [{"method": "rotate"}], "output": {"format": "dense"}}, bits=[4])


def test_lists_keep_their_order():
    assert listed("--bits", "8, 3,4", int) == [8, 3, 4]
    assert listed("--bits", None, int) is None
    with pytest.raises(LlmcompressError, match="write values with commas, such as --bits 3,4"):
        listed("--bits", "3;4", int)


def test_text_is_asked_for_in_place_of_the_recipes(swept):
    code, found = swept("--samples", 3, "--length", 16, "--seed", 5, "--dry-run")
    assert code == 0
    for planned in found:
        text = planned["recipe"]["calibration"]
        assert (text["samples"], text["length"], text["seed"], text["source"]) == (3, 16, 5, "default")
    code, said = swept("--samples", 0)
    assert (code, said.startswith("error: the calibration options: samples = 0")) == (2, True)
