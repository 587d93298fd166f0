"""Experts in MXFP4 as gpt-oss ships them, read as the 3-D tensors that transformers' modules hold."""

import json
import shutil

import pytest
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.source.open import checkpoint_headers, open_checkpoint
from llmcompress.errors import CheckpointError
from llmcompress.grids.mxfp4 import fit
from llmcompress.recipe import parse
from llmcompress.validate.gguf_verify import verify_gguf
from llmcompress.validate.verify import passed, verify
from madetokenizers import byte_level, save
from shippedmodels import changed

GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{leaf}" for leaf in ("gate_up_proj", "down_proj"))
SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


@pytest.fixture(scope="module")
def model(random_model_dir):
    return random_model_dir(
        "gpt_oss",
        hidden_size=64,
        intermediate_size=96,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=288,
        num_hidden_layers=2,
    )


@pytest.fixture
def source(model, tmp_path):
    """A model whose experts are rounded to blocks of 32 inputs."""
    out = tmp_path / "source"
    shutil.copytree(model, out)
    tensors = load_file(out / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts = tensors.pop(name).float().transpose(1, 2)
        grids = [fit(expert.contiguous()) for expert in experts]
        packed = [grid.packed(grid.encode(expert)) for grid, expert in zip(grids, experts, strict=True)]
        tensors[f"{name}_blocks"] = torch.stack([part["weight_packed"].unflatten(1, (-1, 16)) for part in packed])
        tensors[f"{name}_scales"] = torch.stack([part["weight_scale"] for part in packed])
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return changed(out, tmp_path / "shipped", **SETTINGS)


def test_values_names_and_shapes_are_those_of_transformers(model, source):
    checkpoint = open_checkpoint(checkpoint_headers(source))
    original, held = load_file(model / "model.safetensors"), load_file(source / "model.safetensors")
    assert set(checkpoint.names()) == set(original)
    for name, tensor in original.items():
        assert checkpoint.headers.tensors[name].spec.shape == tuple(tensor.shape)
        assert checkpoint.headers.tensors[name].spec.dtype == "BF16"
    for name in (GATE_UP, DOWN):
        theirs = convert_moe_packed_tensors(held[f"{name}_blocks"], held[f"{name}_scales"])
        assert torch.equal(checkpoint.read(name), theirs)
        assert (theirs.float() - original[name].float()).norm() < 0.2 * original[name].float().norm()
        for number in range(4):
            assert torch.equal(checkpoint.read_at(name, number), theirs[number])
            coded = checkpoint.coded_at(name, number)
            assert coded.grid.spec.name == "mxfp4"
            assert torch.equal(coded.decode().T.bfloat16(), theirs[number])
    bias = f"{DOWN}_bias"
    assert torch.equal(checkpoint.read_at(bias, 2), original[bias][2])
    assert checkpoint.coded_at(bias, 2) is None
    with pytest.raises(CheckpointError, match="no entry 4"):
        checkpoint.read_at(GATE_UP, 4)


def test_runs_begin_with_it_and_verify_knows_it_as_the_source(source, tmp_path):
    recipe = {"steps": [{"method": "rtn", "bits": 4, "group_size": 32}]}
    report = run(make_plan(parse(recipe), source, Options(out=tmp_path / "out")))
    (note,) = (entry for entry in report["ledger"] if entry["kind"] == "requantised")
    assert note["subject"] == f"{2 * 4 * 3} matrices"
    checks = verify(tmp_path / "out", source)
    assert passed(checks), [check for check in checks if not check.ok]
    assert "mxfp4" not in (tmp_path / "out" / "config.json").read_text()


def values_of(source):
    """Gate, up and down of every expert of every layer [out, in], as transformers decodes what the source holds."""
    held, found = load_file(source / "model.safetensors"), {}
    for name in [name.removesuffix("_blocks") for name in held if name.endswith("_blocks")]:
        stacks = convert_moe_packed_tensors(held[f"{name}_blocks"], held[f"{name}_scales"]).mT.float()
        block, leaf = name.rsplit(".", 1)
        parts = {"gate_proj": stacks[:, ::2], "up_proj": stacks[:, 1::2]} if leaf == "gate_up_proj" else {leaf: stacks}
        found |= {(block, part): value for part, value in parts.items()}
    return found


def test_codes_are_kept_where_the_wanted_grid_is_theirs(source, tmp_path):
    report = run(make_plan(parse({"steps": [{"method": "rtn", "type": "mxfp4"}]}), source, Options(out=tmp_path / "o")))
    assert not [entry for entry in report["ledger"] if entry["kind"] == "requantised"]
    experts = {record["name"]: record for record in report["linears"] if ".experts." in record["name"]}
    assert len(experts) == 2 * 4 * 3
    assert {(record["method"], record["relative_error"]) for record in experts.values()} == {("recoded", 0.0)}
    checks = verify(tmp_path / "o", source)
    assert passed(checks), [check for check in checks if not check.ok]
    written = open_checkpoint(checkpoint_headers(tmp_path / "o"))
    for (block, part), values in values_of(source).items():
        for number, value in enumerate(values):
            assert torch.equal(written.read(f"{block}.{number}.{part}.weight").float(), value)


def test_gguf_files_keep_the_codes_too(random_model_dir, source, tmp_path):
    save(byte_level(), source)
    recipe = {"steps": [{"method": "rtn", "gguf": {"type": "MXFP4"}}], "output": {"format": "gguf"}}
    report = run(make_plan(parse(recipe), source, Options(out=tmp_path / "out.gguf")))
    assert {item["method"] for item in report["linears"] if ".experts." in item["name"]} == {"recoded"}
    checks = verify_gguf(tmp_path / "out.gguf", source)
    assert passed(checks), [check for check in checks if not check.ok]
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "out.gguf").tensors}
    for (block, part), values in values_of(source).items():
        tensor = tensors[f"blk.{block.split('.')[2]}.ffn_{part.removesuffix('_proj')}_exps.weight"]
        assert tensor.tensor_type.name == "MXFP4"
        decoded = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(decoded.reshape(values.shape), values)


