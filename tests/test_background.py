"""Work done ahead of its turn, or behind the caller: in order, and errors reach whoever asks."""

import pytest

from llmcompress.background import Ahead, Behind


def test_what_is_read_ahead_comes_in_order_whatever_is_asked_for_again():
    asked = []
    ahead = Ahead(lambda item: (asked.append(item), 10 * item)[1], range(6), 2)
    assert [ahead.take(item) for item in range(6)] == [0, 10, 20, 30, 40, 50]
    assert sorted(asked) == list(range(6))  # each once
    assert [ahead.take(item) for item in (0, 1)] == [0, 10]  # a pass that ends early
    assert [ahead.take(item) for item in range(6)] == [0, 10, 20, 30, 40, 50]


def test_what_fails_ahead_raises_where_it_is_taken():
    ahead = Ahead(lambda item: 1 // item, [2, 1, 0], 2)
    assert [ahead.take(2), ahead.take(1)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        ahead.take(0)


def test_what_is_done_behind_is_done_in_order_and_its_error_is_raised():
    done = []
    behind = Behind(2)
    for item in range(20):
        behind.add(lambda item=item: done.append(item))
    behind.finish()
    assert done == list(range(20))
    behind = Behind(2)
    behind.add(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        behind.finish()
