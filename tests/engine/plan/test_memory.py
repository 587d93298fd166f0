"""The plan's memory is a contract: within 10% of what is measured, and a limit is kept."""

import json

import pytest
import torch

from llmcompress.calib.pack import save
from sizedmodels import WIDTHS, call, write

IDS = "token ids of the model"
CALIBRATED = ["--calibration", IDS, "--samples", "10", "--length", "512"]
GROUPS = ["--group-size", "64", *CALIBRATED]
RECIPES = {  # each with the models that it is run on, and a number of threads
    "gptq": (WIDTHS, 2, ["gptq", *GROUPS]),
    "symmetric calibration, 3 bits": (
        ["smollm2"],
        1,
        ["gptq", *GROUPS, "--bits", 3, "--qep-alpha", 0, "--format", "gptq"],
    ),
    "plain, group order": (["small"], 2, ["gptq", *GROUPS, "--descent", 0, "--actorder", "group", "--format", "gptq"]),
    "guided": (["smollm2"], 2, ["gptq", *GROUPS, "--guided"]),
    "recovered": (["smollm2"], 2, ["gptq", *GROUPS, "--recover", "block", "--samples", "32", "--length", "256"]),
    "rtn": (["small"], 1, ["rtn", *GROUPS]),
    "rtn by outputs, awq": (["smollm2"], 1, ["rtn", *GROUPS, "--clip", "output", "--asym", "--format", "awq"]),
    "rtn, scales of keys and values": (["small"], 1, ["rtn", *GROUPS, "--kv-cache", "fp8"]),
    "magnitude": (["small"], 1, ["magnitude", "--sparsity", 0.5]),
    "awq": (["smollm2"], 2, ["awq", *GROUPS]),
    "rotate": (["smollm2"], 1, ["rotate"]),
    "gguf": (["small"], 2, ["gguf", "--type", "Q4_K_M"]),
    "gguf, calibrated": (["small", "wide"], 2, ["gguf", "--type", "Q4_K_M", *CALIBRATED]),
}
KINDS = ("*.safetensors", "*.safetensors.index.json", "*.gguf")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three random models of real widths and two layers, the widest of one, and token ids for each."""
    folder = tmp_path_factory.mktemp("models")
    return {name: write(folder / name, *widths, layers=1 + (name != "wide")) for name, widths in WIDTHS.items()}


@pytest.fixture
def plan(main, capsys):
    """plan(*arguments): in this process, as one of its own takes longer than the runs of some."""

    def made(*arguments):
        assert main("plan", *arguments, "--json") == 0
        return json.loads(capsys.readouterr().out)

    return made


def arguments_for(model, recipe, *more):
    ids = str(model.with_suffix(".ids.safetensors"))
    return [*(ids if word == IDS else word for word in recipe), model, *more]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "name"), [(recipe, name) for recipe in RECIPES for name in RECIPES[recipe][0]])
def test_peak_memory_is_within_a_tenth_of_the_plan(models, tmp_path, plan, name, recipe):
    _, threads, command = RECIPES[recipe]
    arguments = arguments_for(models[name], command, "--threads", threads, "-o", tmp_path / "out")
    expected = plan(*arguments)
    done = call(*arguments)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)["peak_memory_bytes"]
    # systems that take unused pages away measure less of a peak, most of one that is late, as the head's gradients are
    most = 1.35 if recipe == "guided" else 1.2
    assert 0.9 * measured < expected["memory_bytes"] < most * measured
    weights = sum(file.stat().st_size for kind in KINDS for file in (tmp_path / "out").glob(kind))
    assert expected["output_bytes"] == weights


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_a_head_of_many_rows_takes_little_more_than_itself(tmp_path, plan, threads):
    hidden, inner, heads, pairs, _ = WIDTHS["small"]
    rows = 131072
    model = write(tmp_path / "tall", hidden, inner, heads, pairs, rows, tied=False)
    head = ["--head-bits", "6", "--threads", threads, "-o", tmp_path / "out"]
    arguments = arguments_for(model, ["gptq", *GROUPS], *head)
    planned = plan(*arguments)["memory_bytes"]
    done = call(*arguments)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)["peak_memory_bytes"]
    # a tenth more again on processors whose libraries keep smaller buffers
    assert 0.9 * measured < planned < 1.25 * measured
    assert planned < 0.4e9 + 8 * rows * hidden  # a float32 copy of the head and its corrected target would be that much


@pytest.mark.slow
def test_a_limit_is_kept_by_fewer_threads_and_smaller_batches(models, tmp_path, plan):
    arguments = arguments_for(models["smollm2"], ["gptq", *GROUPS], "-o", tmp_path / "out", "--batch", 8)
    free = plan(*arguments, "--threads", 4)["memory_bytes"]
    arguments = arguments_for(models["smollm2"], ["gptq", *GROUPS], "-o", tmp_path / "out")
    limit = 0.69e9
    assert free > limit
    assert plan(*arguments, "--max-memory", limit / 1e9)["memory_bytes"] <= limit
    done = call(*arguments, "--max-memory", limit / 1e9)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak_memory_bytes"] <= limit


@pytest.mark.slow
def test_gram_matrices_of_experts_are_never_in_memory_together(random_model_dir, tmp_path, plan):
    experts, width = 96, 1024
    sizes = {
        "hidden_size": width,
        "num_experts": experts,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 1,
        "max_position_embeddings": 512,
    }
    model = random_model_dir("qwen3_moe", **sizes)
    save(torch.randint(3, 96, (8, 512), generator=torch.Generator().manual_seed(0)), tmp_path / "ids.safetensors")
    text = ["--calibration", tmp_path / "ids.safetensors", "--samples", 8, "--length", 512, "--group-size", 32]
    arguments = ["gptq", model, *text, "--threads", 2, "-o", tmp_path / "out"]
    planned = plan(*arguments)["memory_bytes"]
    done = call(*arguments, "--max-memory", planned * 1.1 / 1e9)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)["peak_memory_bytes"]
    assert measured == pytest.approx(planned, rel=0.1)
    nothing = 0.37e9  # of a process that factorises matrices on two threads
    assert measured - nothing < experts * 4 * width**2 / 2


@pytest.mark.slow
def test_experts_that_do_not_fit_together_are_read_for_every_product(random_model_dir, tmp_path, plan):
    width, experts = 512, 64
    sizes = {"hidden_size": width, "num_experts": experts, "moe_intermediate_size": width, "num_hidden_layers": 1}
    model = random_model_dir("qwen3_moe", max_position_embeddings=512, **sizes)
    save(torch.randint(3, 96, (4, 512), generator=torch.Generator().manual_seed(0)), tmp_path / "ids.safetensors")
    text = ["--calibration", tmp_path / "ids.safetensors", "--samples", 4, "--length", 512, "--group-size", 32]
    arguments = ["gptq", model, *text, "--threads", 2, "--batch", 1]
    planned, measured = [], []
    for name in ("held", "read"):
        limits = [] if not planned else ["--max-memory", 1.09 * planned[0] / 1e9]  # a tenth more has to fit
        command = [*arguments, "-o", tmp_path / name, *limits]
        planned.append(plan(*command)["memory_bytes"])
        done = call(*command)
        assert done.returncode == 0, done.stderr
        measured.append(json.loads(done.stdout)["peak_memory_bytes"])
    assert measured == pytest.approx(planned, rel=0.1)
    assert measured[0] - measured[1] > 3 * width**2 * experts  # bytes: a layer takes two or four for each weight
    held, read = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("held", "read"))
    assert held == read


def test_too_little_memory_is_refused_at_once(main, capsys, tiny_model_dir, tmp_path):
    command = ["gptq", tiny_model_dir, "-o", tmp_path / "out", "--max-memory", "0.1", "--samples", 4, "--length", 32]
    assert main(*command) == 2
    said = capsys.readouterr().err
    assert "--max-memory allows 0.10" in said
    assert len(said.strip().splitlines()) == 2
    assert list(tmp_path.iterdir()) == []
