"""Statistics that one run keeps and another goes by, on the tiny trained model."""

import json
import shutil

import pytest
import torch

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_memory import memory_of_run
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.process.progress import Progress
from llmcompress.errors import LlmcompressError, PlanError, StoppedError
from llmcompress.methods.base import Statistics
from llmcompress.recipe import parse
from llmcompress.stats.gram import Gram
from llmcompress.store.statistics import all_statistics, packed_statistics, statistics_entry
from llmcompress.validate.verify import passed, verify
from llmcompress.workers import SERIAL
from tinyruns import kl

GPTQ = {"method": "gptq", "bits": 4, "group_size": 32}
PACKED = {"output": {"format": "compressed-tensors"}}
WANDA = {"method": "wanda", "sparsity": 0.5}


class Counting(Progress):
    """Counts tokens whose inputs were looked at."""

    seen = 0

    def tokens(self, count):
        self.seen += count


def carry_out(model, out, steps, stats=None, seed=0, **more):
    text = {"source": "default", "samples": 8, "length": 64, "seed": seed}
    recipe = parse({"calibration": text, "steps": steps, "output": {"format": "dense"}} | more)
    progress = Counting()
    report = run(make_plan(recipe, model, Options(out=out, stats=stats)), progress)
    return report, progress.seen


def noted(report):
    return [entry for entry in report["ledger"] if entry["kind"] == "statistics"]


@pytest.fixture(scope="module")
def first(shallow_model_dir, tmp_path_factory):
    """Statistics of a GPTQ run, and what it wrote beside."""
    folder = tmp_path_factory.mktemp("kept")
    report, seen = carry_out(shallow_model_dir, folder / "first", [GPTQ], folder / "store")
    assert seen > 0
    assert not noted(report)
    return folder


@pytest.fixture
def store(first, tmp_path):
    """A copy of those statistics."""
    return shutil.copytree(first / "store", tmp_path / "store")


def test_other_bits_and_methods_go_by_kept_statistics_without_running_text(shallow_model_dir, tmp_path, store, windows):
    three = [{**GPTQ, "bits": 3}]
    report, seen = carry_out(shallow_model_dir, tmp_path / "reused", three, store)
    assert seen == 0
    assert len(noted(report)) == 1
    assert "gptq w4" in noted(report)[0]["why"]
    assert passed(verify(tmp_path / "reused", shallow_model_dir))
    carry_out(shallow_model_dir, tmp_path / "own", three)
    carry_out(shallow_model_dir, tmp_path / "rtn", [{"method": "rtn", "bits": 3, "group_size": 32}])
    losses = [kl(tmp_path / name, shallow_model_dir, windows) for name in ("own", "reused", "rtn")]
    assert losses[1] < 1.3 * losses[0]
    assert losses[1] < 0.75 * losses[2]
    report, seen = carry_out(shallow_model_dir, tmp_path / "wanda", [WANDA], store)
    assert seen == 0
    assert {record["sparsity"] for record in report["linears"]} == {0.5}


def test_keeping_changes_nothing_and_the_same_run_gives_the_same_bytes(shallow_model_dir, tmp_path, first, store):
    carry_out(shallow_model_dir, tmp_path / "other", [{**GPTQ, "bits": 3}], store)
    _, seen = carry_out(shallow_model_dir, tmp_path / "again", [GPTQ], store)
    assert seen > 0
    carry_out(shallow_model_dir, tmp_path / "without", [GPTQ])
    places = (first / "first", tmp_path / "again", tmp_path / "without")
    one, again, without = ((folder / "model.safetensors").read_bytes() for folder in places)
    assert one == again == without


@pytest.mark.parametrize(
    ("steps", "more"),
    [
        ([GPTQ], {"seed": 1}),
        ([{"method": "rotate"}, {**GPTQ, "bits": 3}], {}),
        (
            [{**GPTQ, "bits": 8, "group_size": -1, "activations": "int8-tensor"}],
            {"output": {"format": "compressed-tensors"}},
        ),
        ([{**WANDA, "allocation": "owl"}], {}),
        (
            [{**GPTQ, "bits": 8}],
            {"kv_cache": {"code": "fp8"}, **PACKED},
        ),
    ],
    ids=["other text", "other inputs", "ranges", "owl", "keys and values"],
)
def test_what_a_store_does_not_hold_is_gathered(shallow_model_dir, tmp_path, store, steps, more):
    report, seen = carry_out(shallow_model_dir, tmp_path / "out", steps, store, **more)
    assert seen > 0
    assert not noted(report)


def test_squares_alone_do_for_wanda_and_not_for_gptq(shallow_model_dir, tmp_path):
    store = tmp_path / "store"
    _, seen = carry_out(shallow_model_dir, tmp_path / "a", [WANDA], store)
    assert seen > 0
    _, seen = carry_out(shallow_model_dir, tmp_path / "b", [{**WANDA, "sparsity": 0.6}], store)
    assert seen == 0
    _, seen = carry_out(shallow_model_dir, tmp_path / "c", [GPTQ], store)
    assert seen > 0


