"""Checkpoints of ModelOpt, read as if they had never been quantised."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmcompress.calib.pack import save
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.source.open import checkpoint_headers, open_checkpoint
from llmcompress.errors import CheckpointError
from llmcompress.grids.e2m1 import paired
from llmcompress.grids.nvfp4 import fit
from llmcompress.recipe import parse
from llmcompress.validate.verify import passed, verify
from shippedmodels import changed, shipped, tile_scales

GOLDEN = Path(__file__).parents[2] / "golden"
UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
LEVELS = torch.cat([LEVELS, -LEVELS])
NVFP4 = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}


def nvfp4(name, weight):
    """One factor for all matrices, as for those that engines run as one."""
    factor = torch.tensor(3.0 / (6 * 448))
    small = (weight.view(len(weight), -1, 16).abs().amax(-1) / 6 / factor).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    spread = (small.float() * factor).repeat_interleave(16, 1)
    codes = ((weight / spread).double().unsqueeze(-1) - LEVELS).abs().argmin(-1).to(torch.uint8)
    parts = {"weight": paired(codes), "weight_scale": small, "weight_scale_2": factor, "input_scale": factor.clone()}
    return parts, LEVELS[codes.long()] * spread.double()


def mxfp4(name, weight):
    power = (weight.view(len(weight), -1, 32).abs().amax(-1) / 6).log2().ceil()
    spread = power.double().exp2().repeat_interleave(32, 1)
    codes = ((weight / spread).unsqueeze(-1) - LEVELS).abs().argmin(-1).to(torch.uint8)
    return {"weight": paired(codes), "weight_scale": (power + 127).to(torch.uint8)}, LEVELS[codes.long()] * spread


def mxfp8(name, weight):
    power = (weight.view(len(weight), -1, 32).abs().amax(-1) / 448).log2().ceil()
    spread = power.exp2().repeat_interleave(32, 1)
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": (power + 127).to(torch.uint8)}, codes.double() * spread.double()


def fp8(tile, shape):
    def parts(name, weight):
        scale, spread = tile_scales(weight, *(tile or (weight.shape[0], weight.shape[1])))
        codes = (weight / spread).to(torch.float8_e4m3fn)
        stored = {"weight": codes, "weight_scale": shape(scale), "input_scale": torch.tensor(0.5)}
        return stored, codes.double() * spread.double()

    return parts


KINDS = {
    "NVFP4": nvfp4,
    "MXFP4": mxfp4,
    "MXFP8": mxfp8,
    "FP8": fp8(None, lambda scale: scale.reshape(())),
    "FP8_PER_CHANNEL_PER_TOKEN": fp8((1, 10**4), lambda scale: scale.reshape(-1)),
    "FP8_PB_WO": fp8((128, 128), lambda scale: scale[:, None, :, None]),
}


def shipped_as(kind, model, out):
    return shipped(model, out, {"quant_method": "modelopt", **NVFP4, "quant_algo": kind}, KINDS[kind])


@pytest.fixture(scope="module")
def model(random_model_dir):
    return random_model_dir("llama", hidden_size=128, intermediate_size=192)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_brute_force(kind, model, tmp_path):
    values = shipped_as(kind, model, tmp_path / "source")
    checkpoint = open_checkpoint(checkpoint_headers(tmp_path / "source"))
    assert set(checkpoint.names()) == set(load_file(model / "model.safetensors"))
    for name, expected in values.items():
        assert torch.equal(checkpoint.read(name), expected.float()), name


def test_values_are_those_of_the_published_bytes(tmp_path):
    """What ModelOpt itself makes of a matrix, with factors that have no exact reciprocal."""
    golden = json.loads((GOLDEN / "modelopt_nvfp4.json").read_text())
    from llmcompress.formats.modelopt import FORMAT

    def tensor(part, dtype, shape):
        return torch.frombuffer(bytearray.fromhex(golden[part]), dtype=torch.uint8).view(dtype).reshape(shape)

    tensors = {
        "m.weight": tensor("weight", torch.uint8, (4, 64)),
        "m.weight_scale": tensor("weight_scale", torch.float8_e4m3fn, (4, 8)),
        "m.weight_scale_2": tensor("weight_scale_2", torch.float32, ()),
    }
    coded = FORMAT.decode("m", tensors.__getitem__, {"quantization_config": {}})
    assert torch.equal(coded.decode(), tensor("decoded", torch.float32, (4, 128)))
    assert coded.grid.divisor == 1 / tensors["m.weight_scale_2"]


@pytest.mark.parametrize("beside", [False, True])
def test_runs_begin_with_it_and_codes_are_kept_in_other_formats(beside, model, tmp_path):
    source = tmp_path / "source"
    shipped_as("NVFP4", model, source)
    if beside:
        config = json.loads((source / "config.json").read_text())
        del config["quantization_config"]
        (source / "config.json").write_text(json.dumps(config))
        (source / "hf_quant_config.json").write_text(json.dumps({"quantization": NVFP4}))
    for step, methods in (({"bits": 4, "group_size": 32}, {"rtn"}), ({"bits": 4, "type": "nvfp4"}, {"recoded"})):
        out = tmp_path / f"out-{len(step['type']) if 'type' in step else 0}"
        report = run(make_plan(parse({"steps": [{"method": "rtn", **step}]}), source, Options(out=out)))
        assert {item["method"] for item in report["linears"]} == methods
        assert max(item["relative_error"] for item in report["linears"]) < (1e-6 if methods == {"recoded"} else 1)
        assert ("requantised" in {entry["kind"] for entry in report["ledger"]}) == (methods == {"rtn"})
        checks = verify(out, source)
        assert passed(checks), [check for check in checks if not check.ok]
        assert "quant_algo" not in (out / "config.json").read_text()
    written, held = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    assert torch.equal(written[f"{UP}.weight_packed"], held[f"{UP}.weight"])
    assert torch.equal(written[f"{UP}.weight_scale"].view(torch.uint8), held[f"{UP}.weight_scale"].view(torch.uint8))


FP8 = {"type": "fp8", "activations": "fp8-token"}
STEPS = {
    "nvfp4": {"type": "nvfp4"},
    "nvfp4, inputs": {"type": "nvfp4", "activations": "nvfp4"},
    "fp8": FP8,
    "fp8, one scale": {"type": "fp8-tensor", "activations": "fp8-tensor"},
    "mxfp8": {"type": "mxfp8", "activations": "mxfp8"},
    "several": {
        "type": "nvfp4",
        "activations": "nvfp4",
        "set": {
            "self_attn.*": FP8,
            "o_proj": {"type": "fp8-block", "activations": "fp8-group"},
            "layers.0.mlp.down_proj": FP8,
        },
    },
}


@pytest.mark.parametrize("step", STEPS)
def test_codes_go_from_compressed_tensors_to_modelopt_and_back_byte_for_byte(step, model, tmp_path):
    """Each container is made of the one before, what is fixed of inputs as well, which no other text changes."""
    before, recipes = model, {"first": "compressed-tensors", "second": "modelopt", "third": "compressed-tensors"}
    for seed, (name, format_) in enumerate(recipes.items()):
        ids = torch.randint(3, 96, (2, 32), generator=torch.Generator().manual_seed(seed))
        save(ids, tmp_path / f"{name}.safetensors")
        recipe = {
            "calibration": {"source": str(tmp_path / f"{name}.safetensors"), "samples": 2, "length": 32},
            "steps": [{"method": "rtn", **STEPS[step]}],
            "output": {"format": format_},
        }
        report = run(make_plan(parse(recipe), before, Options(out=tmp_path / name)))
        assert before == model or {item["method"] for item in report["linears"]} == {"recoded"}
        assert "requantised" not in {entry["kind"] for entry in report["ledger"]}
        checks = verify(tmp_path / name, before)
        assert passed(checks), [check for check in checks if not check.ok]
        before = tmp_path / name
    first, second, third = (load_file(tmp_path / name / "model.safetensors") for name in recipes)
    assert set(first) == set(third)
    for name, tensor in first.items():
        if name.endswith("global_scale"):
            assert torch.allclose(tensor, third[name], rtol=2e-7)
        else:
            assert torch.equal(tensor.view(torch.uint8), third[name].view(torch.uint8)), name
    assert torch.equal(
        first[f"{UP}.weight_packed" if "nvfp4" in step or step == "several" else f"{UP}.weight"].view(torch.uint8),
        second[f"{UP}.weight"].view(torch.uint8),
    )
    assert (tmp_path / "second" / "hf_quant_config.json").exists()
    assert not (tmp_path / "third" / "hf_quant_config.json").exists()


def test_layers_may_have_each_its_own(model, tmp_path):
    layers = {
        f"model.layers.{layer}.mlp.{leaf}_proj": {"quant_algo": "NVFP4"} for layer in (0, 1) for leaf in ("up", "gate")
    }
    values = shipped(
        model,
        tmp_path / "source",
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers},
        lambda name, weight: (nvfp4 if name.removesuffix(".weight") in layers else KINDS["FP8"])(name, weight),
    )
    checkpoint = open_checkpoint(checkpoint_headers(tmp_path / "source"))
    assert all(torch.equal(checkpoint.read(name), expected.float()) for name, expected in values.items())
    assert {module for module in checkpoint.headers.packed if checkpoint.code_grid(module)} == set(layers)
    up = checkpoint.inputs(UP)
    assert (up.spec.name, float(up.scale)) == ("nvfp4", pytest.approx(448 * 6 / 3.0))
    assert checkpoint.inputs(DOWN) is None


def test_fixed_and_other_scales_of_inputs_are_read(model, tmp_path):
    kinds = {"FP8": ("fp8-tensor", 0.5), "FP8_PER_CHANNEL_PER_TOKEN": ("fp8-token", None), "MXFP8": ("mxfp8", None)}
    for kind, (name, scale) in kinds.items():
        shipped_as(kind, model, tmp_path / kind)
        found = open_checkpoint(checkpoint_headers(tmp_path / kind)).inputs(UP)
        assert (found.spec.name, None if found.scale is None else float(found.scale)) == (name, scale)


def test_a_divisor_gives_what_a_factor_gives():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    grid = fit(weight)
    from llmcompress.grids.nvfp4 import FactoredGrid

    factored = FactoredGrid(grid.spec, grid.small, grid.divisor, 1 / grid.divisor)
    codes = grid.encode(weight)
    assert torch.allclose(factored.decode(codes), grid.decode(codes), rtol=2**-22, atol=0)
    assert torch.equal(factored.rows(slice(2, 5)).decode(codes[2:5]), factored.decode(codes)[2:5])


def spoiled(name, change):
    return lambda tensors: tensors.__setitem__(name, change(tensors[name]))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoiled(f"{DOWN}.weight_scale", lambda scale: scale[:, :3]), "not the scales of 128 x 192 weights on nvfp4"),
        (spoiled(f"{DOWN}.weight_scale", lambda scale: scale.float()), "U8 with scales F32"),
        (lambda tensors: tensors.pop(f"{DOWN}.weight_scale_2"), "no weight_scale_2"),
        (lambda tensors: tensors.pop(f"{DOWN}.weight"), "no matrix of 8-bit floats"),
        (lambda tensors: tensors.__setitem__(f"{DOWN}.pre_quant_scale", torch.ones(192)), "pre_quant_scale"),
    ],
)
def test_what_headers_tell_is_refused_when_planned(spoil, message, model, tmp_path):
    shipped_as("NVFP4", model, tmp_path / "sound")
    source = changed(tmp_path / "sound", tmp_path / "source", spoil)
    with pytest.raises(CheckpointError, match=message):
        make_plan(parse({"steps": [{"method": "rtn"}]}), source, Options(out=tmp_path / "out"))
