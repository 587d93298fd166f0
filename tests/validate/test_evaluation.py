"""What `eval --output` saves: the figures that `--json` gives, and the means they are made of."""

import hashlib
import json
import shutil
from xml.etree import ElementTree

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from llmcompress.api.evaluation import evaluate
from llmcompress.errors import GateError
from llmcompress.validate.evaluation import Evaluation, evaluation
from llmcompress.validate.token_statistics import Tokens, not_finite, token_figures

EVAL = ["--length", 16, "--windows", 2]
SMALL = ["--length", 32, "--windows", 3, "--quiet"]


@pytest.fixture(scope="module")
def out(tiny_model_dir, tmp_path_factory):
    from llmcompress.engine.execute import run
    from llmcompress.engine.plan.make_plan import make_plan
    from llmcompress.engine.plan.run_options import Options
    from llmcompress.recipe import parse

    path = tmp_path_factory.mktemp("evaluated") / "out"
    run(make_plan(parse({"steps": [{"method": "rtn", "group_size": 64}]}), tiny_model_dir, Options(out=path)))
    return path


def test_the_file_holds_what_is_printed_and_more(main, capsys, out, tiny_model_dir, tiny_eval_text, tmp_path):
    file = tmp_path / "deep" / "result.json"
    arguments = ["eval", out, "--ref", tiny_model_dir, "--text", tiny_eval_text, *SMALL, "--json", "-o", file]
    assert main(*arguments) == 0
    printed, saved = json.loads(capsys.readouterr().out), json.loads(file.read_text())
    assert saved["figures"] == printed
    assert saved["model"] == {
        "name": "out",
        "report_sha256": hashlib.sha256((out / "report.json").read_bytes()).hexdigest(),
    }
    assert saved["reference"] == {"name": "tiny-llama", "report_sha256": None}
    assert (saved["text"]["name"], saved["text"]["windows"], saved["text"]["length"]) == (tiny_eval_text.name, 3, 32)
    Evaluation.model_validate_json(file.read_text())
    for resources, count in ((saved["by_window"], 3), (saved["by_position"], 31)):
        assert {len(values) for values in resources.values()} == {count}
        assert np.mean(resources["kl"]) == pytest.approx(printed["kl"], rel=1e-4)
        assert np.exp(np.mean(resources["nll"])) == pytest.approx(printed["perplexity"], rel=1e-3)
    before = file.read_bytes()
    assert main(*arguments) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(*arguments, "--overwrite") == 0
    assert file.read_bytes() == before


def test_the_last_line_is_a_sentence_for_people(main, capsys, out, tiny_model_dir, tiny_eval_text):
    arguments = ["eval", out, "--text", tiny_eval_text, *SMALL]
    assert main(*arguments, "--ref", tiny_model_dir, "--json") == 0
    same = json.loads(capsys.readouterr().out)["top1"]
    size = {
        path: sum(value.nbytes for file in path.glob("*.safetensors") for value in load_file(file).values())
        for path in (out, tiny_model_dir)
    }
    assert main(*arguments, "--ref", tiny_model_dir) == 0
    share = size[out] / size[tiny_model_dir]
    told = f"the same next token as the original {same:.1%} of the time, at {share:.0%} of its size"
    assert capsys.readouterr().err.splitlines()[-1] == told
    assert main(*arguments) == 0
    assert "of the time" not in capsys.readouterr().err


def test_without_a_reference_there_is_no_divergence(main, out, tmp_path):
    assert main("eval", out, *SMALL, "-o", tmp_path / "result.json") == 0
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved["reference"] is None
    assert set(saved["by_window"]) == {"nll"}
    assert "kl" not in saved["figures"]


def test_a_failed_gate_still_leaves_the_result(main, out, tiny_model_dir, tmp_path):
    file = tmp_path / "result.json"
    assert main("eval", out, "--ref", tiny_model_dir, *SMALL, "-o", file, "--fail-if", "kl > 0") == 3
    assert json.loads(file.read_text())["figures"]["kl"] > 0


