"""Feedback over outputs, beside the objective in float64, conditional minima by definition, and rounding without it."""

import pytest
import torch

from llmcompress.grids.coded import Coded
from llmcompress.grids.grid_type import grid_types
from llmcompress.methods.base import Statistics
from llmcompress.methods.gptq import Gptq
from llmcompress.solve import output_feedback
from llmcompress.solve.output_feedback import chunks, solved_with_feedback
from llmcompress.solve.prune import Pruned
from llmcompress.solve.row_blocks import SERIAL_BLOCKS
from llmcompress.stats.gram import Gram
from llmcompress.workers import SERIAL

GROUPS = {"int": 32, "progressive": 32, "offset": 32, "fp8": -1}
OUT, IN, ROWS = 80, 64, 96


def correlated(size, seed, tokens=400):
    """Values [tokens, size] whose channels go together."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(size, size, generator=generator) + 2 * torch.randn(size, 1, generator=generator)
    return torch.randn(tokens, size, generator=generator) @ mixing.T / size**0.5


def products(gradients, sizes):
    parts = gradients.split(sizes, dim=1)
    return [part.T @ part / len(gradients) for part in parts]


def solved(weight, inputs, outputs, workers=None, pruned=None, **options):
    gram = Gram(IN, SERIAL)
    gram.update(inputs)
    method = Gptq(bits=3, group_size=32, qep_alpha=0, **options)
    stats = Statistics({"gram": gram}, outputs=outputs)
    blocks = SERIAL_BLOCKS if workers is None else type(SERIAL_BLOCKS)(workers)
    return method.solve(weight, stats, torch.float32, blocks, pruned).coded


def loss(weight, coded, inputs, outputs):
    """tr(O E H E^T) in float64, O being without what lies between runs of outputs."""
    moved = inputs.double() @ (coded.decode() - weight).double().T
    return float(torch.trace(torch.block_diag(*outputs).double() @ moved.T @ moved))


@pytest.mark.parametrize("sizes", [[OUT], [50, 30]], ids=["one run", "two runs"])
def test_the_objective_falls_well_below_that_of_rows_alone(sizes):
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))
    inputs, outputs = correlated(IN, 1), products(correlated(OUT, 2), sizes)
    fed, alone = (loss(weight, solved(weight, inputs, given), inputs, outputs) for given in (outputs, None))
    assert fed < 0.6 * alone


def test_a_row_is_aimed_beside_the_errors_of_those_before_it():
    """By the definition: the rest of the rows, were they free, would make the most of what was done before."""
    weight = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64).float()
    square = products(correlated(ROWS, 4), [ROWS])[0]
    damped = square.double() + output_feedback.DAMPING * square.double().diagonal().mean() * torch.eye(ROWS)
    aims, steps = {}, []

    def solve(rows, wanted):
        steps.append(len(rows))
        aims.update(zip(rows.tolist(), wanted, strict=True))
        return Whole(wanted.round())

    found = solved_with_feedback([square], weight, solve, SERIAL)
    order = damped.diagonal().argsort(descending=True)
    errors = found.decode().double() - weight.double()
    assert len(set(steps)) == 1 < steps[0]
    for at in range(0, ROWS, steps[0]):
        left = order[at:]
        for place, row in enumerate(left[: steps[0]].tolist()):
            # rows of one step know nothing of each other: coefficients of the rows done alone are used
            others, free = order[: at + place], left[place:]
            coefficients = -torch.linalg.solve(damped[free][:, free], damped[free][:, others])[0]
            expected = weight[row].double() + coefficients[:at] @ errors[order[:at]]
            torch.testing.assert_close(aims[row].double(), expected, rtol=1e-4, atol=1e-4)


class Whole:
    """Codes that are the values."""

    def __init__(self, values):
        self.values = values

    def decode(self):
        return self.values.clone()

    def rows(self, index):
        return Whole(self.values[index])


@pytest.fixture(autouse=True)
def _whole_values_are_stacked(monkeypatch):
    stacked = Coded.stacked

    def either(parts):
        return Whole(torch.cat([part.values for part in parts])) if isinstance(parts[0], Whole) else stacked(parts)

    monkeypatch.setattr(output_feedback.Coded, "stacked", either)


@pytest.mark.parametrize("sizes", [[OUT], [48, 32]], ids=["one run", "two runs"])
def test_outputs_that_have_nothing_in_common_are_rounded_as_without(sizes):
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))
    inputs = correlated(IN, 1)
    fed = solved(weight, inputs, [torch.eye(size) for size in sizes])
    assert torch.equal(fed.codes, solved(weight, inputs, None).codes)


@pytest.mark.parametrize("sizes", [[OUT], [50, 30]], ids=["one run", "two runs"])
def test_weights_that_are_gone_stay_so_and_the_objective_falls(sizes):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(OUT, IN, generator=generator)
    pruned = weight * (torch.rand(OUT, IN, generator=generator) > 0.5)
    inputs, outputs = correlated(IN, 1), products(correlated(OUT, 2), sizes)
    fed, alone = (solved(weight, inputs, given, pruned=Pruned.of_zeros(pruned)) for given in (outputs, None))
    assert not fed.decode()[pruned == 0].any()
    assert loss(weight, fed, inputs, outputs) < 0.7 * loss(weight, alone, inputs, outputs)


def test_gradients_that_are_zero_say_nothing():
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))
    inputs = correlated(IN, 1)
    fed = solved(weight, inputs, [torch.zeros(OUT, OUT)])
    assert torch.equal(fed.codes, solved(weight, inputs, None).codes)


def test_the_number_of_threads_changes_nothing(monkeypatch):
    monkeypatch.setattr(output_feedback, "_TOGETHER", 1)  # each thread has two runs
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))
    inputs, outputs = correlated(IN, 1), products(correlated(OUT, 2), [20, 20, 20, 20])
    with SERIAL.with_threads(2) as workers:
        several = solved(weight, inputs, outputs, workers)
    one = solved(weight, inputs, outputs)
    assert torch.equal(one.codes, several.codes)
    assert torch.equal(one.grid.scale, several.grid.scale)


@pytest.mark.parametrize("name", [name for name, grid in grid_types().items() if grid.chosen])
def test_the_objective_falls_on_every_grid(name):
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))
    inputs, outputs = correlated(IN, 1), products(correlated(OUT, 2), [OUT])
    gram = Gram(IN, SERIAL)
    gram.update(inputs)
    method = Gptq(type=name, qep_alpha=0, group_size=GROUPS.get(name))
    fed, alone = (
        method.solve(weight, Statistics({"gram": gram}, outputs=given), torch.float32, SERIAL_BLOCKS).coded
        for given in (outputs, None)
    )
    assert loss(weight, fed, inputs, outputs) < 0.8 * loss(weight, alone, inputs, outputs)


def test_runs_of_outputs_cover_all_of_them():
    for outputs in (1, 1024, 1025, 5000):
        assert [row for run in chunks(outputs) for row in range(outputs)[run]] == list(range(outputs))
