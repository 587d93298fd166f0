"""The Gram matrix against float64, and that measuring it changes nothing else."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcompress.mkl import adds_bfloat16
from llmcompress.stats.gram import Gram, add_products
from llmcompress.workers import SERIAL

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def rows(tokens, size, dtype=torch.float32, seed=0):
    """Inputs [tokens, size] with channels of very different sizes, one of them an outlier."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, size, generator=generator) * torch.logspace(-2, 1, size)
    x[:, size // 2] *= 20
    return x.to(dtype)


def oracle(x):
    x = x.reshape(-1, x.shape[-1]).to(torch.float64)
    return x.T @ x / max(len(x), 1)


EXACT = 2e-6


def assert_gram(gram, truth, accuracy=EXACT):
    """Every entry within accuracy of the size that its two channels give it."""
    size = truth.diagonal().sqrt().clamp_min(1e-30)
    error = (gram.mean().to(torch.float64) - truth).abs() / (size[:, None] * size)
    assert float(error.max()) < accuracy


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [1, 3, 4, 5, 61, 128, 301])
def test_the_mean_is_that_of_float64(dtype, size):
    x = rows(700, size, dtype)
    gram = Gram(size, SERIAL)
    for part in (x[:1], x[1:400].reshape(3, 133, size), x[400:400], x[400:]):
        gram.update(part)
    assert gram.size == size
    assert gram.tokens == 700
    assert gram.dropped == 0
    mean = gram.mean()
    assert mean.dtype == torch.float32
    assert torch.equal(mean, mean.T)
    assert_gram(gram, oracle(x))


@pytest.mark.skipif(not adds_bfloat16(), reason="needs a processor with AMX, and MKL in torch")
def test_a_processor_with_amx_rounds_no_product_of_bfloat16():
    x = rows(40960, 96, torch.bfloat16)
    gram = Gram(96, SERIAL)
    for part in x.split(2048):
        gram.update(part)
    assert_gram(gram, oracle(x), 4 * EXACT)


def test_roundings_of_bfloat16_begin_late_and_average_out(monkeypatch):
    """What later tokens add is rounded: a small part of any damping (0.01 of the mean diagonal), in every direction."""
    monkeypatch.setattr("llmcompress.stats.gram.adds_bfloat16", lambda: False)
    x = rows(40960, 96, torch.bfloat16)
    gram = Gram(96, SERIAL)
    for part in x[:16384].split(2048):
        gram.update(part)
    assert_gram(gram, oracle(x[:16384]), 4 * EXACT)
    for part in x[16384:].split(2048):
        gram.update(part)
    truth = oracle(x)
    noise = gram.mean().to(torch.float64) - truth
    size = truth.diagonal().sqrt()
    assert EXACT < float((noise / (size[:, None] * size)).abs().max()) < 2**-9
    assert float(torch.linalg.eigvalsh(noise).abs().max()) < 1e-3 * float(truth.diagonal().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_no_bit_of_an_input_is_lost(dtype):
    """One token: each product is one rounding of the exact one, so an input rounded to fewer bits would show."""
    x = rows(1, 257, dtype, seed=3)
    gram = Gram(257, SERIAL)
    gram.update(x)
    exact = x.to(torch.float64).T @ x.to(torch.float64)
    assert torch.equal(gram.mean(), exact.to(torch.float32))
    if dtype != torch.bfloat16:
        rounded = x.to(torch.bfloat16).to(torch.float64)
        assert not torch.equal(gram.mean(), (rounded.T @ rounded).to(torch.float32)), "the inputs fit into bfloat16"


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 40),
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 1000),
)
def test_how_tokens_come_in_makes_no_difference(size, lengths, dtype, seed):
    x = rows(sum(lengths), size, dtype, seed)
    gram = Gram(size, SERIAL)
    for part in x.split(lengths):
        gram.update(part)
    assert gram.tokens == len(x)
    assert_gram(gram, oracle(x))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_tokens_that_are_not_finite_are_dropped_and_counted(dtype):
    x = rows(50, 12, dtype)
    bad = x.clone()
    bad[3, 0], bad[7, 11], bad[8, 4], bad[8, 5], bad[49, 6] = (float(v) for v in ("nan", "inf", "inf", "-inf", "-inf"))
    kept = torch.ones(50, dtype=torch.bool)
    kept[[3, 7, 8, 49]] = False
    gram = Gram(12, SERIAL)
    gram.update(bad.reshape(2, 25, 12))
    assert gram.tokens == 46
    assert gram.dropped == 4
    assert_gram(gram, oracle(x[kept]))
    gram.update(torch.full((2, 12), float("nan"), dtype=dtype))
    assert (gram.tokens, gram.dropped) == (46, 6)
    assert_gram(gram, oracle(x[kept]))


