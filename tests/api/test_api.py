"""The functions of Python: every example in their documentation, and that they refuse and write what commands do."""

import doctest
import filecmp
import inspect
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import llmcompress
from llmcompress.api.recipes import as_recipe
from llmcompress.errors import LlmcompressError, RecipeError

SHORT = {"samples": 4, "length": 64}
PUBLIC = [name for name in llmcompress.__all__ if name != "__version__"]


def documented():
    """Every docstring with an example: of the package, of its functions, and of their results' methods."""
    yield "llmcompress", inspect.getdoc(llmcompress)
    for name in PUBLIC:
        item = getattr(llmcompress, name)
        if not item.__module__.startswith("llmcompress.api"):
            continue
        parts = vars(item).items() if inspect.isclass(item) else ()
        for part, owner in [(name, item), *((f"{name}.{key}", value) for key, value in parts if callable(value))]:
            text = inspect.getdoc(owner)
            if text and ">>>" in text:
                yield part, text


@pytest.fixture(scope="module")
def workshop(tmp_path_factory, tiny_model_dir):
    """A directory with what examples speak of: a model, and a compressed one."""
    folder = tmp_path_factory.mktemp("workshop")
    (folder / "model").symlink_to(tiny_model_dir)
    llmcompress.compress(folder / "model", "rtn-w8", folder / "prepared")
    return folder


@pytest.fixture
def place(workshop, tmp_path, monkeypatch):
    """The working directory of an example, with nothing of another example in it."""
    (tmp_path / "model").symlink_to((workshop / "model").resolve())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "text"), [pytest.param(*item, id=item[0]) for item in documented()])
def test_examples_do_what_they_say(name, text, workshop, place, capfd):
    names = {"llmcompress": llmcompress}
    if 'output="model-w4"' not in text:
        (place / "model-w4").symlink_to(workshop / "prepared")
    if name.startswith("Result."):
        names["result"] = llmcompress.compress("model", method="rtn", output="out")
    if name.startswith("EvaluationResult."):
        names["evaluation"] = llmcompress.evaluate("model-w4", "model", windows=2, length=64)
    if name.startswith("TasksResult."):
        names["answers"] = llmcompress.evaluate_tasks("model-w4", "model", items=2)
    if name.startswith("LongResult."):
        names["long"] = llmcompress.evaluate_long("model-w4", "model", length=256, windows=1, items=1)
    example = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    assert example.examples
    said = []
    assert doctest.DocTestRunner().run(example, out=said.append).failed == 0, "".join(said)
    assert capfd.readouterr().err == ""


def test_every_function_has_an_example():
    functions = {name for name in PUBLIC if inspect.isfunction(getattr(llmcompress, name))}
    assert functions <= {name for name, _ in documented()}
    assert "compress" in functions


def test_every_public_name_is_there_once_and_typed():
    assert set(llmcompress._HOME) == set(PUBLIC)
    assert set(llmcompress.__all__) <= set(dir(llmcompress))
    for name in PUBLIC:
        item = getattr(llmcompress, name)
        assert item.__doc__
        if inspect.isfunction(item):
            parameters = inspect.signature(item).parameters.values()
            assert all(parameter.annotation is not parameter.empty for parameter in parameters), name
    with pytest.raises(AttributeError, match="no attribute 'compres'"):
        _ = llmcompress.compres


def test_the_import_is_fast_and_brings_nothing_heavy():
    """Bare Python takes some 0.02 s to start and to import what a package needs; importing torch takes a second."""
    code = (
        "import sys, time; before = time.perf_counter(); import llmcompress; spent = time.perf_counter() - before\n"
        "assert not {'torch', 'transformers', 'numpy', 'pydantic', 'typer', 'rich', 'yaml'} & set(sys.modules)\n"
        "llmcompress.load_recipe('gptq-w4'), llmcompress.compress, llmcompress.verify, llmcompress.evaluate\n"
        "assert not {'torch', 'transformers', 'typer', 'rich'} & set(sys.modules)\n"
        "print(spent)"
    )
    spent = [float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout) for _ in "123"]
    assert min(spent) < 0.1


