"""Work shared out to processes: in order, each piece by one of them, and the same whatever their number.

The processes here are threads, each with a team of its own that exchanges through a list.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from llmcompress.processes import (
    WHOLE,
    Part,
    agreed,
    alone,
    both,
    first,
    from_all,
    gathered,
    member_of,
    part,
    processes,
    rank,
    shared,
    spread,
)

SIZES = (1, 2, 3, 5)


class Threads:
    """One of `size` members of a team."""

    def __init__(self, rank, size, given, barrier):
        self.rank, self.size, self._given, self._barrier = rank, size, given, barrier
        self.exchanges = 0

    def exchange(self, mine):
        self.exchanges += 1
        self._given[self.rank] = mine
        self._barrier.wait(10)
        found = list(self._given)
        self._barrier.wait(10)
        yield from found

    def agreed(self, function):
        try:
            result, wrong = function(), None
        except ValueError as error:
            result, wrong = None, error
        if any(gathered(wrong)):
            raise wrong or KeyError("elsewhere")
        return result


def in_team(size, function):
    """What a function gives in each member of a team; in a team of one, without any."""
    if size == 1:
        return [function()]
    given, barrier = [None] * size, threading.Barrier(size)

    def member(number):
        with member_of(Threads(number, size, given, barrier)):
            return function()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(member, range(size)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, 4, 11])
def test_shared_results_come_in_order_and_each_from_one_process(size, count):
    done = []

    def work(number):
        done.append(number)
        return number * number

    found = in_team(size, lambda: shared([lambda n=n: work(n) for n in range(count)]))
    assert found == [[n * n for n in range(count)]] * size
    assert sorted(done) == list(range(count))
    assert in_team(size, lambda: both(lambda: 1, lambda: "two")) == [(1, "two")] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 2, 5, 12, 13])
@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_shares_of_a_stream_are_joined_in_order(size, count, at_once):
    ended = []

    def joined():
        def own():
            yield from range(rank(), count, processes())
            ended.append(rank())

        return list(from_all(own(), count, at_once))

    assert in_team(size, joined) == [list(range(count))] * size
    assert sorted(ended) == list(range(size))  # what comes after a generator's last result is done as well


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_functions_are_spread_where_each_process_has_one_and_else_run_by_all(size, count):
    where = []

    def work(number):
        where.append((number, alone()))
        return [number, *shared([lambda: number + 1])]

    found = in_team(size, lambda: list(spread([lambda n=n: work(n) for n in range(count)])))
    assert found == [[[n, n + 1] for n in range(count)]] * size
    apart = count >= size
    assert sorted(where) == sorted((n, apart) for n in range(count) for _ in range(1 if apart else size))


@pytest.mark.parametrize("size", SIZES)
def test_the_first_process_decides_for_all(size):
    assert in_team(size, lambda: first(rank)) == [0] * size
    assert in_team(size, lambda: gathered(rank())) == [list(range(size))] * size


@pytest.mark.parametrize("size", SIZES)
def test_an_error_in_one_process_is_one_in_all(size):
    def fails_in_the_last():
        if rank() == size - 1:
            raise ValueError("no")
        return "fine"

    def tried(function):
        with pytest.raises((ValueError, KeyError)) as caught:
            agreed(function)
        return type(caught.value)

    assert in_team(size, lambda: tried(fails_in_the_last)) == [KeyError] * (size - 1) + [ValueError]
    assert in_team(size, lambda: agreed(rank)) == list(range(size))


def test_parts_take_turns():
    assert part() == WHOLE
    found = in_team(3, lambda: [part(turn) for turn in range(4)])
    assert found == [[Part((number + turn) % 3, 3) for turn in range(4)] for number in range(3)]