def test_a_matrix_that_needs_more_than_its_neighbours_is_not_forgotten(shallow_model_dir, tmp_path):
    """Of matrices that read one input the first needs the Gram matrix, which those that keep squares did not store."""
    rtn, stats = {"method": "rtn", "bits": 4, "group_size": 32}, tmp_path / "store"
    carry_out(shallow_model_dir, tmp_path / "first", [WANDA, rtn], stats)
    steps = [WANDA, {**rtn, "set": {"q_proj": {"clip": "output"}}}]
    carry_out(shallow_model_dir, tmp_path / "kept", steps, stats)
    carry_out(shallow_model_dir, tmp_path / "alone", steps)
    kept, alone = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("kept", "alone"))
    assert kept == alone


def test_a_damaged_store_is_named(shallow_model_dir, tmp_path, store):
    file = next(store.glob("*/layer-00001.safetensors"))
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(LlmcompressError, match=r"layer-00001.safetensors is damaged"):
        carry_out(shallow_model_dir, tmp_path / "out", [{**GPTQ, "bits": 3}], store)
    file.unlink()
    _, seen = carry_out(shallow_model_dir, tmp_path / "out", [{**GPTQ, "bits": 3}], store)
    assert seen > 0  # measured anew
    about = next(store.glob("*/about.json"))
    about.write_text("{")
    with pytest.raises(PlanError, match=r"about.json is damaged"):
        carry_out(shallow_model_dir, tmp_path / "out2", [{**GPTQ, "bits": 2}], store)


def test_stores_are_listed_and_pruned(main, capsys, store, tmp_path):
    assert main("stats", "list", store, "--json") == 0
    (fact,) = json.loads(capsys.readouterr().out)
    assert fact["steps"] == ["gptq w4"]
    assert fact["complete"]
    assert fact["bytes"] > 100_000
    assert main("stats", "list", store) == 0
    assert fact["key"] in capsys.readouterr().out
    assert main("stats", "prune", store) == 2
    assert main("stats", "prune", store, "nothing") == 2
    assert main("stats", "prune", store, "--incomplete", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"removed": [], "bytes": 0}
    filled = statistics_entry(store, {"model": "other", "transforms": [], "tokens": "none", "layers": 1})
    assert main("stats", "prune", store, "--incomplete") == 2
    assert "is filled by" in capsys.readouterr().err
    filled.folder.close()
    assert main("stats", "prune", store, "--incomplete") == 0
    assert main("stats", "prune", store, fact["key"]) == 0
    assert list(store.iterdir()) == []
    assert main("stats", "list", tmp_path / "nowhere") == 2


def test_a_run_goes_on_by_the_statistics_that_it_began_with(shallow_model_dir, tmp_path, store):
    three = parse(
        {
            "calibration": {"source": "default", "samples": 8, "length": 64, "seed": 0},
            "steps": [{**GPTQ, "bits": 3}],
            "output": {"format": "dense"},
        }
    )
    plan = make_plan(three, shallow_model_dir, Options(out=tmp_path / "out", stats=store))
    with pytest.raises(StoppedError):
        run(plan, stop=lambda finished: True)
    (known,) = all_statistics(store)
    others = ({**known.about, "options": [number]} for number in range(100))
    kept = next(
        kept for about in others if (kept := statistics_entry(tmp_path / "other", about)) and kept.key < known.key
    )
    for number in range(known.about["layers"]):  # as another run of the model on the text would
        kept.write(number, known.tensors(number))
    shutil.move(kept.path, store / kept.key)
    report = run(make_plan(three, shallow_model_dir, Options(out=tmp_path / "out", stats=store)))
    assert [entry["subject"] for entry in noted(report)] == [known.key]


def test_the_plan_counts_what_is_kept_of_a_layer(shallow_model_dir, tmp_path, store):
    made = parse({"calibration": {"source": "default"}, "steps": [GPTQ], "output": {"format": "dense"}})
    estimates = [
        make_plan(made, shallow_model_dir, Options(out=tmp_path / "out", stats=stats)) for stats in (None, store)
    ]
    held = [
        {
            term.name: term.nbytes
            for term in memory_of_run(plan.headers, made, plan.layers, plan.resources).loaded(layer)
        }
        for plan in estimates
        for layer in plan.layers[:1]
    ]
    (known,) = all_statistics(store)
    assert "statistics to keep" not in held[0]
    assert held[1]["statistics to keep"] == pytest.approx(sum(t.nbytes for t in known.tensors(0).values()), rel=0.02)
    assert estimates[1].estimate.memory_bytes > estimates[0].estimate.memory_bytes


def test_what_few_tokens_borrowed_is_kept_too(tmp_path):
    """The share by which correlations are trusted goes by it."""
    gram = Gram(4, SERIAL)
    gram.update(torch.randn(10, 4, generator=torch.Generator().manual_seed(0)))
    gram.shrink_towards(torch.eye(4), 0.1)  # which float32 does not hold
    entry = statistics_entry(tmp_path, {"layers": 1})
    entry.write(0, packed_statistics({"in": Statistics({"gram": gram})}))
    read = entry.read(0, "in", torch.device("cpu")).gram
    assert (read.tokens, read.trusted) == (gram.tokens, gram.trusted) == (10, 10.1)
    assert torch.equal(read.mean(), gram.mean())
