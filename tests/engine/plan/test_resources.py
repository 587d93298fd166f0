"""What a run does where memory is bounded: fewer threads, smaller batches, and then experts that are read on demand."""

import pytest

from llmcompress.engine.plan import resources
from llmcompress.engine.plan.memory_model import MemoryModel, Term
from llmcompress.engine.plan.resources import choose_resources
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import PlanError
from llmcompress.recipe import Calibration

TEXT = Calibration(samples=30, length=1024)


def cost(chosen):
    layer = 0 if chosen.experts_on_demand else 1000
    return MemoryModel([Term("all", layer + 100 * chosen.threads + 10 * chosen.batch)], [])


@pytest.mark.parametrize(
    ("limit", "threads", "batch", "on_demand"),
    [
        (1400, 2, 1, False),
        (1300, 1, 1, False),
        (1200, 2, 15, True),  # all windows, half of them for each thread
        (300, 1, 15, True),
        (200, 1, 7, True),
    ],
)
def test_experts_are_read_on_demand_where_a_layer_does_not_fit_and_then_batches_are_large(
    monkeypatch, limit, threads, batch, on_demand
):
    monkeypatch.setattr(resources, "usual_threads", lambda: 2)
    found = choose_resources(Options(max_memory=limit), TEXT, cost, experts=True)
    assert (found.threads, found.batch, found.experts_on_demand) == (threads, batch, on_demand)


def test_what_is_asked_for_stays():
    found = choose_resources(Options(max_memory=400, threads=2, batch=4), TEXT, cost, experts=True)
    assert (found.threads, found.batch, found.experts_on_demand) == (2, 4, True)


def test_a_model_without_experts_is_refused():
    with pytest.raises(PlanError, match="memory are needed"):
        choose_resources(Options(max_memory=1000), TEXT, cost, experts=False)
