"""Inputs of experts: seen without computing any expert, and those of their last matrices made of what entered them."""

from types import SimpleNamespace

import pytest
import torch

from llmcompress.engine.run.collect import collect
from llmcompress.engine.run.forward import Forward, Recording, Stream
from llmcompress.engine.run.starved_experts import ExpertGrams, lend_ranges
from llmcompress.ledger import Ledger
from llmcompress.methods.base import Statistics
from llmcompress.model.experts import Expert
from llmcompress.stats.magnitudes import Magnitudes
from llmcompress.store.staging import Staging
from llmcompress.validate.load import open_streamed
from llmcompress.workers import SERIAL

COUNT, WINDOWS, BATCH, CPU = 3, 5, 2, torch.device("cpu")
ENTER = {f"in.{e}": f"mlp.experts.{e}.gate_proj" for e in range(COUNT)}
LEAVE = {f"inner.{e}": f"mlp.experts.{e}.down_proj" for e in range(COUNT)}


@pytest.fixture
def opened(random_model_dir, tmp_path):
    """A model with experts, and the stream of a layer of it."""
    model = open_streamed(
        random_model_dir(
            "qwen3_moe", num_experts=COUNT, num_experts_per_tok=2, hidden_size=64, moe_intermediate_size=32
        ),
        dtype=torch.float32,
    )
    ids = torch.randint(10, 90, (WINDOWS, 12), generator=torch.Generator().manual_seed(0))
    staged = Staging(tmp_path / "work", {})
    hidden = staged.keep_hidden(0, torch.float32, {"compressed": iter(model.embed(ids).split(BATCH))})
    return model, hidden.streams["compressed"], staged.folder


def running(opened, layer, workers=SERIAL):
    model, hidden, folder = opened
    return Forward(model, 1, Stream("compressed", layer, hidden), BATCH, workers, Recording(folder, {}))


def by_hand(opened, layer, paths):
    """All rows that each matrix reads in whole forwards, by hooks of the test's own."""
    seen = {space: [] for space in paths}
    handles = [
        layer.get_submodule(path).register_forward_pre_hook(lambda _, args, space=space: seen[space].append(args[0]))
        for space, path in paths.items()
    ]
    list(running(opened, layer).outputs())
    for handle in handles:
        handle.remove()
    return {space: torch.cat(rows) for space, rows in seen.items()}


@torch.no_grad()
@pytest.mark.parametrize("paths", [ENTER, LEAVE], ids=["first", "last"])
def test_what_enters_experts_is_seen_and_nothing_after_it_runs(opened, paths):
    with opened[0].layer(1) as layer:
        whole = by_hand(opened, layer, paths)
        ran = []
        for name, module in layer.named_modules():
            module.register_forward_hook(lambda *_, name=name: ran.append(name))
        batches = list(running(opened, layer).inputs(paths))
        assert not any("forward" in vars(module) for module in layer.modules())
    assert len(batches) == -(-WINDOWS // BATCH)
    for space, rows in whole.items():
        assert torch.equal(torch.cat([batch[space] for batch in batches if space in batch]), rows)
    computed = {name.rpartition(".")[2] for name in ran if ".experts." in name}
    assert not {"down_proj"} & computed
    assert ("gate_proj" in computed) == (paths is LEAVE)
    assert "" not in ran, "the layer went on after its experts"


class Watched:
    """A progress that counts tokens."""

    count = 0

    def tokens(self, count):
        self.count += count


class Reads:
    """As much of a plan of a matrix as statistics ask for."""

    def __init__(self, path, width):
        self.path, self.module, self.expert, self.needs = path, path, 0, frozenset({"gram"})
        self.entry = type("Entry", (), {"in_features": width, "inputs": None})
        self.space = path


@torch.no_grad()
@pytest.mark.parametrize("threads", [1, 2])
def test_inputs_of_last_matrices_come_from_what_entered_before(opened, threads):
    """The Gram matrices are those of a whole forward with the weights as they are now, in float64."""
    with opened[0].layer(1) as layer, SERIAL.with_threads(threads) as workers:
        first = ExpertGrams("mlp.experts", ENTER, layer, running(opened, layer, workers), CPU)
        wanted = {space: [Reads(path, 64)] for space, path in ENTER.items()}
        collect(running(opened, layer, workers), None, wanted, CPU, Watched(), first)
        for expert in layer.mlp.experts:
            assert isinstance(expert, Expert)
            expert.gate_proj.weight.data.mul_(1.5)
            expert.up_proj.weight.data.mul_(0.5)
        assert first.leads_to(LEAVE.values())
        assert not first.leads_to(ENTER.values())
        one = {space: path for space, path in ENTER.items() if space == "in.1"}
        assert not ExpertGrams("mlp.experts", one, layer, running(opened, layer), CPU).leads_to(LEAVE.values())
        calls = []
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
        second = ExpertGrams("mlp.experts", LEAVE, layer, running(opened, layer, workers), CPU, first)
        watch = Watched()
        collect(
            running(opened, layer, workers), None, {s: [Reads(p, 32)] for s, p in LEAVE.items()}, CPU, watch, second
        )
        assert not calls, "no layer runs"
        assert second.watch is first.watch
        for space, rows in by_hand(opened, layer, LEAVE).items():
            gram = second.inputs.gram(space, 32, workers, CPU)
            exact = rows.double().T @ rows.double() / len(rows)
            assert gram.tokens == len(rows)
            torch.testing.assert_close(gram.mean().double(), exact, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(second.inputs.gram(space, 32, workers, CPU).mean(), gram.mean())
    assert watch.count == WINDOWS * 12 * 2


class Fixed:
    """A method whose inputs have one scale."""

    divided_inputs = False

    def input_range(self, statistics):
        return statistics.found["magnitudes"]


def test_experts_without_tokens_get_the_counts_of_those_with_tokens_once():
    """However many of them there are; counts that double with each would leave int64 behind."""
    generator = torch.Generator().manual_seed(3)
    found, needing, whole = {}, {}, Magnitudes()
    for expert in range(90):
        seen = Magnitudes()
        if expert < 20:
            x = torch.randn(50, 8, generator=generator)
            seen.update(x)
            whole.update(x)
        found[f"in.{expert}"] = Statistics({"magnitudes": seen})
        path = f"mlp.experts.{expert}.up_proj"
        needing[f"in.{expert}"] = [SimpleNamespace(path=path, module=path, expert=expert, method=Fixed())]
    ledger = Ledger()
    lend_ranges(found, needing, ledger)
    for expert in range(20, 90):
        lent = found[f"in.{expert}"].found["magnitudes"]
        assert torch.equal(lent.counts, whole.counts)
        assert lent.tokens == 20 * 50
    assert found["in.0"].found["magnitudes"].tokens == 50
    assert len(ledger.entries) == 70