@pytest.fixture
def broken(tiny_model_dir, tmp_path):
    """A model whose logits are no numbers."""
    folder = shutil.copytree(tiny_model_dir, tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("which", "whose"),
    [("subject", "the model"), ("reference", "the reference"), ("both", "the model and of the reference")],
)
def test_no_gate_passes_on_what_is_not_finite(which, whose, main, capsys, broken, tiny_model_dir, tmp_path):
    subject = broken if which != "reference" else tiny_model_dir
    reference = broken if which != "subject" else tiny_model_dir
    file, saved = tmp_path / "eval.xml", tmp_path / "eval.json"
    eval_ = ["eval", subject, "--ref", reference, *EVAL, "-q", "-o", saved, "--junit", file]
    gates = [f"{figure} {operator} {bound}" for figure in ("kl", "top1", "tv", "kl_p99", "perplexity_ratio")
             for operator, bound in ((">", 1e9), ("<", -1), (">=", 1e9), ("<=", -1))]  # fmt: skip
    assert main(*eval_, "--json", *(word for gate in gates for word in ("--fail-if", gate))) == 3
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["kl"] is found["top1"] is found["kl_ci"][0] is None
    failed = [case.get("name") for case in ElementTree.parse(file).iter("testcase") if len(case.findall("failure"))]
    assert failed == [f"--fail-if {gate}" for gate in gates]
    assert not saved.exists()
    assert main(*eval_) == 3  # without a gate, too
    shown = capsys.readouterr()
    assert f"figures of {whose} are not finite" in " ".join(shown.out.split())
    assert f"error: figures of {whose} are not finite" in shown.err
    failures = [case.get("name") for case in ElementTree.parse(file).iter("testcase") if len(case.findall("failure"))]
    assert failures == ["eval"]


@pytest.mark.parametrize("backend", [[], ["--backend", "torch"]])
def test_a_model_alone_whose_figures_are_not_finite_fails(backend, main, capsys, broken):
    assert main("eval", broken, *EVAL, *backend, "-q") == 3
    assert "not finite" in capsys.readouterr().out
    with pytest.raises(GateError, match="not finite"):
        evaluate(broken, windows=2, length=16).fail_if()


def test_a_draft_from_which_nothing_can_be_drawn_fails(main, capsys, broken, tiny_model_dir, tmp_path):
    command = ["--generate", "Once", "--max-new-tokens", 4, "-q", "--junit", tmp_path / "eval.xml"]
    for draft, reference in ((broken, tiny_model_dir), (tiny_model_dir, broken)):
        assert main("eval", "--draft", draft, "--ref", reference, *command) == 3
        assert f"{broken} gives logits that are not finite" in capsys.readouterr().err
        assert "<failure" in (tmp_path / "eval.xml").read_text()


@pytest.mark.parametrize("bound", ["1e999", "-1e999", "nan", "inf"])
def test_a_bound_is_finite(bound, main, capsys, tiny_model_dir):
    assert main("eval", tiny_model_dir, *EVAL, "--fail-if", f"perplexity > {bound}") == 2
    assert "is not a condition" in capsys.readouterr().err


def test_perplexity_beyond_all_numbers_is_not_finite():
    found = token_figures(Tokens(np.full((2, 3), 1e4)))
    assert not_finite(found) == "figures of the model are not finite"
    assert not_finite({"kl": 0.5, "windows": 2, "kv_cache": None}) is None
    assert not_finite({"logits_error": float("nan"), "tv": 1.0}) == "logits_error: not finite"


def test_means_are_over_the_right_side(tmp_path):
    values = np.arange(6.0).reshape(2, 3)
    tokens = Tokens(values, values + 1, values / 10, values / 10, np.ones((2, 3)))
    ids = np.arange(8).reshape(2, 4)
    found = evaluation(
        tmp_path, None, str(tmp_path / "t.txt"), ids, "float32", {**token_figures(tokens), "kv_cache": None}, tokens
    )
    assert found["by_window"] == {"nll": [1, 4], "ref_nll": [2, 5], "kl": [0.1, 0.4]}
    assert found["by_position"] == {"nll": [1.5, 2.5, 3.5], "ref_nll": [2.5, 3.5, 4.5], "kl": [0.15, 0.25, 0.35]}
    assert found["text"]["tokens_sha256"] == hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()
    assert str(tmp_path.parent) not in json.dumps(found)
    Evaluation.model_validate_json(json.dumps(found))