def test_python_writes_the_bytes_of_the_command(main, capfd, tiny_model_dir, tmp_path):
    asked = ("--bits", 8, "--group-size", 32, "--samples", 4, "--length", 64, "--set", "o_proj: {bits: 4}")
    assert main("gptq", tiny_model_dir, *asked, "-o", tmp_path / "command", "--quiet") == 0
    capfd.readouterr()
    settings = {"bits": 8, "group_size": 32, "set": {"o_proj": {"bits": 4}}, **SHORT}
    result = llmcompress.compress(tiny_model_dir, method="gptq", output=tmp_path / "python", **settings)
    assert tuple(capfd.readouterr()) == ("", "")
    names = sorted(file.name for file in (tmp_path / "command").iterdir())
    same, differing, missing = filecmp.cmpfiles(tmp_path / "command", tmp_path / "python", names, shallow=False)
    assert (differing, missing) == ([], [])
    assert "report.json" in same
    assert result.output == tmp_path / "python"
    assert json.loads((result.output / "report.json").read_text()) == result.report
    assert result.nbytes == sum(file.stat().st_size for file in result.output.glob("*.safetensors"))
    assert [entry.kind for entry in result.ledger] == [entry["kind"] for entry in result.report["ledger"]]


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (("gptq", "--group-size", 7), {"method": "gptq", "group_size": 7}),
        (("gptq", "--samples", 0), {"method": "gptq", "samples": 0}),
        (("rtn", "--format", "gtpq"), {"method": "rtn", "format": "gtpq"}),
        (("awq", "--strength", 7), {"method": "awq", "strength": 7}),
        (("wanda", "--sparsity", 2.0), {"method": "wanda", "sparsity": 2.0}),
        (("gguf", "--type", "Q4_9"), {"method": "gguf", "type": "Q4_9"}),
        (("gguf",), {"method": "gguf"}),
        (("rtn", "--target", "vlm"), {"method": "rtn", "options": llmcompress.Options(target="vlm")}),
        (("run", "gptq-w5"), {"recipe": "gptq-w5"}),
        (("run", "no.yaml"), {"recipe": "no.yaml"}),
    ],
)
def test_python_refuses_what_the_command_refuses_in_its_words(main, capsys, tiny_model_dir, tmp_path, words, settings):
    name, *rest = words
    arguments = [*rest, tiny_model_dir] if name == "run" else [tiny_model_dir, *rest]
    code = main(name, *arguments, "-o", tmp_path / "out")
    shown = " ".join(capsys.readouterr().err.split())
    with pytest.raises(LlmcompressError) as error:
        llmcompress.compress(tiny_model_dir, output=tmp_path / "out", **settings)
    assert code == error.value.exit_code == 2
    if "No such option" not in shown and "no such option" not in shown:
        assert " ".join(error.value.message.split()) in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "nothing says what to do"),
        ({"recipe": "gptq-w4", "method": "gptq"}, "both say what to do"),
        ({"recipe": "gptq-w4", "bits": 3}, "unknown option 'bits'"),
        ({"method": "gptq", "bitz": 3}, "unknown option 'bitz'"),
        ({"method": "awq", "bitz": 3}, "unknown option 'bitz'"),
        ({"method": "gguf", "type": "Q8_0", "format": "gptq"}, "unknown option 'format'"),
        ({"method": "gptg"}, "unknown method 'gptg'"),
        ({"recipe": {"steps": []}}, "has no steps"),
    ],
)
def test_what_is_no_request_is_refused_before_the_model_is_opened(settings, words, tmp_path):
    with pytest.raises(llmcompress.RecipeError, match=words):
        llmcompress.compress(tmp_path / "nothing", **settings)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (llmcompress.prune_depth, {"drop": 1}),
        (llmcompress.prune_width, {"ratio": 0.25}),
        (partial(llmcompress.repair_lora, compressed="nothing"), {}),
        (partial(llmcompress.recover, ref="nothing"), {}),
        (llmcompress.train_draft, {}),
        (partial(llmcompress.fit, bpw=4.5), {}),
    ],
)
def test_a_setting_that_there_is_not_is_refused_and_not_passed_over(function, arguments, tmp_path):
    with pytest.raises(llmcompress.RecipeError, match="unknown option 'sample'"):
        function(tmp_path / "nothing", **arguments, sample=3)


def test_a_recipe_may_be_data_a_file_or_an_object(tiny_model_dir, tmp_path):
    recipe = llmcompress.load_recipe("rtn-w8")
    (tmp_path / "own.yaml").write_text(recipe.as_yaml())
    for given in (recipe, recipe.as_data(), "rtn-w8", tmp_path / "own.yaml", str(tmp_path / "own.yaml")):
        assert llmcompress.plan(tiny_model_dir, given).recipe == recipe
    assert llmcompress.plan(tiny_model_dir, recipe, format="gptq").recipe.output.format == "gptq"


class Watching(llmcompress.Progress):
    def __init__(self):
        self.finished, self.matrices = [], 0

    def matrix(self, record):
        self.matrices += 1

    def layer_done(self, number, seconds):
        self.finished.append(number)


