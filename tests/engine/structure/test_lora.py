"""Adapters of low rank: solved on what the compressed model sees, read back by `eval`, refused where unfit."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.structure.lora import repair
from llmcompress.engine.structure.lora_plan import plan_lora
from llmcompress.errors import CheckpointError, PlanError
from llmcompress.recipe import Calibration, build, parse
from llmcompress.store.adapter import Adapter
from llmcompress.validate.load import load_whole
from llmcompress.validate.session import Request, evaluate_paths

SAMPLES, LENGTH, RANK = 6, 40, 4
HEAD = "base_model.model."


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    tokens = torch.randint(2, 90, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    file = tmp_path_factory.mktemp("ids") / "ids.safetensors"
    save_file({"input_ids": tokens}, file)
    return file, tokens


def compress(model, out, *steps, form="gptq"):
    steps = steps or ({"method": "rtn", "bits": 3, "group_size": 16},)
    run(make_plan(parse({"steps": list(steps), "output": {"format": form}}), model, Options(out=out)))
    return out


def lora(model, compressed, out, ids, rank=RANK, by="outputs", threads=1, overwrite=False):
    text = build(Calibration, {"source": str(ids), "samples": SAMPLES, "length": LENGTH}, "here")
    options = Options(out=out, compute_dtype="float32", threads=threads, overwrite=overwrite)
    return repair(plan_lora(model, compressed, rank, by, text, options))


def products(path):
    """What is added to each module, float64 [out, in]."""
    found = load_file(path / "adapter_model.safetensors")
    names = [name.removesuffix(".lora_A.weight") for name in found if name.endswith(".lora_A.weight")]
    return {
        name.removeprefix(HEAD): found[f"{name}.lora_B.weight"].double() @ found[f"{name}.lora_A.weight"].double()
        for name in names
    }


def matrix(module):
    return module.weight.data.T if isinstance(module, Conv1D) else module.weight.data


def whole(path):
    return load_whole(path, dtype=torch.float32, linear=None)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "opt"])
def test_every_matrix_is_repaired_as_well_as_that_rank_can(family, random_model_dir, ids, tmp_path):
    """The residual is the tail of the singular values of D H^(1/2), H of the compressed model repaired so far."""
    file, tokens = ids
    model = random_model_dir(family, dtype="float32")
    compressed = compress(model, tmp_path / "c", form="dense")
    report = lora(model, compressed, tmp_path / "a", file)
    added = products(tmp_path / "a")
    original, repaired = whole(model), whole(compressed)
    for module, product in added.items():  # all at once: the inputs of each are those of the repaired ones before
        target = repaired.get_submodule(module)
        weight = target.weight.data
        weight += product.float().T if isinstance(target, Conv1D) else product.float()
    assert len(added) == len(report["lora"]["matrices"])
    records = {item["name"].rpartition("layers.")[2]: item for item in report["lora"]["matrices"]}
    for module, product in added.items():
        x = inputs(repaired, module, tokens).double()
        weight = matrix(original.get_submodule(module)).double()
        delta = weight - (matrix(repaired.get_submodule(module)).double() - product)
        values = torch.linalg.svdvals(delta @ x.T).square()
        energy = (weight @ x.T).square().sum()
        record = next(item for name, item in records.items() if module.endswith(name.removeprefix("transformer.")))
        assert record["before"] == pytest.approx(float(values.sum() / energy), rel=1e-3)
        assert record["after"] == pytest.approx(float(values[RANK:].sum() / energy), rel=1e-3)
        assert float(((delta - product) @ x.T).square().sum()) == pytest.approx(float(values[RANK:].sum()), rel=1e-3)


@torch.no_grad()
def inputs(model, path, tokens):
    seen = []
    handle = model.get_submodule(path).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(tokens, use_cache=False)
    handle.remove()
    return torch.cat(seen).reshape(-1, seen[0].shape[-1])


def figures(model, ref, adapter=None):
    request = Request(model, ref, "default", 64, 8, 4, "cpu", "float32", adapter=adapter)
    return evaluate_paths(request, lambda done, of: None)


@pytest.fixture(scope="module")
def three_bits(tiny_model_dir, tmp_path_factory):
    step = {"method": "rtn", "bits": 3, "group_size": 64}
    return compress(tiny_model_dir, tmp_path_factory.mktemp("three") / "bits", step)


@pytest.fixture(scope="module")
def adapter(tiny_model_dir, three_bits, tmp_path_factory):
    out = tmp_path_factory.mktemp("adapter") / "lora"
    text = build(Calibration, {"samples": 32, "length": 64}, "here")
    repair(plan_lora(tiny_model_dir, three_bits, 16, "outputs", text, Options(out=out, compute_dtype="float32")))
    return out


def test_outputs_come_nearer_than_by_the_plain_svd(tiny_model_dir, three_bits, adapter, tmp_path, main):
    plain = tmp_path / "svd"
    assert main("lora", tiny_model_dir, three_bits, "-o", plain, "--rank", 16, "--by", "weights", "-q") == 0
    before = figures(three_bits, tiny_model_dir)["kl"]
    svd, lora = (figures(three_bits, tiny_model_dir, path)["kl"] for path in (plain, adapter))
    assert lora < 0.5 * svd < 0.5 * before


def test_evaluating_with_an_adapter_is_evaluating_the_sum(tiny_model_dir, three_bits, adapter, tmp_path):
    merged = tmp_path / "merged"
    shutil.copytree(tiny_model_dir, merged)
    causal, added = whole(three_bits), products(adapter)
    weights = load_file(merged / "model.safetensors")
    for module, product in added.items():
        weights[f"{module}.weight"] = matrix(causal.get_submodule(module)) + product.float()
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    assert figures(three_bits, tiny_model_dir, adapter)["kl"] == pytest.approx(
        figures(merged, tiny_model_dir)["kl"], rel=1e-3
    )


def test_the_config_says_what_peft_asks_for_and_no_path(three_bits, adapter):
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == three_bits.name
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 16, 16)
    leaves = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["target_modules"] == leaves
    assert all(str(three_bits.parent) not in file.read_text(errors="replace") for file in adapter.iterdir())
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert len(tensors) == 2 * 4 * 7
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    report = json.loads((adapter / "report.json").read_text())
    weights = sum(item["shape"][0] * item["shape"][1] for item in report["lora"]["matrices"])
    bits = 8 * sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()) / weights
    assert report["lora"]["bits_per_weight_added"] == pytest.approx(bits, abs=1e-3)


def test_what_was_not_compressed_is_left_alone(random_model_dir, ids, tmp_path):
    model = random_model_dir("llama")
    step = {
        "method": "rtn",
        "bits": 3,
        "group_size": 16,
        "set": {"layers.0.*": {"skip": True}, "*.q_proj": {"skip": True}},
    }
    report = lora(model, compress(model, tmp_path / "c", step), tmp_path / "a", ids[0])
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert all(name.startswith("model.layers.1.") for name in config["target_modules"])
    assert len(config["target_modules"]) == len(report["lora"]["matrices"]) == 6
    assert sum(entry["kind"] == "unrepaired" for entry in report["ledger"]) == 8


@pytest.mark.parametrize(("family", "form"), [("mixtral", "dense"), ("granitemoe", "compressed-tensors")])
def test_experts_are_left_alone_and_told(family, form, random_model_dir, ids, tmp_path):
    """Those of a GraniteMoE are one tensor of the source, and one by one in what was compressed."""
    model = random_model_dir(family)
    report = lora(model, compress(model, tmp_path / "c", form=form), tmp_path / "a", ids[0])
    assert {item["name"].rpartition(".")[2] for item in report["lora"]["matrices"]} == {
        "q_proj", "k_proj", "v_proj", "o_proj",
    }  # fmt: skip
    assert any(entry["kind"] == "unrepaired" and "experts" in entry["why"] for entry in report["ledger"])


def test_inputs_that_a_runtime_rounds_are_rounded_here(random_model_dir, ids, tmp_path):
    file, tokens = ids
    model = random_model_dir("llama", dtype="float32")
    step = {"method": "rtn", "bits": 8, "group_size": -1, "activations": "int8-token"}
    compressed = compress(model, tmp_path / "c", step, form="compressed-tensors")
    report = lora(model, compressed, tmp_path / "a", file)
    path = "model.layers.0.self_attn.q_proj"
    x = inputs(whole(compressed), path, tokens).double()  # a hook behind that which rounds
    assert not torch.equal(x, inputs(whole(model), path, tokens).double())
    weight = matrix(whole(model).get_submodule(path)).double()
    delta = weight - matrix(whole(compressed).get_submodule(path)).double()
    values, energy = torch.linalg.svdvals(delta @ x.T).square(), (weight @ x.T).square().sum()
    [record] = [item for item in report["lora"]["matrices"] if item["name"] == path]
    assert record["after"] == pytest.approx(float(values[RANK:].sum() / energy), rel=1e-4)


def test_bytes_do_not_depend_on_threads_and_an_adapter_is_replaced(random_model_dir, ids, tmp_path):
    model, made = random_model_dir("llama"), []
    compressed = compress(model, tmp_path / "c")
    for threads in (1, 2):
        lora(model, compressed, tmp_path / "a", ids[0], threads=threads, overwrite=True)
        made.append({file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()})
    assert made[0] == made[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]


# ---- what is refused ----


def test_an_adapter_without_a_base_is_told_as_such(main, tiny_model_dir, adapter, tmp_path, capsys):
    for command in (
        ["eval", adapter],
        ["lora", tiny_model_dir, adapter, "-o", tmp_path / "out"],
        ["rtn", adapter, "-o", tmp_path / "out"],
        ["eval", tiny_model_dir, "--ref", adapter],
    ):
        assert main(*command) == 2
        assert "is an adapter without its base model" in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_an_adapter_of_another_model_is_refused(main, tiny_model_dir, three_bits, adapter, tmp_path, capsys):
    other = compress(tiny_model_dir, tmp_path / "other", {"method": "rtn", "bits": 3, "group_size": 32})
    assert main("eval", other, "--adapter", adapter) == 2
    assert "report.json names other weights" in " ".join(capsys.readouterr().err.split())
    bare = tmp_path / "bare"
    shutil.copytree(adapter, bare)
    (bare / "report.json").unlink()
    narrow = tmp_path / "narrow"
    assert main("width", tiny_model_dir, "-o", narrow, "--ratio", 0.5, "--samples", 8, "--length", 64, "-q") == 0
    shallow = tmp_path / "shallow"
    depth = ["--drop", 1, "--keep-first", 0, "--samples", 2, "--length", 32, "-q"]
    assert main("depth", tiny_model_dir, "-o", shallow, *depth) == 0
    for model, words in ((narrow, "is not 256 x 512"), (shallow, "layers.3")):
        capsys.readouterr()
        assert main("eval", model, "--adapter", bare) == 2
        shown = " ".join(capsys.readouterr().err.split())
        assert "is of another model" in shown
        assert words in shown
        assert main("lora", tiny_model_dir, model, "-o", tmp_path / "out") == 2
        assert "was not made from" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_what_was_transformed_is_refused(tiny_model_dir, tmp_path, ids):
    steps = {"method": "rotate"}, {"method": "rtn", "bits": 3, "group_size": 64}
    rotated = compress(tiny_model_dir, tmp_path / "c", *steps, form="dense")
    with pytest.raises(PlanError, match="was transformed by rotate"):
        lora(tiny_model_dir, rotated, tmp_path / "a", ids[0])
    (rotated / "report.json").unlink()
    with pytest.raises(CheckpointError, match="differs, so more was done"):
        lora(tiny_model_dir, rotated, tmp_path / "a", ids[0])
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--rank", 256], "--rank 256 is no low rank"), (["--rank", 4, "-o", "model"], "already exists")],
)
def test_what_cannot_be_is_refused_in_one_line(
    main, tiny_model_dir, three_bits, tmp_path, monkeypatch, capsys, options, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert main("lora", tiny_model_dir, three_bits, *options) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_same_model_twice_leaves_nothing_to_repair(tiny_model_dir, tmp_path, ids):
    with pytest.raises(PlanError, match="there is nothing to repair"):
        lora(tiny_model_dir, tiny_model_dir, tmp_path / "a", ids[0])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "lacks its lora_magnitude_vector"),
        ({"r": None}, "does not say r and lora_alpha"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"r": 8}, "has lora_A of 16 rows and lora_B of 16 columns, r is 8"),
    ],
)
def test_adapters_of_other_kinds_are_refused(change, words, three_bits, adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "other")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (tmp_path / "other" / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=words):
        figures(three_bits, None, tmp_path / "other")


def test_a_scaling_that_is_not_one_counts(adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "other")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (tmp_path / "other" / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 8}))
    one, half = Adapter(adapter), Adapter(tmp_path / "other")
    torch.testing.assert_close(half.read(half.corrections[3])[0], one.read(one.corrections[3])[0] / 2)