def spoiled(name, change):
    return lambda tensors: tensors.__setitem__(name, change(tensors[name]))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoiled(f"{DOWN}_scales", lambda scales: scales[:, :3]), "one byte for each block"),
        (spoiled(f"{DOWN}_blocks", lambda blocks: blocks[..., :8]), "not blocks of 16 bytes"),
        (lambda tensors: tensors.pop(f"{DOWN}_scales"), "one byte for each block"),
        (
            lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("_blocks")],
            "no tensor is stored",
        ),
    ],
)
def test_what_headers_tell_is_refused_when_planned(spoil, message, source, tmp_path):
    broken = changed(source, tmp_path / "broken", spoil)
    with pytest.raises(CheckpointError, match=message):
        make_plan(parse({"steps": [{"method": "rtn"}]}), broken, Options(out=tmp_path / "out"))


def test_scales_that_are_none_are_refused_when_read(source, tmp_path):
    broken = changed(source, tmp_path / "broken", lambda tensors: tensors[f"{DOWN}_scales"][2].fill_(255))
    with pytest.raises(CheckpointError, match="scales that are not finite, of expert 2"):
        open_checkpoint(checkpoint_headers(broken)).read(DOWN)


def test_a_text_runs_through_it(source, tmp_path):
    recipe = {"calibration": {"samples": 2, "length": 16}, "steps": [{"method": "gptq", "bits": 4, "group_size": 32}]}
    ids = tmp_path / "ids.safetensors"
    save_file({"input_ids": (torch.arange(32) * 7 % 96).view(2, 16)}, ids)
    recipe["calibration"]["source"] = str(ids)
    report = run(make_plan(parse(recipe), source, Options(out=tmp_path / "out")))
    assert {item["method"] for item in report["linears"]} == {"gptq"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "gpt_oss"
