"""Products are rounded to bfloat16 where the first windows say that KL stays within 1%, and nowhere else."""

import json
from contextlib import contextmanager
from dataclasses import astuple

import numpy as np
import pytest
import torch
from torch.nn import functional

from llmcompress.api.evaluation import evaluate
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.validate import rounded_products
from llmcompress.validate.evaluate import measure
from llmcompress.validate.load import open_streamed
from llmcompress.validate.rounded_products import compared, measure_checked, products_row, windows_to_check
from llmcompress.validate.token_statistics import Tokens
from streaming import ids

WINDOWS = {"windows": 16, "length": 16}
EVAL = ["--windows", 16, "--length", 16]


@contextmanager
def emulated():
    """Linears whose inputs and weights are rounded, on any processor."""
    linear = functional.linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "linear", lambda x, w, b=None: linear(x.bfloat16().float(), w.bfloat16().float(), b))
        yield


@pytest.fixture
def rounding(monkeypatch):
    """A processor on which products can be rounded."""
    monkeypatch.setattr(rounded_products, "rounds_float32", lambda device: True)
    monkeypatch.setattr(rounded_products, "rounded_float32", emulated)


@pytest.fixture(scope="module")
def outs(shallow_model_dir, tmp_path_factory):
    """The same model in 2 and in 8 bits."""
    from llmcompress.engine.execute import run
    from llmcompress.engine.plan.make_plan import make_plan
    from llmcompress.engine.plan.run_options import Options
    from llmcompress.recipe import parse

    found = {}
    for bits in (2, 8):
        found[bits] = tmp_path_factory.mktemp("compressed") / f"w{bits}"
        recipe = parse({"steps": [{"method": "rtn", "group_size": 64, "bits": bits}]})
        run(make_plan(recipe, shallow_model_dir, Options(out=found[bits])))
    return found


def streamed(path):
    return open_streamed(path, dtype=torch.float32)


def tokens(kl):
    return Tokens(nll=kl, ref_nll=kl, kl=kl, tv=kl, top1=kl)


def checked(subject, reference, windows, watch=lambda done, of: None):
    return measure_checked(streamed(subject), streamed(reference), windows, 4, 4, watch, lambda part, rounds: None)


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(astuple(one), astuple(other), strict=True))


@pytest.mark.parametrize(
    ("factors", "dtype"),
    [
        ([1.004, 1.005, 1.005, 1.006], "bfloat16"),
        ([0.996, 0.995, 0.995, 0.994], "bfloat16"),
        ([1.012, 1.013, 1.012, 1.013], "float32"),
        ([1.03, 0.97, 1.03, 0.97], "float32"),  # nothing in the mean, but who knows of the next windows
    ],
)
def test_error_and_its_uncertainty_count_together(factors, dtype):
    exact = np.full((4, 7), 0.2)
    found = compared(tokens(exact), tokens(exact * np.array(factors)[:, None]))
    assert found.dtype == dtype
    assert found.windows == 4
    assert found.kl_error == pytest.approx(np.mean(factors) - 1, abs=1e-9)
    assert found.kl_error_se == pytest.approx(np.std(factors, ddof=1) / 2, rel=1e-5)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_what_has_no_error_is_not_rounded(value):
    kl = np.full((4, 7), value)
    found = compared(tokens(kl), tokens(kl))
    assert (found.dtype, found.kl_error, found.kl_error_se) == ("float32", None, None)
    assert products_row(found.model_dump())[1:] == ("no number", "")


def test_few_windows_are_not_checked(rounding, shallow_model_dir, monkeypatch):
    reference = streamed(shallow_model_dir)
    for count, batch, wanted in ((15, 4, 0), (16, 4, 4), (16, 1, 4), (24, 3, 6), (31, 8, 0), (32, 8, 8)):
        assert windows_to_check(ids(count), batch, reference) == wanted
    assert windows_to_check(ids(80), 4, None) == 0
    monkeypatch.setattr(rounded_products, "rounds_float32", lambda device: False)
    assert windows_to_check(ids(80), 4, reference) == 0


