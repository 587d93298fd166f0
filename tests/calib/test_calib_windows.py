"""Windows are exact cuts of the packed documents; the fingerprint tells sets apart."""

import hashlib
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmcompress.calib.base import fingerprint, opening, windows
from llmcompress.errors import CalibrationError

BEGIN, END = 0, 1
documents = st.lists(st.lists(st.integers(3, 200), max_size=30), max_size=12)


def cut(documents, length, end=END):
    """All windows, by other means than the code: a flat list, sliced."""
    stream = [token for document in documents if document for token in ([*document, end] if end else document)]
    return [stream[at : at + length] for at in range(0, len(stream) - length + 1, length)]


@given(documents, st.integers(2, 9), st.integers(0, 2**40), st.data())
def test_windows_are_drawn_once_each_and_in_text_order(ask, documents, length, seed, data):
    expected = cut(documents, length)
    samples = data.draw(st.integers(1, max(1, len(expected))))
    if samples > len(expected):
        with pytest.raises(CalibrationError, match="fill 0 windows"):
            windows(documents, ask(samples, length, seed=seed), "x")
        return
    drawn = windows(documents, ask(samples, length, seed=seed), "x")
    assert drawn.dtype == torch.int64
    assert drawn.shape == (samples, length)
    rest = iter(expected)
    assert all(any(row == other for other in rest) for row in drawn.tolist())  # a subsequence of the cuts


@given(documents, st.integers(2, 9))
def test_asking_for_all_gives_the_whole_text(ask, documents, length):
    expected = cut(documents, length)
    if expected:
        assert windows(documents, ask(len(expected), length), "x").tolist() == expected
    with pytest.raises(CalibrationError) as refusal:
        windows(documents, ask(len(expected) + 1, length), "the texts")
    assert f"the texts gives {sum(len(d) + 1 for d in documents if d)} tokens" in refusal.value.message
    assert f"fill {len(expected)} windows of {length}; {len(expected) + 1} were asked for" in refusal.value.message
    assert (f"--samples {len(expected)}," in refusal.value.hint) == bool(expected)


@given(documents, st.integers(2, 9))
def test_every_window_begins_as_the_tokenizer_begins_a_text(ask, opening_tokenizer, documents, length):
    ask_opening = partial(ask, tokenizer=opening_tokenizer)
    opened = [[BEGIN, *document] for document in documents if document]
    stream = [token for document in opened for token in [*document, END]]
    expected = []
    while stream:
        row = [] if stream[0] == BEGIN else [BEGIN]
        while stream and len(row) < length:
            row.append(stream.pop(0))
        expected.append(row)
    expected = [row for row in expected if len(row) == length]
    if expected:
        assert windows(opened, ask_opening(len(expected), length), "x").tolist() == expected
    with pytest.raises(CalibrationError, match=f"fill {len(expected)} windows"):
        windows(opened, ask_opening(len(expected) + 1, length), "x")


def test_only_a_tokenizer_that_adds_it_has_an_opening_token(tokenizer, opening_tokenizer, make_tokenizer):
    assert tokenizer.bos_token_id == opening_tokenizer.bos_token_id == BEGIN
    assert opening(tokenizer) is None
    assert opening(opening_tokenizer) == BEGIN
    assert opening(make_tokenizer(bos_token=None)) is None


def test_no_end_token_where_there_is_none_or_one_already(ask, make_tokenizer):
    assert windows([[5, 6], [7, 8]], ask(2, 2, tokenizer=make_tokenizer(eos_token=None)), "x").tolist() == [
        [5, 6],
        [7, 8],
    ]
    assert windows([[5, 6, END], [7, END]], ask(1, 5), "x").tolist() == [[5, 6, END, 7, END]]
    line_break = 13  # as after the last turn of a chat template
    assert windows([[5, END, line_break], [7]], ask(1, 5), "x").tolist() == [[5, END, line_break, 7, END]]
    assert windows([[END, 5, 6], [END, 7, 8]], ask(1, 6), "x").tolist() == [[END, 5, 6, END, 7, 8]]


def test_the_seed_decides_which_windows_are_drawn(ask, untouched_randomness):
    text = [list(range(3, 203))]
    sets = [windows(text, ask(5, 4, seed=seed), "x") for seed in (0, 0, 1)]
    assert torch.equal(sets[0], sets[1])
    assert not torch.equal(sets[0], sets[2])


def test_tokens_beyond_the_vocabulary_are_refused(ask):
    assert windows([[3, 99]], ask(1, 3, vocab_size=100), "x").tolist() == [[3, 99, END]]
    with pytest.raises(CalibrationError, match="gives token 100 for x, but the model has 100 tokens"):
        windows([[3, 100]], ask(1, 3, vocab_size=100), "x")


def test_the_fingerprint_is_the_hash_of_shape_and_ids():
    tokens = torch.arange(6).view(2, 3)
    little_endian = b"".join(i.to_bytes(8, "little") for i in range(6))
    assert fingerprint(tokens) == hashlib.sha256(b"(2, 3)" + little_endian).hexdigest()
    assert fingerprint(tokens.t().contiguous().t()) == fingerprint(tokens)
    assert fingerprint(tokens.view(3, 2)) != fingerprint(tokens)
    assert fingerprint(tokens.flip(0)) != fingerprint(tokens)
