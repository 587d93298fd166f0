"""What is planted in text, where it stands, and what is asked; read as text again, by a regular expression."""

import re

import pytest
from transformers import AutoTokenizer

from llmcompress.errors import CalibrationError
from llmcompress.validate import needles as module
from llmcompress.validate.needles import DEPTHS, haystack, plant

FACT = re.compile(r"\nThe secret word of (\w+) is (\w+)\.\n")
QUESTION = re.compile(r"\nThe secret word of (\w+) is (\w+)$")


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture(scope="module")
def text(tokenizer, tiny_eval_text):
    words = tiny_eval_text.read_text()
    half = len(words) // 2
    return haystack(tokenizer, [*tokenizer(words[:half])["input_ids"], *tokenizer(words[half:])["input_ids"]])


def test_a_haystack_is_text_without_openings_that_knows_where_sentences_begin(text, tokenizer, tiny_eval_text):
    assert tokenizer.decode(text.ids) == tiny_eval_text.read_text()
    assert tokenizer.bos_token_id not in text.ids
    assert text.begins[0] == 0
    for at in text.begins[1:]:
        assert re.search(r"[.!?\n] *$", tokenizer.decode(text.ids[:at]))
    assert len(text.begins) > 100
    part = text.part(0.5, 300)
    assert len(part.ids) == 300
    start = next(at for at in text.begins if at >= len(text.ids) / 2)
    assert part.ids == text.ids[start : start + 300]
    assert part.begins == [at - start for at in text.begins if start <= at < start + 300]
    turned = text.part(0.99, 300)
    left = len(text.ids) - next(at for at in text.begins if at >= 0.99 * len(text.ids))
    assert 0 < left < 200
    assert turned.ids == [*text.ids[-left:], *text.ids[: 300 - left]]
    assert left in turned.begins


def test_every_fact_is_asked_for_and_told_where_it_is_said_to_be(text, tokenizer):
    found = plant(tokenizer, text, 1024, 3)
    assert [(needle.length, needle.depth) for needle in found] == [
        (length, depth) for length in (1024, 512, 256) for _ in range(3) for depth in DEPTHS
    ]
    for needle in found:
        assert max(len(one.ids) for one in needle.asked) <= needle.length
        assert max(len(one.ids) for one in needle.asked) > needle.length - 10  # of the question with the longest name
        read = [tokenizer.decode(one.ids, skip_special_tokens=True) for one in needle.asked]
        told = dict(FACT.findall(read[0]))
        assert len(told) == len(DEPTHS)
        asked = [QUESTION.search(one) for one in read]
        assert len({one[1] for one in asked}) == 1
        assert asked[needle.answer][2] == told[asked[0][1]]
        words = {one[2] for one in asked}
        assert len(words) == len(asked) == 10
        assert set(told.values()) < words
        assert {len(one.ids) - one.start for one in needle.asked} == {3}  # tokens of each word, with this tokenizer
        for one, whole in zip(needle.asked, read, strict=True):
            assert one.ids[0] == tokenizer.bos_token_id
            assert tokenizer.bos_token_id not in one.ids[1:]
            assert whole.endswith(tokenizer.decode(one.ids[one.start :]))
        facts = [
            tokenizer(f"\nThe secret word of {person} is {word}.\n", add_special_tokens=False)["input_ids"]
            for person, word in told.items()  # in the order of the text
        ]
        ids, before, places = list(needle.asked[0].ids), 0, {}
        for person, fact in zip(told, facts, strict=True):
            places[person] = next(at for at in range(len(ids)) if ids[at : at + len(fact)] == fact) - 1 - before
            before += len(fact)
        share = places[asked[0][1]] / (
            needle.asked[0].start - len(tokenizer(asked[0][0].rpartition(" ")[0])["input_ids"]) - before
        )
        assert needle.depth - 0.1 <= share <= needle.depth + 0.01


def test_the_same_needles_are_planted_every_time_and_more_are_others(text, tokenizer):
    assert plant(tokenizer, text, 256, 1) == plant(tokenizer, text, 256, 1)
    found = plant(tokenizer, text, 256, 4)
    assert len({needle.asked[needle.answer].ids for needle in found}) == 20
    assert len({needle.answer for needle in found}) > 5


def test_text_too_short_for_the_facts_is_refused(text, tokenizer):
    with pytest.raises(CalibrationError, match="too many for text of 200") as refused:
        plant(tokenizer, text, 200, 1)
    least = int(re.search(r"--length (\d+)", refused.value.hint)[1])
    assert {needle.length for needle in plant(tokenizer, text, least, 1)} == {least}
    with pytest.raises(CalibrationError):
        plant(tokenizer, text, least - 1, 1)


def test_words_are_of_one_number_of_tokens(text, tokenizer, monkeypatch):
    monkeypatch.setattr(module, "_WORDS", module._WORDS[:12])
    with pytest.raises(CalibrationError, match="no 10 of the words"):
        plant(tokenizer, text, 256, 1)


def test_text_without_sentences_is_cut_anywhere(tokenizer):
    ids = tokenizer("word " * 400, add_special_tokens=False)["input_ids"]
    needles = plant(tokenizer, haystack(tokenizer, ids), 512, 1)
    places = []
    for needle in needles[:5]:
        read = tokenizer.decode(needle.asked[needle.answer].ids, skip_special_tokens=True)
        asked = QUESTION.search(read)[1]
        places += [len(FACT.sub("", read[: match.start()])) for match in FACT.finditer(read) if match[1] == asked]
    whole = places[-1]
    assert [place / whole for place in places] == pytest.approx(DEPTHS, abs=0.02)
