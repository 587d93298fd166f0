"""Checkpoints with rounded inputs: what runs is what their codes say, what is measured includes it, damage shows."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import LlmcompressError, PlanError
from llmcompress.grids.base import INPUT_SPECS
from llmcompress.grids.coded import Coded
from llmcompress.grids.fitting import fit
from llmcompress.grids.float8 import Float8Spec
from llmcompress.grids.inputs import InputGrid
from llmcompress.grids.integer import IntegerSpec
from llmcompress.recipe import parse
from llmcompress.validate.evaluate import measure
from llmcompress.validate.load import load_whole, open_streamed
from llmcompress.validate.packed import PackedLinear
from llmcompress.validate.verify import passed, verify

IDS = torch.randint(3, 90, (4, 16), generator=torch.Generator().manual_seed(0))
STATIC = {"bits": 8, "group_size": -1, "activations": "int8-tensor", "activation_clip": "absmax"}


def compress(model, out, ids, format_="compressed-tensors", method="rtn", **options):
    recipe = {
        "calibration": {"source": str(ids), "samples": 4, "length": 16},
        "steps": [{"method": method, **options}],
        "output": {"format": format_},
    }
    return run(make_plan(parse(recipe), model, Options(out=out)))


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    path = tmp_path_factory.mktemp("ids") / "ids.safetensors"
    save_file({"input_ids": IDS}, path)
    return path


@pytest.mark.parametrize(
    ("spec", "inputs", "kernel"),
    [
        (IntegerSpec(8, -1), "int8-token", "int8-int8"),
        (IntegerSpec(8, -1), "int8-tensor", "int8-int8"),
        (IntegerSpec(4, 32), "int8-token", "int4"),
        (Float8Spec(), "fp8-token", "decode"),
        (Float8Spec(), "fp8-tensor", "decode"),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_packed_products_match_rounded_inputs_times_the_decoded_matrix(spec, inputs, kernel, bias):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(48, 64, generator=generator) * 0.1
    grid = fit(weight, spec)
    coded = Coded(grid.encode(weight), grid)
    b = torch.randn(48, generator=generator) if bias else None
    x = torch.randn(3, 5, 64, generator=generator)
    kind = INPUT_SPECS[inputs]
    rounding = InputGrid(kind, None if kind.dynamic else torch.tensor([0.02]))
    linear = PackedLinear(coded, b, torch.float32, rounding)
    assert linear.kernel == kernel
    seen = rounding.rounded(x).double()
    assert (seen - x).abs().max() > 1e-3
    expected = seen @ coded.decode().double().T + (0 if b is None else b.double())
    bound = 1e-5 * (seen.abs() @ coded.decode().abs().double().T + 1)
    assert ((linear(x).double() - expected).abs() <= bound).all()
    x[1, 2, 3] = torch.nan
    y = linear(x)
    assert y[1, 2].isnan().all()
    assert y.isnan().sum() == 48


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"bits": 8, "group_size": -1, "activations": "int8-token"}),
        ("llama", STATIC),
        ("llama", {**STATIC, "activation_clip": "percentile", "activation_percentile": 99}),
        ("qwen2", {"type": "fp8", "bits": 8, "activations": "fp8-token"}),
        ("llama", {"type": "fp8", "bits": 8, "activations": "fp8-tensor", "activation_clip": "mse"}),
        ("llama", {"type": "mxfp8", "activations": "mxfp8"}),
        ("llama", {"type": "mxfp4", "activations": "mxfp4"}),
        ("qwen2", {"method": "gptq", "type": "nvfp4", "activations": "nvfp4"}),
        ("mixtral", {"type": "nvfp4", "activations": "nvfp4"}),
        ("llama", {"method": "gptq", **STATIC}),
        ("llama", {"method": "gptq", "type": "fp8", "bits": 8, "activations": "fp8-token"}),
        ("llama", {"bits": 4, "group_size": 32, "activations": "int8-token", "set": {"down_proj": {"bits": 2}}}),
        ("opt", STATIC),
        ("mixtral", STATIC),
        (
            "phi3",
            {"bits": 8, "group_size": -1, "activations": "int8-token", "set": {"o_proj": {"activations": "none"}}},
        ),
    ],
)
def test_what_is_written_runs_rounds_its_inputs_and_verifies(random_model_dir, tmp_path, ids, family, options):
    model, out = random_model_dir(family), tmp_path / "out"
    report = compress(model, out, ids, **options)
    assert passed(verify(out, model)), [check for check in verify(out, model) if not check.ok]
    streamed, reference = open_streamed(out, dtype=torch.float32), open_streamed(model, dtype=torch.float32)
    states = streamed.embed(IDS)
    for number in range(len(streamed.layers)):
        with streamed.layer(number) as layer, torch.no_grad():
            states = streamed.call(number, layer, states)
    with streamed.outer(embed=False, head=True) as causal, torch.no_grad():
        again = streamed.logits(causal, states)
        packed = load_whole(out, dtype=torch.float32)(IDS, use_cache=False).logits
        original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(IDS, use_cache=False).logits
    off = float((again - original).abs().mean())
    assert off > 0
    # where a value lies between two codes, sums in another order send it to either, and later layers see that
    assert float((packed - again).abs().mean()) < 0.3 * off
    rounded = float(measure(streamed, reference, IDS).kl.mean())
    none = {key: value for key, value in options.items() if not key.startswith("activation")}
    none.pop("set", None)
    compress(model, tmp_path / "weights", ids, "dense", **none)
    weights = float(measure(open_streamed(tmp_path / "weights", dtype=torch.float32), reference, IDS).kl.mean())
    if "set" not in options:
        assert rounded > 1.1 * weights  # what is measured is not the loss of the weights alone
    assert {record.get("inputs") for record in report["linears"]} >= {options["activations"]}


def test_matrices_that_read_one_input_have_one_scale_and_first_tokens_are_left_out(random_model_dir, tmp_path, ids):
    model = random_model_dir("llama")
    report = compress(model, tmp_path / "out", ids, **STATIC)
    scales = {record["name"]: record["input_scale"] for record in report["linears"]}
    first = "model.layers.0."
    for members in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        assert len({value for name, value in scales.items() if name.startswith(first) and name.endswith(members)}) == 1
    seen = {}
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    original.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
    with torch.no_grad():
        original(IDS)
    expected = float(seen["x"][:, 1:].abs().max()) / 127.5
    assert scales["model.layers.0.self_attn.q_proj"] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_what_engines_run_as_one_has_one_divisor_of_inputs_which_holds_all_that_was_seen(
    family, random_model_dir, tmp_path, ids
):
    model, out = random_model_dir(family), tmp_path / "out"
    compress(model, out, ids, type="nvfp4", activations="nvfp4")
    tensors = load_file(out / "model.safetensors")
    divisors = {name: float(part) for name, part in tensors.items() if name.endswith("input_global_scale")}
    first = {name: value for name, value in divisors.items() if "layers.0." in name}
    wide = ("gate_proj", "up_proj", "w1", "w3")  # of all experts
    for members in (("q_proj", "k_proj", "v_proj"), wide, ("w2", "down_proj")):
        found = [value for name, value in first.items() if name.rpartition(".")[0].endswith(members)]
        assert len(set(found)) == 1
        assert len(found) > (members[0] != "w2" or family == "mixtral")
    seen = {}
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    original.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
    with torch.no_grad():
        original(IDS)
    attention = next(value for name, value in first.items() if "q_proj" in name)
    assert attention == pytest.approx(448 * 6 / float(seen["x"].abs().max()), rel=0.02)
    name = next(name for name in divisors if name.endswith("k_proj.input_global_scale"))
    for wrong in (tensors[name] * 2, tensors[name] * 0, None):
        damaged = {**tensors, name: wrong} if wrong is not None else {k: v for k, v in tensors.items() if k != name}
        save_file(damaged, out / "model.safetensors", {"format": "pt"})
        checks = verify(out, model)
        assert not passed(checks)
        said = ("different global scales", "not a positive number", "has no input_global_scale")
        assert any(words in check.detail for check in checks for words in said)


def test_options_that_ask_for_two_scales_of_one_input_are_refused(random_model_dir, tmp_path, ids):
    step = {**STATIC, "set": {"k_proj": {"activation_clip": "mse"}}}
    with pytest.raises(PlanError, match="read one input"):
        compress(random_model_dir("llama"), tmp_path / "out", ids, **step)


def test_options_that_would_part_matrices_that_share_a_factor_are_refused(random_model_dir, tmp_path, ids):
    """Engines keep one factor of gate and up, and read the other matrix wrongly; down shares its factor with none."""
    step = {"type": "nvfp4", "set": {"up_proj": {"clip": "minmax"}}}
    with pytest.raises(PlanError, match="up_proj share the factor of nvfp4"):
        compress(random_model_dir("llama"), tmp_path / "out", ids, **step)
    apart = {"type": "nvfp4", "set": {"down_proj": {"clip": "minmax"}, "k_proj": {"type": "fp8"}}}
    compress(random_model_dir("llama"), tmp_path / "out", ids, **apart)


def test_fixed_scales_without_text_to_measure_on_are_refused(random_model_dir, tmp_path):
    with pytest.raises(LlmcompressError, match=r"none\.safetensors"):
        compress(random_model_dir("llama"), tmp_path / "out", tmp_path / "none.safetensors", **STATIC)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def written(random_model_dir, tmp_path_factory, ids):
    out = tmp_path_factory.mktemp("written") / "out"
    compress(random_model_dir("llama"), out, ids, **STATIC)
    return out


def damaged(written, tmp_path, change=None, config=None):
    out = tmp_path / "copy"
    shutil.copytree(written, out)
    if change is not None:
        tensors = load_file(out / "model.safetensors")
        change(tensors)
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        data = json.loads((out / "config.json").read_text())
        config(data["quantization_config"])
        (out / "config.json").write_text(json.dumps(data))
    return {check.name: check.detail for check in verify(out) if not check.ok}


def test_fixed_scales_that_differ_within_a_fused_linear_are_found(written, tmp_path):
    def change(tensors):
        tensors["model.layers.1.mlp.up_proj.input_scale"] *= 2

    assert "different scales of one input" in damaged(written, tmp_path, change)["matrices"]


def test_fixed_scales_that_are_no_scales_are_found(written, tmp_path):
    def change(tensors):
        tensors["model.layers.1.mlp.down_proj.input_scale"][0] = 0

    assert "is no scale" in damaged(written, tmp_path, change)["matrices"]


def test_a_missing_fixed_scale_is_found(written, tmp_path):
    def change(tensors):
        del tensors["model.layers.1.mlp.down_proj.input_scale"]

    assert "has no input_scale" in damaged(written, tmp_path, change)["matrices"]


def test_a_config_that_forgets_rounded_inputs_is_found(written, tmp_path):
    def config(settings):
        settings["config_groups"]["group_0"]["input_activations"] = None

    found = damaged(written, tmp_path, config=config)
    assert "without rounded inputs" in found["config"] + found["matrices"]


def test_the_same_run_gives_the_same_bytes(random_model_dir, written, tmp_path, ids):
    compress(random_model_dir("llama"), tmp_path / "out", ids, **STATIC)
    one, other = (load_file(path / "model.safetensors") for path in (written, tmp_path / "out"))
    assert all(np.array_equal(one[name].float().numpy(), other[name].float().numpy()) for name in one)
