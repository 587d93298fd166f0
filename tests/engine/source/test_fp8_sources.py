"""Checkpoints of 8-bit floats as vendors ship them, read as if they had never been quantised."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.source.open import checkpoint_headers, open_checkpoint
from llmcompress.errors import CheckpointError
from llmcompress.formats.float8_tensors import read_float8
from llmcompress.recipe import parse
from llmcompress.validate.session import Request, evaluate_paths
from llmcompress.validate.verify import passed, verify
from shippedmodels import changed, shipped, tile_scales

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
WHOLE = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
DOWN = "model.layers.1.mlp.down_proj"


def in_blocks(name, weight):
    scale, spread = tile_scales(weight, 128, 128)
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}, codes.double() * spread.double()


def as_powers(name, weight):
    """Scales as powers of two, in bytes."""
    scale = tile_scales(weight, 32, 32)[0].log2().ceil().clamp(-127, 127)
    spread = scale.exp2().repeat_interleave(32, 0).repeat_interleave(32, 1)[: len(weight), : weight.shape[1]]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": (scale + 127).to(torch.uint8)}, codes.double() * spread.double()


def as_powers_of_their_own_type(name, weight):
    stored, value = as_powers(name, weight)
    return {**stored, "weight_scale_inv": stored["weight_scale_inv"].view(torch.float8_e8m0fnu)}, value


def whole(scale_name, input_name, shape=()):
    def parts(name, weight):
        if "o_proj" in name:
            return None
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        stored = {"weight": codes, scale_name: scale.reshape(shape), input_name: torch.tensor(0.5)}
        return stored, codes.double() * scale.double()

    return parts


def in_rows(name, weight):
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.double() * scale.double()


KINDS = {
    "blocks": (BLOCKS, in_blocks),
    "powers of two": ({**BLOCKS, "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}, as_powers),
    "e8m0": ({**BLOCKS, "weight_block_size": [32, 32]}, as_powers_of_their_own_type),
    "mistral": (WHOLE, whole("weight_scale_inv", "activation_scale")),
    "mistral's own names": (WHOLE, whole("qscale_weight", "qscale_act", (1,))),
    "one scale": (WHOLE, whole("weight_scale", "input_scale", (1, 1))),
    "rows": ({"quant_method": "fbgemm_fp8"}, in_rows),
}


@pytest.fixture(scope="module")
def model(random_model_dir):
    """Matrices of 192 x 200 and others, which no blocks of 128 fill."""
    return random_model_dir("llama", hidden_size=192, intermediate_size=200)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_brute_force(kind, model, tmp_path):
    settings, parts = KINDS[kind]
    values = shipped(model, tmp_path / "source", settings, parts)
    checkpoint = open_checkpoint(checkpoint_headers(tmp_path / "source"))
    assert "quantization_config" not in checkpoint.headers.config
    original = load_file(model / "model.safetensors")
    assert set(checkpoint.names()) == set(original)
    for name, stored in original.items():
        assert checkpoint.headers.tensors[name].spec.shape == tuple(stored.shape)
        assert checkpoint.headers.tensors[name].spec.dtype == "BF16"
        if name in values:
            assert torch.equal(checkpoint.read(name), values[name].float())
        else:
            assert torch.equal(checkpoint.read(name), stored)


def test_values_are_those_of_transformers():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    for parts, tile in ((in_blocks, (128, 128)), (as_powers, (32, 32))):
        stored, _ = parts("", weight)
        theirs = Fp8Dequantize(None)._dequantize_one(stored["weight"], stored["weight_scale_inv"], torch.float32)
        coded = read_float8("m", stored["weight"], stored["weight_scale_inv"], tile)
        assert torch.equal(coded.decode(), theirs)
        assert torch.equal(coded.rows(slice(100, 200)).decode(), theirs[100:200])
        assert torch.equal(coded.grid.encode(theirs), coded.codes & (0xFF * (coded.codes != 0x80)))


@pytest.mark.parametrize(("kind", "step"), [("blocks", "gptq"), ("mistral", "rtn"), ("powers of two", "rtn")])
def test_runs_begin_with_it_and_verify_knows_it_as_the_source(kind, step, model, tmp_path, main, capsys):
    settings, parts = KINDS[kind]
    source, out = tmp_path / "source", tmp_path / "out"
    shipped(model, source, settings, parts)
    ids = tmp_path / "ids.safetensors"
    save_file({"input_ids": (torch.arange(128) * 7 % 96).view(4, 32)}, ids)
    text = ["--calibration", ids, "--samples", "4", "--length", "32"] if step == "gptq" else []
    command = [step, source, "-o", out, "--group-size", "-1", *text]
    assert main("plan", *command, "--json") == 0
    (note,) = (entry for entry in json.loads(capsys.readouterr().out)["ledger"] if entry["kind"] == "requantised")
    assert note["why"] == "fp8 in the source, decoded and rounded anew"
    assert main(*command) == 0
    assert main("verify", out, "--source", source) == 0
    scales = {item.dtype for name, item in load_file(out / "model.safetensors").items() if name.endswith("_scale")}
    assert scales == {torch.bfloat16}
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


MIXTURES = {
    "qwen3_moe": {},
    "deepseek_v3": {
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "num_experts_per_tok": 2,
    },
    "minimax_m2": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_decoded_one_by_one(family, random_model_dir, tmp_path):
    values = shipped(random_model_dir(family, **MIXTURES[family]), tmp_path / "source", *KINDS["blocks"])
    assert any("experts.3." in name for name in values)
    report = run(make_plan(parse({"steps": [{"method": "rtn"}]}), tmp_path / "source", Options(out=tmp_path / "out")))
    assert {f"{item['name']}.weight" for item in report["linears"]} == set(values)
    checks = verify(tmp_path / "out", tmp_path / "source")
    assert passed(checks), [check for check in checks if not check.ok]


def test_a_checkpoint_is_the_original_of_what_is_made_of_it(tiny_model_dir, tmp_path):
    source = tmp_path / "source"
    shipped(tiny_model_dir, source, *KINDS["blocks"])
    run(make_plan(parse({"steps": [{"method": "rtn", "bits": 8}]}), source, Options(out=tmp_path / "out")))
    # the inputs of blocks are rounded where a checkpoint is run, those of the result are not
    for model, ref, most in ((tmp_path / "out", source, 3e-3), (source, tiny_model_dir, 1e-2), (source, source, 1e-9)):
        result = evaluate_paths(Request(model, ref, "default", 32, 2, 2, "cpu", "float32"), lambda done, of: None)
        assert result["kl"] < most


def test_decoded_matrices_that_are_left_alone_are_written_in_the_models_type(model, tmp_path):
    values = shipped(model, tmp_path / "source", *KINDS["blocks"])
    recipe = {"steps": [{"method": "rtn", "bits": 8, "type": "fp8", "set": {"*down_proj": {"skip": True}}}]}
    run(make_plan(parse(recipe), tmp_path / "source", Options(out=tmp_path / "out")))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written[f"{DOWN}.weight"], values[f"{DOWN}.weight"].float().bfloat16())


def spoiled(name, change):
    return lambda tensors: tensors.__setitem__(name, change(tensors[name]))


DAMAGES = {
    "a block of other extents": (
        {},
        spoiled(f"{DOWN}.weight_scale_inv", lambda scale: scale[:, :1]),
        "weight_scale_inv",
    ),
    "another block size": ({"weight_block_size": [64, 64]}, lambda tensors: None, "one for each 64 x 64 weights"),
    "a block size in words": ({"weight_block_size": "big"}, lambda tensors: None, "weight_block_size is 'big'"),
    "a block of nothing": ({"weight_block_size": [0, 128]}, lambda tensors: None, r"weight_block_size is \[0, 128\]"),
    "a lost scale": ({}, lambda tensors: tensors.pop(f"{DOWN}.weight_scale_inv"), f"{DOWN}.weight is F8_E4M3"),
    "a lost weight": ({}, lambda tensors: tensors.pop(f"{DOWN}.weight"), f"{DOWN}.weight is no matrix"),
    "whole numbers": ({}, spoiled(f"{DOWN}.weight", lambda weight: weight.view(torch.int8)), f"{DOWN}.weight is no"),
    "scales that are integers": (
        {},
        spoiled(f"{DOWN}.weight_scale_inv", lambda scale: scale.to(torch.int64)),
        "of a type that scales have",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_headers_tell_is_refused_when_planned(name, model, tmp_path, main, capsys):
    shipped(model, tmp_path / "sound", *KINDS["blocks"])
    settings, spoil, message = DAMAGES[name]
    source = changed(tmp_path / "sound", tmp_path / "source", spoil, **settings)
    with pytest.raises(CheckpointError, match=message):
        make_plan(parse({"steps": [{"method": "rtn"}]}), source, Options(out=tmp_path / "out"))
    assert main("rtn", source, "-o", tmp_path / "out") == 2
    (_,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoiled(f"{DOWN}.weight_scale_inv", lambda scale: scale * torch.inf), "scales that are not finite"),
        (spoiled(f"{DOWN}.weight_scale_inv", lambda scale: -scale), "or below zero"),
        (spoiled(f"{DOWN}.weight", lambda weight: (weight.view(torch.uint8) | 0x7F).view(weight.dtype)), "no numbers"),
    ],
)
def test_values_that_are_none_are_refused_when_read(spoil, message, model, tmp_path):
    shipped(model, tmp_path / "sound", *KINDS["blocks"])
    source = changed(tmp_path / "sound", tmp_path / "source", spoil)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(checkpoint_headers(source)).read(f"{DOWN}.weight")


def test_a_model_that_only_claims_to_be_quantised_is_refused(model, tmp_path):
    source = changed(model, tmp_path / "source", **BLOCKS)
    with pytest.raises(CheckpointError, match=r"already quantised \(fp8\), by its config.json, and no tensor"):
        checkpoint_headers(source)


def test_of_the_format_blocks_alone_are_written(model, tmp_path, main, capsys):
    assert main("rtn", model, "-o", tmp_path / "out", "--format", "fp8") == 2
    assert "error: format fp8 cannot hold int4" in capsys.readouterr().err
    assert main("rtn", model, "-o", tmp_path / "out", "--format", "fp8", "--type", "fp8-block") == 2
    assert "use --activations fp8-group" in capsys.readouterr().err