def test_finite_tokens_whose_sum_overflows_are_kept():
    x = torch.full((40, 8), 60000.0, dtype=torch.float16)
    assert not torch.isfinite(x.sum())
    gram = Gram(8, SERIAL)
    gram.update(x)
    assert (gram.tokens, gram.dropped) == (40, 0)
    assert_gram(gram, oracle(x))


def test_without_tokens_it_is_zero():
    gram = Gram(5, SERIAL)
    assert torch.equal(gram.mean(), torch.zeros(5, 5))
    gram.update(torch.zeros(0, 5))
    assert torch.equal(gram.mean(), torch.zeros(5, 5))


def test_inputs_are_left_alone_and_gradients_are_not_recorded():
    x = rows(10, 6).requires_grad_()
    before = x.detach().clone()
    gram = Gram(6, SERIAL)
    gram.update(x)
    assert torch.equal(x.detach(), before)
    assert not gram.sum.requires_grad


@pytest.mark.parametrize("weight", [1.0, 0.25, 40.5])
def test_shrinking_is_adding_tokens_of_the_prior(weight):
    x, y = rows(30, 9), rows(500, 9, seed=1)
    gram, prior = Gram(9, SERIAL), Gram(9, SERIAL)
    gram.update(x)
    prior.update(y)
    gram.shrink_towards(prior.mean(), weight)
    assert gram.tokens == 30, "borrowed tokens are not tokens that were seen"
    assert_gram(gram, (oracle(x) * 30 + oracle(y) * weight) / (30 + weight))
    gram.update(x)
    assert_gram(gram, (oracle(x) * 60 + oracle(y) * weight) / (60 + weight))


def test_an_expert_without_tokens_gets_the_prior():
    gram, prior = Gram(9, SERIAL), Gram(9, SERIAL)
    prior.update(rows(500, 9))
    gram.shrink_towards(prior.mean(), 0.4)
    torch.testing.assert_close(gram.mean(), prior.mean())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_products_are_made_without_a_switch_that_other_threads_would_feel(dtype, monkeypatch):
    backend, seen = torch.backends.mkldnn.matmul, []

    def watched(total, left, right):
        seen.append(backend.fp32_precision)
        add_products(total, left, right)

    monkeypatch.setattr("llmcompress.stats.gram.add_products", watched)
    before, gram = backend.fp32_precision, Gram(32, SERIAL)
    gram.update(rows(64, 32, dtype))
    assert set(seen) == {before}
    assert_gram(gram, oracle(rows(64, 32, dtype)))


@pytest.mark.parametrize("ask", [Gram.finish, Gram.mean, lambda gram: (gram.finish(), gram.mean())[1]])
def test_threads_that_ask_at_once_get_the_same_mean(ask):
    # two matrices that read one input are pruned in two threads, each of which asks for the energy of the input
    together = Barrier(4)

    def asked(gram):
        together.wait()
        return ask(gram)

    x = rows(700, 512)
    truth = oracle(x)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            gram = Gram(512, SERIAL)
            gram.update(x)
            for mean in pool.map(asked, [gram] * 4):
                assert torch.allclose(mean.to(torch.float64), truth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("alone", [True, False])
def test_a_mean_that_is_lent_has_its_diagonal_back_when_it_is_asked_for(alone):
    gram = Gram(64, SERIAL)
    gram.update(rows(300, 64))
    before = gram.mean().clone()
    if alone:
        gram.expect_one()
    lent = gram.lent()
    assert torch.equal(lent, before)
    lent.diagonal().add_(1.0)
    assert (lent.data_ptr() == gram.sum.data_ptr()) == alone
    for asked in (gram.mean, gram.finish, gram.mean):
        assert torch.equal(asked(), before)