def test_a_large_divergence_is_measured_with_rounded_products(rounding, outs, shallow_model_dir):
    windows, seen = ids(16), []
    found, said = checked(outs[2], shallow_model_dir, windows, lambda done, of: seen.append((done, of)))
    assert said["dtype"] == "bfloat16"
    assert 0 < abs(said["kl_error"]) < 0.01
    exact = measure(streamed(outs[2]), streamed(shallow_model_dir), windows)
    with emulated():
        assert same(found, measure(streamed(outs[2]), streamed(shallow_model_dir), windows))
    assert not same(found, exact)
    assert found.kl.mean() == pytest.approx(exact.kl.mean(), rel=0.01)
    assert seen == sorted(seen)
    assert seen[-1] == (3, 3)


@pytest.mark.parametrize("bits", [8, None])
def test_a_small_divergence_is_that_of_float32_to_the_bit(bits, rounding, outs, shallow_model_dir):
    subject = shallow_model_dir if bits is None else outs[bits]
    found, said = checked(subject, shallow_model_dir, ids(16))
    assert said["dtype"] == "float32"
    assert said["kl_error"] is None if bits is None else abs(said["kl_error"]) > 0.01
    assert same(found, measure(streamed(subject), streamed(shallow_model_dir), ids(16)))


def test_it_is_said_and_float32_is_had_on_request(rounding, main, capsys, outs, shallow_model_dir, tmp_path):
    command = ["eval", outs[2], "--ref", shallow_model_dir, *EVAL]
    file = tmp_path / "result.json"
    assert main(*command, "--json", "-o", file) == 0
    printed, saved = json.loads(capsys.readouterr().out), json.loads(file.read_text())
    assert printed["products"] == saved["products"]
    assert printed["products"]["dtype"] == "bfloat16"
    assert saved["compute_dtype"] == "float32"
    assert main(*command, "-q") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "float32, products in bfloat16" in said
    assert f"change of KL by products in bfloat16 {printed['products']['kl_error']:+.2%}" in said
    assert main("eval", outs[8], *command[2:], "-q") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "float32, products" not in said
    assert "change of KL by products in bfloat16, not used" in said
    assert main(*command, "--compute-dtype", "float32", "--json") == 0
    exact = json.loads(capsys.readouterr().out)
    assert "products" not in exact
    assert exact["kl"] != printed["kl"]
    assert exact["kl"] == pytest.approx(printed["kl"], rel=0.01)


def test_a_cache_keeps_rounded_and_exact_states_apart(rounding, outs, shallow_model_dir, tmp_path, monkeypatch):
    ran, layer = [], StreamedModel.layer
    monkeypatch.setattr(StreamedModel, "layer", lambda self, *more: ran.append(self) or layer(self, *more))
    cache, found = tmp_path / "cache", []
    for bits in (2, 8, 2, 8):
        alone = evaluate(outs[bits], shallow_model_dir, **WINDOWS)
        ran.clear()
        kept = dict(evaluate(outs[bits], shallow_model_dir, **WINDOWS, ref_cache=cache).document)
        found.append((kept.pop("ref_cache"), len(ran)))
        assert kept == alone.document
    # three passes of two layers and as many of the reference; of the second model's, both first ones are there already
    assert found == [("miss", 12), ("miss", 8), ("hit", 6), ("hit", 6)]
    assert len(list(cache.iterdir())) == 4


def test_the_switch_is_put_back(outs, shallow_model_dir, monkeypatch):
    monkeypatch.setattr(rounded_products, "rounds_float32", lambda device: True)
    before = torch.backends.mkldnn.matmul.fp32_precision
    _, said = checked(outs[2], shallow_model_dir, ids(16))
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    assert said["dtype"] == "bfloat16"
