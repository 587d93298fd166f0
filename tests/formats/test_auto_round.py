"""auto-round checkpoints: words known beforehand, what config.json says, what has no place, and the way back."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import llmcompress
from entries import there_and_back
from llmcompress.errors import CheckpointError
from llmcompress.formats.auto_round import BITS, FORMAT
from llmcompress.formats.base import Entry, TensorSpec
from llmcompress.grids.coded import Coded
from llmcompress.grids.fitting import fit
from llmcompress.grids.integer import IntegerSpec
from llmcompress.validate.verify import passed, verify

MIXED = {
    "mlp.down_proj": {"bits": 6},
    "mlp.[gu]*_proj": {"bits": 3, "group_size": 64},
    "self_attn.o_proj": {"bits": 8, "group_size": -1},
    "layers.1.mlp.down_proj": {"skip": True},
}


def entry_of(grid, rows=64, width=128, module="model.layers.0.m", **about):
    about = {"block": True, "linear": True, **about}
    return Entry(TensorSpec(f"{module}.weight", "F16", (rows, width)), grid=grid, **about)


def coded_of(grid, rows=64, width=128):
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    fitted = fit(weight, grid, scale_dtype=torch.float16)
    return Coded(fitted.encode(weight), fitted)


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_streams_of_bits_along_the_inputs_and_zero_points_less_one_along_the_outputs(bits):
    grid = IntegerSpec(bits, 64)
    coded = coded_of(grid)
    tensors = FORMAT.encode(entry_of(grid), coded)
    assert sorted(tensors) == [f"model.layers.0.m.{part}" for part in ("qweight", "qzeros", "scales")]

    def stream(values):
        bitstring = "".join(format(value, f"0{bits}b")[::-1] for value in values)
        words = (int(bitstring[start : start + 32][::-1], 2) for start in range(0, len(bitstring), 32))
        return [word - (word >> 31 << 32) for word in words]

    for column in (0, 5, 63):
        assert tensors["model.layers.0.m.qweight"][:, column].tolist() == stream(coded.codes[column].tolist())
    middle = 1 << (bits - 1)
    assert tensors["model.layers.0.m.qzeros"].tolist() == [stream([middle - 1] * 64)] * 2
    assert torch.equal(tensors["model.layers.0.m.scales"].float(), coded.grid.scale.T)


@pytest.mark.parametrize("size", [32, 128, -1])
@pytest.mark.parametrize("bits", BITS)
def test_the_way_back(bits, size):
    grid = IntegerSpec(bits, size)
    coded = coded_of(grid)
    assert torch.equal(there_and_back(FORMAT, entry_of(grid), coded).decode(), coded.decode())


def test_config_says_what_differs_from_the_common_settings():
    entries = [
        entry_of(IntegerSpec(4, 32), module="model.layers.0.a"),
        entry_of(IntegerSpec(4, 32), module="model.layers.1.a"),
        entry_of(IntegerSpec(3, 64), module="model.layers.0.b"),
        entry_of(None, module="model.layers.0.c"),
        entry_of(None, module="lm_head", block=False),
    ]
    settings = FORMAT.config(entries, {})["config.json"]["quantization_config"]
    whole = {"bits": 16, "act_bits": 16}
    assert settings == {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "data_type": "int",
        "packing_format": "auto_round:auto_gptq",
        "block_name_to_quantize": "model.layers",
        "extra_config": {
            "lm_head": whole,
            "model.layers.0.b": {"bits": 3, "group_size": 64, "sym": True},
            "model.layers.0.c": whole,
        },
    }


def test_patterns_and_defaults_of_others_are_read():
    settings = {"bits": 4, "extra_config": {"model.layers.0.b": {"bits": 2}, r".*\.0\.[bc]": {"bits": 8}, "*": {}}}
    config = {"quantization_config": {"quant_method": "auto-round", **settings}}
    assert FORMAT.recognises(config)
    found = {name: FORMAT.grid(f"model.layers.{name}", config) for name in ("0.a", "0.b", "0.c")}
    assert found == {"0.a": IntegerSpec(4, 128), "0.b": IntegerSpec(2, 128), "0.c": IntegerSpec(8, 128)}
    for other in ({"sym": False}, {"data_type": "mx_fp"}):
        with pytest.raises(CheckpointError, match="no symmetric grid of integers"):
            FORMAT.grid("model.layers.0.a", {"quantization_config": {**settings, **other}})
    assert not FORMAT.recognises({"quantization_config": {**config["quantization_config"], "packing_format": "mlx"}})


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (entry_of(IntegerSpec(4, 32, symmetric=False)), "symmetric integers, not int4-g32-asym"),
        (entry_of(IntegerSpec(4, 32), permuted=True), "groups in activation order"),
        (entry_of(IntegerSpec(4, 32), transposed=True), "Conv1D"),
        (entry_of(IntegerSpec(4, 32), module="lm_head", block=False), "outside of decoder layers"),
        (entry_of(IntegerSpec(4, 32), rows=48), "multiples of 32 on both sides"),
    ],
    ids=["asymmetric", "order", "conv1d", "head", "narrow"],
)
def test_what_has_no_place_is_refused(entry, said):
    wrong, hint = FORMAT.refuses([entry], {})
    assert said in wrong
    assert hint


@pytest.fixture(scope="module")
def mixed(tiny_model_dir, tmp_path_factory):
    """A checkpoint of four widths and a matrix that stays."""
    out = tmp_path_factory.mktemp("auto-round") / "out"
    common = {"bits": 4, "group_size": 32, "set": MIXED, "format": "auto-round"}
    llmcompress.compress(tiny_model_dir, method="rtn", output=out, **common)
    return out


def test_a_mixed_checkpoint_is_proven_evaluated_and_converted(mixed, main, tiny_model_dir, tmp_path):
    assert passed(verify(mixed, tiny_model_dir))
    assert main("eval", mixed, "--ref", tiny_model_dir, "--windows", 1, "--fail-if", "kl > 0.2", "-q") == 0
    assert main("gguf", mixed, "--type", "Q8_0", "-o", tmp_path / "out.gguf", "-q") == 0
    held = tmp_path / "held"
    grid = ["--bits", "4", "--group-size", "32"]
    assert main("rtn", tiny_model_dir, "-o", held, "--format", "compressed-tensors", *grid, "-q") == 0
    assert main("export", held, "--format", "auto-round", "-o", tmp_path / "exported") == 0
    assert main("rtn", tiny_model_dir, "-o", tmp_path / "direct", "--format", "auto-round", *grid, "-q") == 0
    exported, direct = (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "direct"))
    assert exported.keys() == direct.keys()
    assert all(torch.equal(exported[name], direct[name]) for name in direct)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda settings: settings.pop("packing_format"), "has no 'packing_format'"),
        (lambda settings: settings.update(sym=False), "with sym False"),
        (lambda settings: settings.update(bits=3), "by config.json"),
        (lambda settings: settings["extra_config"].pop("model.layers.1.mlp.down_proj"), "is not quantised"),
        (lambda settings: settings.update(block_name_to_quantize="other"), "config.json says that it is not"),
    ],
    ids=["key", "symmetry", "bits", "left out", "blocks"],
)
def test_a_config_that_denies_the_tensors_is_found(mixed, tmp_path, damage, said):
    shutil.copytree(mixed, tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    damage(config["quantization_config"])
    file.write_text(json.dumps(config))
    checks = {check.name: check for check in verify(tmp_path / "out")}
    assert not checks["config"].ok
    assert said in checks["config"].detail
