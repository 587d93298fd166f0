"""The memory model says the same bytes as when they were first checked against measured peaks (golden/memory.json).

The numbers are those beside Python and its libraries, which differ from machine to machine and are fitted anew.
"""

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from llmcompress.engine.plan import memory_model
from llmcompress.engine.plan.estimate import estimate
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.memory_model import MemoryModel, Phase, Term
from llmcompress.engine.plan.pass_memory import ModelSizes, depth_memory, fit_memory, lora_memory, width_memory
from llmcompress.engine.plan.resources import Resources
from llmcompress.engine.plan.run_memory import memory_of_run
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.source.matrix_refs import matrices_of
from llmcompress.engine.source.open import directory_headers
from llmcompress.ledger import Ledger
from llmcompress.recipe import parse
from llmcompress.validate.device_memory import validation_memory
from sizedmodels import WIDTHS, write

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "memory.json").read_text())
RESOURCES = [Resources(*values) for values in GOLDEN["resources"]]
RUNS = [(model, recipe) for model, recipes in GOLDEN["runs"].items() for recipe in recipes]


@pytest.fixture(autouse=True)
def nothing_but_the_run(monkeypatch):
    for name in ("WITH_MODEL", "WITHOUT_MODEL"):
        monkeypatch.setattr(memory_model, name, 0)


@pytest.fixture(scope="module")
def models(tmp_path_factory, random_model_dir):
    """A dense model and one of experts, by the names of the table."""
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "vocab_size": 8192,
        "num_local_experts": 8,
        "max_position_embeddings": 2048,
    }
    return {
        "small": write(tmp_path_factory.mktemp("sized") / "small", *WIDTHS["small"]),
        "mixtral": random_model_dir("mixtral", **sizes),
    }


@pytest.fixture(scope="module")
def planned(models, tmp_path_factory):
    """The plan of a model and a recipe, each made once."""

    @cache
    def make(model, recipe):
        ending = ".gguf" if GOLDEN["recipes"][recipe]["output"]["format"] == "gguf" else ""
        options = Options(out=tmp_path_factory.mktemp("planned") / f"out{ending}")
        return make_plan(parse(GOLDEN["recipes"][recipe]), models[model], options)

    return make


@pytest.mark.parametrize(("model", "recipe"), RUNS)
def test_runs_are_foreseen_to_take_what_they_did(planned, model, recipe):
    plan = planned(model, recipe)
    run_with = partial(memory_of_run, plan.headers, plan.recipe, plan.layers)
    found = [estimate(run_with(resources), 0, 0.0) for resources in RESOURCES]
    assert [[cost.memory_bytes, cost.gpu_bytes, cost.work_bytes] for cost in found] == GOLDEN["runs"][model][recipe]


@pytest.mark.parametrize("model", GOLDEN["passes"])
@pytest.mark.parametrize("length", [64, 2048])
def test_passes_are_foreseen_to_take_what_they_did(models, model, length):
    headers = directory_headers(models[model], Ledger())
    sizes = ModelSizes.of(headers, matrices_of(headers, False, Ledger()).refs, length)
    rows = max(matrix.rows for matrix in sizes.layers[0])
    found = []
    for resources in (resources for resources in RESOURCES if not resources.gpu):
        made = [depth_memory(sizes, resources, compared) for compared in (False, True)]
        for inner, width in ((rows, rows * 3 // 4), (8 * rows, rows)):
            made += [width_memory(sizes, resources, inner, width, inverse) for inverse in (False, True)]
        made += [lora_memory(sizes, resources, by_outputs) for by_outputs in (False, True)]
        made += [
            fit_memory(sizes, replace(resources, dtype="float32"), by, count, [0] * len(sizes.layers))
            for by in (False, True)
            for count in (1 << 16, 100, 1 << 22)
        ]
        found.append([memory.peak("host") for memory in made])
    assert found == GOLDEN["passes"][model][str(length)]


@pytest.mark.parametrize("model", GOLDEN["validation"])
def test_validation_is_foreseen_to_take_what_it_did(models, model):
    asked = [(windows, length) for windows in (1, 64) for length in (16, 512, 4096)]
    found = [validation_memory(models[model], None, torch.bfloat16, *shape).peak("gpu") for shape in asked]
    assert found == GOLDEN["validation"][model]


def test_the_table_asks_for_the_phases_of_a_run(planned):
    """Each is the largest for some row, so that a change of any shows; but a GPU's embedding is so for none."""
    largest = set()
    for model, recipe in RUNS:
        plan = planned(model, recipe)
        for resources in RESOURCES:
            memory = memory_of_run(plan.headers, plan.recipe, plan.layers, resources).model()
            device = "gpu" if resources.gpu else "host"
            phase = max(memory.phases, key=lambda phase: sum(t.nbytes for t in phase.terms if t.device == device))
            largest.add(f"{phase.name} on {device}")
    assert largest == {
        "largest tensor on host",
        "running on host",
        "scaling on host",
        "solving on host",
        "running on gpu",
        "solving on gpu",
    }


def test_a_peak_is_of_one_device_and_of_the_largest_phase():
    narrow = Phase("narrow", [Term("a", 5), Term("b", 7, "gpu")])
    wide = Phase("wide", [Term("c", 4), Term("d", 2)])
    memory = MemoryModel([Term("always", 100), Term("always", 1000, "gpu")], [narrow, wide])
    assert (memory.peak("host"), memory.peak("gpu")) == (106, 1007)
    assert MemoryModel([], []).peak("host") == 0


def test_what_is_pruned_alone_has_values_in_place_of_codes(planned):
    """Of bfloat16: two bytes a weight of all experts, which are decided before those after them."""
    plan = planned("mixtral", "wanda")
    run = memory_of_run(plan.headers, plan.recipe, plan.layers, RESOURCES[0])
    layer = plan.layers[0]
    weights = sum(matrix.entry.out_features * matrix.entry.in_features for matrix in layer)
    found = [term.nbytes for terms in run.solving(layer) for term in terms if term.name == "codes"]
    assert max(found) == 2 * weights
