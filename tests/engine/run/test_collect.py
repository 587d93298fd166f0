"""A statistic is one file: what a step needs by name is gathered, whatever it is."""

import sys
from types import SimpleNamespace

import pytest
import torch

from llmcompress import methods, registry, stats
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.run.collect import SpaceStatistics
from llmcompress.grids.base import INPUT_SPECS
from llmcompress.grids.inputs import foreseen
from llmcompress.recipe import parse
from llmcompress.workers import SERIAL

STATISTIC = '''
from llmcompress.stats.statistic import Statistic

class Signs:
    """How often each channel is positive, without the first token of a window."""

    def __init__(self, size):
        self.positive, self.tokens, self.dropped = 0, 0, 0

    def update(self, x):
        assert x.ndim == 3
        self.positive = self.positive + (x[:, 1:] > 0).sum(dim=(0, 1))
        self.tokens += x.shape[0] * (x.shape[1] - 1)

STATISTIC = Statistic("signs", lambda size, workers, device, part: Signs(size), by_window=True)
'''
METHOD = '''
from typing import ClassVar
from llmcompress.methods.rtn import Rtn

SEEN = []

class BySigns(Rtn):
    """Rounds to nearest, and keeps what it was told."""

    name: ClassVar[str] = "bysigns"
    summary: ClassVar[str] = "A test."

    @property
    def needs(self):
        return super().needs | {"signs"}

    def solve(self, weight, stats, scale_dtype, blocks, pruned=None):
        SEEN.append((weight.shape[1], stats.found["signs"], stats.found.keys()))
        return super().solve(weight, stats, scale_dtype, blocks, pruned)

METHOD = BySigns
'''


@pytest.fixture
def two_files(tmp_path, monkeypatch):
    """A statistic and a method that needs it, each a file that was put beside the others."""
    for package, name, text in ((stats, "signs", STATISTIC), (methods, "bysigns", METHOD)):
        folder = tmp_path / "new" / name
        folder.mkdir(parents=True)
        (folder / f"{name}.py").write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    registry.discover.cache_clear()
    yield
    registry.discover.cache_clear()
    for name in ("llmcompress.stats.signs", "llmcompress.methods.bysigns"):
        sys.modules.pop(name, None)


def test_a_statistic_in_a_file_of_its_own_reaches_the_method_that_needs_it(two_files, tiny_model_dir, tmp_path):
    data = {
        "calibration": {"source": "default", "samples": 4, "length": 32},
        "steps": [{"method": "bysigns", "bits": 4, "group_size": 32}],
        "output": {"format": "compressed-tensors"},
    }
    plan = make_plan(parse(data), tiny_model_dir, Options(out=tmp_path / "out"))
    run(plan)
    seen = sys.modules["llmcompress.methods.bysigns"].SEEN
    assert len(seen) == len({matrix.space for matrix in plan.layers[0]}) * len(plan.layers)
    for width, signs, names in seen:
        assert list(names) == ["signs"]
        assert signs.tokens == 4 * 31
        assert signs.positive.shape == (width,)
        assert bool((signs.positive > 0).any())
        assert bool(torch.all(signs.positive <= signs.tokens))


@pytest.mark.parametrize("name", ["none", "int8-token", "mxfp4", "nvfp4", "fp8-tensor"])
def test_gram_and_drift_are_of_inputs_as_matrices_will_multiply_them(name):
    inputs = INPUT_SPECS.get(name)
    entry = SimpleNamespace(in_features=64, inputs=inputs)
    plan = SimpleNamespace(entry=entry, needs=frozenset({"gram", "absmax"}))
    found = SpaceStatistics([plan], SERIAL, torch.device("cpu"), 0, paired=True)
    generator = torch.Generator().manual_seed(0)
    original = torch.randn(2, 8, 64, generator=generator) * torch.logspace(-2, 1, 64)
    x = original + 0.1 * torch.randn(2, 8, 64, generator=generator)
    found.update(x, original, 8)
    seen = x if inputs is None else foreseen(x, inputs)
    assert torch.equal(seen, x) == (name in ("none", "fp8-tensor"))
    here, there = seen.double().reshape(-1, 64), original.double().reshape(-1, 64)
    torch.testing.assert_close(found.alone["gram"].mean().double(), here.T @ here / 16, rtol=1e-5, atol=1e-5)
    drift = (there - here).T @ here / 16
    torch.testing.assert_close(found.paired["drift"].finish().double(), drift, rtol=1e-3, atol=1e-3)
    assert found.alone["absmax"].peak == x[:, 1:].abs().max()  # ranges are of what is to be rounded
