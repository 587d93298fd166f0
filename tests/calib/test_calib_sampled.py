"""Text sampled from the model: exact, seeded, from the model's own distribution, without random state of its own."""

from types import SimpleNamespace

import pytest
import torch

from llmcompress.calib.base import TokenRequest
from llmcompress.calib.sampled import HOT_TOKENS, Sampled, sample
from llmcompress.errors import CalibrationError

LENGTH = 16
VOCAB_SIZE = 259
BEGIN, END, SPECIALS = 0, 1, 3  # ids of <s>, </s>; ids below 3 are special


@pytest.fixture
def asked(ask, tiny_model):
    return lambda samples=9, **other: ask(samples, LENGTH, **{"model": lambda: tiny_model, **other})


def surprise(model, ids):
    """Mean negative log-likelihood [rows] of ids after the first, by one plain forward without cache."""
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[:, :-1, :VOCAB_SIZE].float()
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def test_sets_are_exact_and_follow_the_seed(asked, untouched_randomness):
    first, again, other = (Sampled().tokens(asked(seed=seed)) for seed in (3, 3, 4))
    assert first.shape == (9, LENGTH)
    assert first.dtype == torch.int64
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len({tuple(row) for row in first.tolist()}) == 9


@pytest.mark.parametrize("samples", [1, 2, 18])
def test_as_many_rows_as_asked(asked, samples):
    assert Sampled().tokens(asked(samples)).shape == (samples, LENGTH)


@pytest.mark.parametrize("batch_size", [1, 3, 10, 64])
def test_batch_size_changes_speed_only(asked, batch_size):
    assert torch.equal(Sampled(batch_size=batch_size).tokens(asked()), Sampled(batch_size=4).tokens(asked()))


def test_rows_begin_with_the_token_that_begins_a_text(asked, bare_tokenizer, make_tokenizer):
    assert set(Sampled().tokens(asked())[:, 0].tolist()) == {BEGIN}
    no_begin = make_tokenizer(bos_token=None)
    assert set(Sampled().tokens(asked(tokenizer=no_begin))[:, 0].tolist()) == {END}
    random_first = [Sampled().tokens(asked(tokenizer=bare_tokenizer, seed=seed))[:, 0] for seed in (0, 0, 1)]
    assert len(set(random_first[0].tolist())) > 3
    assert torch.equal(random_first[0], random_first[1])
    assert not torch.equal(random_first[0], random_first[2])


def test_each_token_is_drawn_from_the_distribution_of_an_uncached_forward(tiny_model):
    everything, nothing = torch.ones(VOCAB_SIZE, dtype=torch.bool), torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    draws = torch.rand(6, LENGTH - 1, generator=torch.Generator().manual_seed(1))
    ids, mean = sample(tiny_model, torch.arange(6), draws, everything, nothing, temperature=3.0)
    assert ids[:, 0].tolist() == list(range(6))
    torch.testing.assert_close(mean.float(), surprise(tiny_model, ids), rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        logits = tiny_model(input_ids=ids).logits[:, :-1, :VOCAB_SIZE].double()
    for step in range(LENGTH - 1):
        hot = 3.0 - 2.0 * step / HOT_TOKENS if step < HOT_TOKENS else 1.0
        upto = (logits[:, step] / hot).softmax(-1).cumsum(-1)
        upper = upto.gather(1, ids[:, step + 1 : step + 2])[:, 0]
        lower = torch.where(
            ids[:, step + 1] > 0, upto.gather(1, (ids[:, step + 1 : step + 2] - 1).clamp(min=0))[:, 0], 0
        )
        assert (draws[:, step] < upper + 1e-5).all()
        assert (draws[:, step] > lower - 1e-5).all()


def test_the_least_likely_of_ten_rows_is_left_out(asked, tiny_model, monkeypatch):
    seen = []
    monkeypatch.setattr("llmcompress.calib.sampled.sample", lambda *rest: seen.append(sample(*rest)) or seen[-1])
    kept = Sampled(batch_size=5).tokens(asked(18))
    rows = torch.cat([ids for ids, _ in seen])
    assert rows.shape == (20, LENGTH)
    likely = surprise(tiny_model, rows)
    assert likely.std() > 0.05
    worst = likely.topk(2).indices.tolist()
    assert kept.tolist() == [row for index, row in enumerate(rows.tolist()) if index not in worst]


def fixed_model(logits, cache="kept", positions=64):
    """A model of constant next-token logits [vocabulary]."""

    def forward(input_ids, past_key_values, use_cache):
        rows = logits.expand(input_ids.shape[0], 1, -1)
        return SimpleNamespace(logits=rows, past_key_values=cache)

    forward.device = torch.device("cpu")
    forward.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=positions))
    return forward


def test_special_tokens_occur_but_do_not_take_over(ask):
    logits = torch.zeros(VOCAB_SIZE)
    logits[END] = 50.0  # wants nothing else
    ids = Sampled().tokens(ask(9, 64, model=lambda: fixed_model(logits)))
    specials = (ids[:, 1:] < SPECIALS).cumsum(1)
    bound = 4 + torch.arange(63) // 8
    assert (specials <= bound + 1).all()
    assert (specials[:, -1] >= 8).all()
    assert ids.unique().numel() > 100


def test_the_temperature_is_high_first_and_then_one(ask):
    logits = torch.zeros(VOCAB_SIZE)
    logits[100] = 8.0
    share = (Sampled(temperature=5.0).tokens(ask(90, 64, model=lambda: fixed_model(logits))) == 100).float().mean(0)
    flat = torch.exp(torch.tensor(8.0)) / (torch.exp(torch.tensor(8.0)) + VOCAB_SIZE - 1)
    assert share[1] < 0.2
    assert share[HOT_TOKENS + 1 :].mean() == pytest.approx(float(flat), abs=0.03)
    steady = (Sampled(temperature=1.0).tokens(ask(90, 64, model=lambda: fixed_model(logits))) == 100).float().mean(0)
    assert steady[1:HOT_TOKENS].mean() == pytest.approx(float(flat), abs=0.06)


def test_ids_that_the_tokenizer_does_not_know_are_not_sampled(ask):
    logits = torch.zeros(VOCAB_SIZE + 5)
    logits[VOCAB_SIZE:] = 50.0
    ids = Sampled().tokens(ask(9, 64, vocab_size=VOCAB_SIZE + 5, model=lambda: fixed_model(logits)))
    assert ids.max() < VOCAB_SIZE


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(ask, value):
    broken = torch.zeros(VOCAB_SIZE).index_fill(0, torch.tensor([7]), value)
    with pytest.raises(CalibrationError, match="gives logits that are not finite at token 0"):
        Sampled().tokens(ask(1, 8, model=lambda: fixed_model(broken)))


def test_models_that_cannot_give_the_text_are_refused(ask, tokenizer):
    flat = torch.zeros(VOCAB_SIZE)
    with pytest.raises(CalibrationError, match="needs a model to sample from"):
        Sampled().tokens(TokenRequest(tokenizer=tokenizer, samples=1, length=4, seed=0, vocab_size=VOCAB_SIZE))
    with pytest.raises(CalibrationError, match="the model has 64 positions, 65 tokens were asked for"):
        Sampled().tokens(ask(1, 65, model=lambda: fixed_model(flat)))
    with pytest.raises(CalibrationError, match="keeps no key/value cache"):
        Sampled().tokens(ask(1, 8, model=lambda: fixed_model(flat, cache=None)))
