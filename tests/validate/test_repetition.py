"""How much of a text is repetition, and what a loop is, against counting by hand."""

import random

import pytest

from llmcompress.validate.repetition import ends_in_loop, repetition, repetition_figures


def counted(ids):
    """Sequences of four that stand somewhere before, looked for one by one."""
    places = range(len(ids) - 3)
    again = [any(ids[before : before + 4] == ids[at : at + 4] for before in range(at)) for at in places]
    return sum(again) / len(again)


def test_repetition_is_the_share_of_sequences_that_came_before():
    assert repetition([1, 2, 3, 4, 5, 6, 7]) == 0
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)  # 1234 of 1234 2341 3412 4123 1234
    assert repetition([5] * 10) == pytest.approx(6 / 7)
    assert repetition([1, 2, 3]) == repetition([]) == 0
    dice = random.Random(0)
    for _ in range(20):
        ids = dice.choices(range(3), k=60)
        assert repetition(ids) == pytest.approx(counted(ids))


def test_a_loop_is_one_sequence_three_times_at_the_end():
    begin = list(range(100, 150))
    for period in (1, 5, 8, 30):
        turn = list(range(period))
        assert ends_in_loop(begin + turn * (24 // period + 3))
        assert ends_in_loop(turn * (24 // period + 3) + turn[: period // 2])  # cut off in the middle of a turn
        assert not ends_in_loop(turn * (24 // period + 3) + [99])
    for period in (8, 30):
        assert ends_in_loop(begin + list(range(period)) * 3)
        assert not ends_in_loop(begin + list(range(period)) * 2)
    assert not ends_in_loop([*begin, *[7] * 23])  # such as a line of dots
    assert not ends_in_loop([7] * 23)
    assert ends_in_loop([7] * 24)
    assert not ends_in_loop(begin)
    assert not ends_in_loop([])


def test_models_are_compared_prompt_by_prompt():
    plain, loop = list(range(40)), [1, 2] * 20
    found = repetition_figures([[plain, loop, loop, loop[:10]], [plain, plain, plain, loop[:10]]])
    assert found["prompts"] == 4
    assert found["written_tokens"] == found["ref_written_tokens"] == (3 * 40 + 10) / 4
    rate, short = counted(loop), counted(loop[:10])
    assert found["repetition"] == pytest.approx((2 * rate + short) / 4, rel=1e-5)
    assert found["ref_repetition"] == pytest.approx(short / 4, rel=1e-5)
    assert found["repetition_rise"] == pytest.approx(rate / 2, rel=1e-5)
    assert (found["looping"], found["ref_looping"], found["looping_rise"]) == (0.5, 0, 0.5)
    for name in ("repetition", "looping", "repetition_rise", "looping_rise"):
        low, high = found[f"{name}_ci"]
        assert low <= found[name] <= high
    alone = repetition_figures([[plain, loop]])
    assert {name for name in alone if name.startswith("ref_") or "rise" in name} == set()
    same = repetition_figures([[plain, loop]] * 2)
    assert same["repetition_rise"] == same["looping_rise"] == 0
    assert same["repetition_rise_ci"] == [0, 0]
