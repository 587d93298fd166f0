"""What `eval --output` saves: the figures that `--json` gives, and the means they are made of."""

import hashlib
import json

import numpy as np
import pytest

from llmcompress.validate.evaluation import Evaluation, evaluation
from llmcompress.validate.token_statistics import Tokens, token_figures

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
