"""Work shared out to threads and ranks: in order, bounded, without gradients, the same whatever their number.

The ranks here are threads, each with a communicator of its own that exchanges through a list.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from llmcompress.workers import SERIAL, WHOLE, Part, Workers

SIZES = (1, 2, 3, 5)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_results_come_in_the_order_of_the_items(count):
    with SERIAL.with_threads(count) as workers:
        assert list(workers.in_order(lambda x: x * x, range(50))) == [x * x for x in range(50)]
        assert workers.together(lambda x=x: -x for x in range(7)) == [-x for x in range(7)]
        assert workers.both(lambda: 1, lambda: "two") == (1, "two")


@pytest.mark.parametrize("count", [1, 2])
def test_work_apart_begins_when_what_comes_before_has_ended(count):
    seen = []

    def first():
        time.sleep(0.05)
        seen.append("first")

    with SERIAL.with_threads(count) as workers:
        workers.both(first, lambda: seen.append("second"), apart=True)
    assert seen == ["first", "second"]


def test_no_more_items_are_taken_than_threads_can_work_on():
    taken = []

    def items():
        for number in range(20):
            taken.append(number)
            yield number

    with SERIAL.with_threads(2) as workers:
        results = workers.in_order(lambda x: x, items())
        next(results)
        assert len(taken) == 3
        results.close()


@pytest.mark.parametrize("count", [1, 3])
def test_errors_reach_the_caller_and_nothing_runs_on(count):
    running = []

    def work(x):
        running.append(x)
        if x == 3:
            raise ValueError("third")
        return x

    with SERIAL.with_threads(count) as workers:
        with pytest.raises(ValueError, match="third"):
            list(workers.in_order(work, range(100)))
        assert len(running) < 3 + 2 * count + 1
        with pytest.raises(ValueError, match="third"):
            workers.together(lambda: work(3) for _ in range(2))


@pytest.mark.parametrize("count", [1, 2])
def test_torch_is_single_threaded_and_without_gradients_within(count):
    before = torch.get_num_threads()
    weight = torch.ones(2, requires_grad=True)
    with SERIAL.with_threads(count) as workers:
        assert torch.get_num_threads() == 1
        seen = list(workers.in_order(lambda _: (torch.get_num_threads(), (weight * 2).requires_grad), range(4)))
        assert seen == [(1, False)] * 4
    assert torch.get_num_threads() == before


def test_nested_work_runs_in_place():
    with SERIAL.with_threads(2) as workers:
        names = workers.together(
            lambda: workers.together(lambda: threading.current_thread().name for _ in range(2)) for _ in range(2)
        )
    assert all(len(set(inner)) == 1 for inner in names)


def test_another_thread_than_that_of_the_workers_computes_in_place():
    """A thread of autograd, say, that a thread of the pool waits for: it must not wait for the pool."""
    with SERIAL.with_threads(2) as workers:
        found = []
        other = threading.Thread(target=lambda: found.extend(workers.in_order(lambda _: threading.get_ident(), [1, 2])))
        other.start()
        ident = other.ident
        other.join()
    assert found == [ident, ident]


class Connected:
    """The communicator of one of `size` ranks."""

    def __init__(self, rank, size, given, barrier):
        self.rank, self.size, self._given, self._barrier = rank, size, given, barrier
        self.exchanges = 0

    def all_gather(self, mine):
        self.exchanges += 1
        self._given[self.rank] = mine
        self._barrier.wait(10)
        found = list(self._given)
        self._barrier.wait(10)
        yield from found

    def all_or_raise(self, function):
        try:
            result, wrong = function(), None
        except ValueError as error:
            result, wrong = None, error
        if any(list(self.all_gather(wrong))):
            raise wrong or KeyError("elsewhere")
        return result


def in_ranks(size, function):
    """What a function of workers gives in each rank; of one, without any communicator."""
    if size == 1:
        return [function(SERIAL)]
    given, barrier = [None] * size, threading.Barrier(size)

    def rank(number):
        return function(Workers(Connected(number, size, given, barrier)))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, 4, 11])
def test_distributed_results_come_in_order_and_each_from_one_rank(size, count):
    done = []

    def work(number):
        done.append(number)
        return number * number

    found = in_ranks(size, lambda workers: workers.distribute([lambda n=n: work(n) for n in range(count)]))
    assert found == [[n * n for n in range(count)]] * size
    assert sorted(done) == list(range(count))
    assert in_ranks(size, lambda workers: workers.both(lambda: 1, lambda: "two")) == [(1, "two")] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 2, 5, 12, 13])
@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_shares_of_a_stream_are_joined_in_order(size, count, at_once):
    ended = []

    def joined(workers):
        def own():
            yield from range(workers.rank, count, workers.size)
            ended.append(workers.rank)

        return list(workers.interleave_ranks(own(), count, at_once))

    assert in_ranks(size, joined) == [list(range(count))] * size
    assert sorted(ended) == list(range(size))  # what comes after a generator's last result is done as well


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_functions_are_mapped_to_ranks_where_each_has_one_and_else_run_by_all(size, count):
    where = []

    def work(number, workers):
        where.append((number, workers.size == 1))
        return [number, *workers.distribute([lambda: number + 1])]

    found = in_ranks(size, lambda workers: list(workers.map_ranks([partial(work, n) for n in range(count)])))
    assert found == [[[n, n + 1] for n in range(count)]] * size
    apart = count >= size
    assert sorted(where) == sorted((n, apart) for n in range(count) for _ in range(1 if apart else size))


@pytest.mark.parametrize("size", SIZES)
def test_rank_0_decides_for_all(size):
    assert in_ranks(size, lambda workers: workers.broadcast(lambda: workers.rank)) == [0] * size
    assert in_ranks(size, lambda workers: workers.all_gather(workers.rank)) == [list(range(size))] * size


@pytest.mark.parametrize("size", SIZES)
def test_an_error_in_one_rank_is_one_in_all(size):
    def tried(workers):
        def fails_in_the_last():
            if workers.rank == size - 1:
                raise ValueError("no")
            return "fine"

        with pytest.raises((ValueError, KeyError)) as caught:
            workers.all_or_raise(fails_in_the_last)
        return type(caught.value)

    assert in_ranks(size, tried) == [KeyError] * (size - 1) + [ValueError]
    assert in_ranks(size, lambda workers: workers.all_or_raise(lambda: workers.rank)) == list(range(size))


def test_parts_take_turns():
    assert SERIAL.part() == WHOLE
    found = in_ranks(3, lambda workers: [workers.part(turn) for turn in range(4)])
    assert found == [[Part((number + turn) % 3, 3) for turn in range(4)] for number in range(3)]


def test_work_of_a_thread_is_no_rank_s():
    """Ranks exchange in the thread that joined them: what is nested in their pools stays there."""

    def nested(workers):
        with workers.with_threads(2) as threaded:
            return threaded.together([lambda: (threaded.rank, threaded.size, threaded.all_gather(7))] * 2)

    assert in_ranks(3, nested) == [[(0, 1, [7])] * 2] * 3
