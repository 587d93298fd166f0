"""Figures against their definitions, and intervals against simulation."""

import numpy as np
import pytest
import torch

from llmcompress.errors import CalibrationError, RecipeError
from llmcompress.validate.evaluate import _compare, cut_windows, parse_gate, refuse_unmeasured
from llmcompress.validate.token_statistics import ALONE, COMPARED, Tokens, token_figures


def test_measurements_are_those_of_the_definitions():
    generator = torch.Generator().manual_seed(0)
    subject, reference = (
        torch.randn(7, 11, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2)
    )
    truth = torch.randint(0, 11, (7,), generator=generator)
    found = _compare([subject.clone(), reference.clone()], truth)
    p, q = reference.exp(), subject.exp()
    for t in range(7):
        assert found["nll"][t] == pytest.approx(-float(subject[t, truth[t]]))
        assert found["kl"][t] == pytest.approx(sum(float(p[t, v] * torch.log(p[t, v] / q[t, v])) for v in range(11)))
        assert 1 - found["tv"][t] == pytest.approx(float(torch.minimum(p[t], q[t]).sum()))
        assert found["top1"][t] == float(p[t].argmax() == q[t].argmax())


def test_a_model_against_itself_is_exact():
    logs = torch.randn(5, 9).log_softmax(-1)
    found = _compare([logs, logs.clone()], torch.zeros(5, dtype=torch.long))
    assert found["kl"].abs().max() == 0
    assert found["tv"].abs().max() == 0
    assert found["top1"].min() == 1


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(60):
        per_window = rng.normal(1.0, 0.3, size=(40, 1)) + rng.normal(0, 0.5, size=(40, 20))
        low, high = token_figures(Tokens(nll=per_window))["perplexity_ci"]
        covered += low <= np.e <= high
    assert 50 <= covered <= 60


def test_all_published_names_are_there_and_repeat():
    rng = np.random.default_rng(1)
    nll, kl = rng.random((6, 10)), rng.random((6, 10))
    tokens = Tokens(nll, nll, kl, kl, (kl > 0.5).astype(float))
    found = token_figures(tokens)
    for name in ("perplexity", "ref_perplexity", "kl", "kl_p99", "top1", "tv"):
        low, high = found[f"{name}_ci"]
        assert low <= found[name] <= high
    assert found["tokens"] == 60
    assert found["perplexity"] == pytest.approx(np.exp(nll.mean()), rel=1e-5)
    assert found["perplexity_ratio_ci"] == [1.0, 1.0]
    assert found == token_figures(tokens)
    assert {name for name in found if not name.endswith("_ci")} == {*ALONE, *COMPARED}
    assert {name for name in token_figures(Tokens(nll)) if not name.endswith("_ci")} == set(ALONE)


def test_windows_are_disjoint_and_never_fewer_than_asked():
    cut = cut_windows(list(range(25)), 8, 3, "text")
    assert cut.tolist() == [list(range(8)), list(range(8, 16)), list(range(16, 24))]
    with pytest.raises(CalibrationError, match="3 windows of 8 tokens, 4 were asked for"):
        cut_windows(list(range(25)), 8, 4, "text")


def test_gates_compare_and_refuse_what_they_do_not_know():
    assert parse_gate("kl > 0.05").fails({"kl": 0.06})
    assert not parse_gate("kl>0.05").fails({"kl": 0.05})
    assert parse_gate("top1 < 0.9").fails({"top1": 0.8})
    for compared, names in ((False, ALONE), (True, (*ALONE, *COMPARED))):
        refuse_unmeasured([parse_gate(f"{name} > 1") for name in names], compared)
    with pytest.raises(RecipeError, match="did you mean 'kl'"):
        refuse_unmeasured([parse_gate("kll > 1")], compared=True)
    with pytest.raises(RecipeError, match="needs the original"):
        refuse_unmeasured([parse_gate("kl > 1")], compared=False)
    for text in ("kl", "kl => 3", "kl > x", "> 3"):
        with pytest.raises(RecipeError, match="not a condition"):
            parse_gate(text)
