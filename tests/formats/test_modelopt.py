"""NVFP4 as ModelOpt writes it: golden bytes, both configs, codes that go to compressed-tensors and back."""

import json
from pathlib import Path

import pytest
import torch

from entries import FORMATS, PACKED, matrix, model
from llmcompress.grids.base import INPUT_SPECS
from llmcompress.grids.coded import Coded
from llmcompress.grids.nvfp4 import Nvfp4Spec, fit

NVFP4, INPUTS, OURS = Nvfp4Spec(), INPUT_SPECS["nvfp4"], FORMATS["modelopt"]
NAMED = "model.layers.0.mlp.up_proj"
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "modelopt_nvfp4.json").read_text())
SETTINGS = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}


def golden(part, dtype, shape):
    return torch.frombuffer(bytearray.fromhex(GOLDEN[part]), dtype=torch.uint8).view(dtype).reshape(shape)


def same_bytes(one, other):
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def test_what_modelopt_wrote_is_read_and_written_back():
    stored = {
        f"{NAMED}.weight": golden("weight", torch.uint8, (4, 64)),
        f"{NAMED}.weight_scale": golden("weight_scale", torch.float8_e4m3fn, (4, 8)),
        f"{NAMED}.weight_scale_2": golden("weight_scale_2", torch.float32, ()),
    }
    coded = OURS.decode(NAMED, stored.__getitem__, SETTINGS)
    written = OURS.encode(matrix(NAMED, NVFP4, (4, 128)), coded)
    assert list(written) == list(stored)
    for name, tensor in written.items():
        assert (tensor.dtype, tensor.shape) == (stored[name].dtype, stored[name].shape)
        assert same_bytes(tensor, stored[name])


@pytest.mark.parametrize("inputs", [None, INPUTS])
def test_codes_are_those_of_compressed_tensors_and_come_back(inputs):
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(0)) * 0.1
    grid = fit(weight)
    coded = Coded(grid.encode(weight), grid, None if inputs is None else torch.tensor([448 * 6 / 3.7]))
    entry = matrix(NAMED, NVFP4, (48, 96), inputs=inputs)
    assert OURS.refuses([entry], {}) is None
    tensors, theirs = OURS.encode(entry, coded), PACKED.encode(entry, coded)
    layout = {item.name: item for item in OURS.layout(entry)}
    assert {name: tuple(part.shape) for name, part in tensors.items()} == {n: i.shape for n, i in layout.items()}
    for ours, other in (("weight", "weight_packed"), ("weight_scale", "weight_scale")):
        assert same_bytes(tensors[f"{NAMED}.{ours}"], theirs[f"{NAMED}.{other}"])
    assert float(tensors[f"{NAMED}.weight_scale_2"] * theirs[f"{NAMED}.weight_global_scale"]) == pytest.approx(1, 1e-7)
    config = OURS.config([entry], {})["config.json"]
    assert [name for name in FORMATS if FORMATS[name].recognises(config)] == ["modelopt"]
    assert OURS.shape(NAMED, layout, tensors.__getitem__, config) == (48, 96)
    assert OURS.grid(NAMED, config) == NVFP4
    again = OURS.decode(NAMED, tensors.__getitem__, config)
    assert torch.equal(again.codes, coded.codes)
    assert torch.allclose(again.decode(), coded.decode(), rtol=3e-7, atol=0)
    back = PACKED.encode(entry, Coded(again.codes, again.grid, coded.input_scale))
    assert all(same_bytes(back[name], theirs[name]) for name in theirs if "global" not in name)
    rounding = OURS.inputs(NAMED, tensors.__getitem__, config)
    assert (rounding and rounding.spec) == inputs
    if inputs is not None:
        assert torch.allclose(rounding.scale, coded.input_scale, rtol=2e-7)
        assert float(tensors[f"{NAMED}.input_scale"]) == pytest.approx(3.7 / (448 * 6))


@pytest.mark.parametrize(("inputs", "algorithm"), [(None, "W4A16_NVFP4"), (INPUTS, "NVFP4")])
def test_both_configs_say_the_same(inputs, algorithm):
    entries = model({"layers.1.*down": None, "": NVFP4}, inputs=inputs)
    files = OURS.config(entries, {})
    producer = {"name": "modelopt", "version": "0.47.0"}
    alone = ["model.layers.1.mlp.down_proj", "lm_head"]
    args = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert files["config.json"]["quantization_config"] == {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "config_groups": {
            "group_0": {"input_activations": inputs and args, "weights": args, "targets": ["Linear"]},
        },
        "ignore": alone,
        "producer": producer,
    }
    assert files["hf_quant_config.json"] == {
        "producer": producer,
        "quantization": {
            "quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": alone,
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([matrix("m", NVFP4, inputs=INPUT_SPECS["int8-token"])], "no algorithm of ModelOpt has inputs of int8-token"),
        ([matrix("m", NVFP4), matrix("n", NVFP4, inputs=INPUTS)], "one algorithm for all modules"),
        ([matrix("m", NVFP4, transposed=True)], "Conv1D"),
        ([matrix("m")], "cannot hold int4"),
    ],
)
def test_what_has_no_algorithm_is_refused(entries, words):
    what, way = OURS.refuses(entries, {})
    assert words in what
    assert way