def test_a_run_tells_its_progress_stops_when_asked_and_goes_on(tiny_model_dir, tmp_path):
    """The same call again finishes what the stopped one has begun."""
    out, watch = tmp_path / "out", Watching()
    with pytest.raises(llmcompress.StoppedError):
        llmcompress.compress(tiny_model_dir, "rtn-w8", out, progress=watch, stop=lambda finished: finished == 1)
    assert watch.finished == [0]
    again = Watching()
    llmcompress.compress(tiny_model_dir, "rtn-w8", out, progress=again)
    assert (again.finished, watch.matrices + again.matrices) == ([1, 2, 3], 28)
    with pytest.raises(llmcompress.PlanError, match="already exists"):
        llmcompress.compress(tiny_model_dir, "rtn-w8", out)
    llmcompress.compress(tiny_model_dir, "rtn-w8", out, options=llmcompress.Options(overwrite=True))


def test_an_evaluation_gates_and_stops(tiny_model_dir, tmp_path):
    short = {"windows": 2, "length": 32}
    told = []
    alone = llmcompress.evaluate(tiny_model_dir, progress=lambda done, of: told.append((done, of)), **short)
    assert told[-1] == (5, 5)
    assert (alone.kl, alone.top1) == (None, None)
    alone.fail_if("perplexity < 1")
    with pytest.raises(llmcompress.GateError, match=r"perplexity is .*, the gate was perplexity > 1"):
        alone.fail_if("perplexity < 1", "perplexity > 1")
    with pytest.raises(llmcompress.RecipeError, match="needs the original"):
        alone.fail_if("kl > 0.1")
    with pytest.raises(llmcompress.StoppedError, match="1 of 5 steps"):
        llmcompress.evaluate(tiny_model_dir, stop=lambda done: True, **short)
    same = llmcompress.evaluate(tiny_model_dir, tiny_model_dir, **short)
    assert (same.kl, same.top1, same.perplexity) == (0, 1, alone.perplexity)
    same.save(tmp_path / "same.json")
    assert json.loads((tmp_path / "same.json").read_text()) == same.document
    with pytest.raises(llmcompress.PlanError, match="exists"):
        same.save(tmp_path / "same.json")


def test_damage_is_a_check_that_failed(workshop, tmp_path):
    for file in (workshop / "prepared").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    [weights] = tmp_path.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    found = llmcompress.verify(tmp_path)
    assert not found.ok
    with pytest.raises(llmcompress.GateError, match=str(tmp_path)):
        found.fail_if_damaged()


def test_a_ledger_gate_names_the_decision(tiny_model_dir, tmp_path):
    settings = {"set": {"o_proj": {"skip": True}}}
    result = llmcompress.compress(tiny_model_dir, method="rtn", output=tmp_path / "out", **settings)
    result.fail_if_noted("damping")
    with pytest.raises(llmcompress.GateError, match="4 ledger entries, first unquantised"):
        result.fail_if_noted("damping", "unquantised")
    with pytest.raises(llmcompress.RecipeError, match="not a kind"):
        result.fail_if_noted("dampness")


def test_several_processes_are_for_the_command_line(monkeypatch, tiny_model_dir):
    started = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(llmcompress.RecipeError, match="done by one process"):
        llmcompress.compress(tiny_model_dir, "rtn-w8")


def test_types_of_gguf_fit_a_size(shallow_model_dir, tmp_path):
    fitted = llmcompress.fit(shallow_model_dir, method="gguf", bpw=6, calibration="default", **SHORT)
    result = llmcompress.compress(shallow_model_dir, fitted.recipe, tmp_path / "model.gguf")
    assert result.nbytes < Path(shallow_model_dir, "model.safetensors").stat().st_size * 7 / 16
    assert [entry.kind for entry in fitted.ledger] == ["budget"]


def test_a_recipe_is_given_another_text(tiny_model_dir):
    recipe = {
        "calibration": {"source": "a.jsonl", "options": {"field": "text"}, "samples": 8, "length": 32},
        "steps": [{"method": "gptq"}],
    }
    kept = as_recipe(recipe, None, {"samples": 4}).calibration
    assert (kept.source, kept.options, kept.samples, kept.length) == ("a.jsonl", {"field": "text"}, 4, 32)
    other = as_recipe(recipe, None, {"calibration": "b.txt", "format": "dense"})
    assert (other.calibration.source, other.calibration.options, other.output.format) == ("b.txt", {}, "dense")
    with pytest.raises(RecipeError, match="unknown option 'bits'"):
        as_recipe(recipe, None, {"bits": 3})
