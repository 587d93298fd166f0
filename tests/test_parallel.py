"""Work shared out to threads: in order, bounded, without gradients, and the same whatever their number."""

import threading

import pytest
import torch

from llmcompress.parallel import both, in_order, threads, together


@pytest.mark.parametrize("count", [1, 2, 5])
def test_results_come_in_the_order_of_the_items(count):
    with threads(count):
        assert list(in_order(lambda x: x * x, range(50))) == [x * x for x in range(50)]
        assert together(lambda x=x: -x for x in range(7)) == [-x for x in range(7)]
        assert both(lambda: 1, lambda: "two") == (1, "two")


def test_no_more_items_are_taken_than_threads_can_work_on():
    taken = []

    def items():
        for number in range(20):
            taken.append(number)
            yield number

    with threads(2):
        results = in_order(lambda x: x, items())
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

    with threads(count):
        with pytest.raises(ValueError, match="third"):
            list(in_order(work, range(100)))
        assert len(running) < 3 + 2 * count + 1
        with pytest.raises(ValueError, match="third"):
            together(lambda: work(3) for _ in range(2))


@pytest.mark.parametrize("count", [1, 2])
def test_torch_is_single_threaded_and_without_gradients_within(count):
    before = torch.get_num_threads()
    weight = torch.ones(2, requires_grad=True)
    with threads(count):
        assert torch.get_num_threads() == 1
        seen = list(in_order(lambda _: (torch.get_num_threads(), (weight * 2).requires_grad), range(4)))
        assert seen == [(1, False)] * 4
    assert torch.get_num_threads() == before


def test_nested_work_runs_in_place():
    with threads(2):
        names = together(lambda: together(lambda: threading.current_thread().name for _ in range(2)) for _ in range(2))
    assert all(len(set(inner)) == 1 for inner in names)
