"""What ModelOpt writes: golden bytes, both configs, codes that go to compressed-tensors and back."""

import json
from pathlib import Path

import pytest
import torch

from entries import FORMATS, PACKED, matrix, model
from llmcompress.grids.base import INPUT_SPECS
from llmcompress.grids.coded import Coded
from llmcompress.grids.float8 import Float8Spec
from llmcompress.grids.float8_tensor import Float8TensorSpec
from llmcompress.grids.grid_type import Fitting, grid_types
from llmcompress.grids.mxfp8 import Mxfp8Spec
from llmcompress.grids.nvfp4 import Nvfp4Spec, fit
from llmcompress.grids.tiled_floats import TiledFloatSpec

NVFP4, INPUTS, OURS = Nvfp4Spec(), INPUT_SPECS["nvfp4"], FORMATS["modelopt"]
GRIDS = grid_types()
NAMED = "model.layers.0.mlp.up_proj"
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "modelopt_nvfp4.json").read_text())
SETTINGS = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}


FP8 = json.loads((Path(__file__).parents[1] / "golden" / "modelopt_fp8.json").read_text())


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


def published(part, dtype, shape):
    return torch.frombuffer(bytearray.fromhex(part), dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("algorithm", FP8["algorithms"])
def test_what_modelopt_wrote_of_fp8_computes_what_it_computed_and_is_written_back(algorithm):
    """Its own outputs of the matrix, inputs rounded; those of FP8_PB_WO it leaves as they are, and engines do not."""
    item = FP8["algorithms"][algorithm]
    shapes = {"FP8": (), "FP8_PER_CHANNEL_PER_TOKEN": (4,), "FP8_PB_WO": (1, 1, 1, 1)}
    stored = {
        f"{NAMED}.weight": published(item["weight"], torch.float8_e4m3fn, (4, 128)),
        f"{NAMED}.weight_scale": published(item["weight_scale"], torch.float32, shapes[algorithm]),
    }
    if "input_scale" in item:
        stored[f"{NAMED}.input_scale"] = published(item["input_scale"], torch.float32, ())
    settings = {"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm.lower()}}
    x, output = (published(part, torch.float32, (3, -1)) for part in (FP8["input"], item["output"]))
    coded = OURS.decode(NAMED, stored.__getitem__, settings)
    rounding = OURS.inputs(NAMED, stored.__getitem__, settings)
    seen = (x if algorithm == "FP8_PB_WO" else rounding.rounded(x)) @ coded.decode().T
    assert torch.allclose(seen, output, rtol=1e-5, atol=1e-5)
    grid = OURS.grid(NAMED, settings)
    assert coded.grid.spec == grid
    entry = matrix(NAMED, grid, (4, 128), inputs=rounding.spec)
    assert OURS.refuses([entry], {}) is None
    written = OURS.encode(entry, Coded(coded.codes, coded.grid, rounding.scale))
    assert {item.name: item.shape for item in OURS.layout(entry)} == {n: tuple(t.shape) for n, t in stored.items()}
    for name, tensor in written.items():
        assert (tensor.dtype, tensor.shape) == (stored[name].dtype, stored[name].shape)
        assert same_bytes(tensor, stored[name]), name


def test_one_scale_for_a_matrix_that_covers_it_gives_the_bytes_of_modelopt():
    item, weight = FP8["algorithms"]["FP8"], published(FP8["original"], torch.float32, (4, 128))
    grid = GRIDS["fp8-tensor"].fit(weight, Float8TensorSpec(), Fitting(clip="minmax", scale_dtype=torch.float32))
    codes = published(item["weight"], torch.uint8, (4, 128))
    assert float(grid.scale[0]) == pytest.approx(float(published(item["weight_scale"], torch.float32, ())), rel=2**-11)
    assert (grid.encode(weight) == codes).float().mean() > 0.99  # scales are exact in float16 too
    found = GRIDS["fp8-tensor"].fit(weight, Float8TensorSpec(), Fitting(scale_dtype=torch.float32))
    losses = [float((held.decode(held.encode(weight)) - weight).square().sum()) for held in (found, grid)]
    assert losses[0] < losses[1]


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


def test_blocks_of_fp8_are_called_as_modelopt_does():
    """In small letters: TensorRT-LLM takes no others."""
    files = OURS.config(model({"": TiledFloatSpec(128, 128)}, inputs=INPUT_SPECS["fp8-group"]), {})
    assert files["config.json"]["quantization_config"]["quant_algo"] == "fp8_pb_wo"
    said = files["hf_quant_config.json"]["quantization"]
    assert (said["quant_algo"], said["group_size"]) == ("fp8_pb_wo", 128)


def test_modules_that_differ_have_their_algorithms_by_name():
    """As ModelOpt 0.47's `convert_hf_quant_config_format` groups them, scales found for each token told so."""
    leaves = {"q_proj": ("FP8_PER_CHANNEL_PER_TOKEN", Float8Spec(), "fp8-token"), "up_proj": ("NVFP4", NVFP4, "nvfp4")}
    leaves |= {"o_proj": ("FP8_PB_WO", TiledFloatSpec(128, 128), "fp8-group"), "down_proj": ("W4A16_NVFP4", NVFP4, "")}
    leaves |= {"v_proj": ("FP8", Float8TensorSpec(), "fp8-tensor"), "k_proj": ("MXFP8", Mxfp8Spec(), "mxfp8")}
    entries = [matrix(leaf, grid, inputs=INPUT_SPECS.get(inputs)) for leaf, (_, grid, inputs) in leaves.items()]
    assert OURS.refuses(entries, {}) is None
    files = OURS.config([*entries, matrix("gate_proj", None)], {})
    said, other = files["config.json"]["quantization_config"], files["hf_quant_config.json"]["quantization"]
    sizes = {"NVFP4": 16, "W4A16_NVFP4": 16, "FP8_PB_WO": 128, "MXFP8": 32}
    layers = {
        leaf: {
            "quant_algo": "fp8_pb_wo" if name == "FP8_PB_WO" else name,
            **({"group_size": sizes[name]} if name in sizes else {}),
        }
        for leaf, (name, *_) in leaves.items()
    }
    ignored = ["gate_proj", "lm_head"]
    assert other == {
        "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "exclude_modules": ignored,
        "quantized_layers": layers,
    }  # fmt: skip
    assert (said["quant_algo"], said["quantized_layers"], said["ignore"]) == ("MIXED_PRECISION", layers, ignored)
    groups = {group["targets"][0]: group for group in said["config_groups"].values()}
    fp8 = {"dynamic": False, "num_bits": 8, "type": "float"}
    assert groups["v_proj"] == {"input_activations": fp8, "weights": fp8, "targets": ["v_proj"]}
    assert groups["q_proj"]["weights"] == {**fp8, "strategy": "channel"}
    assert groups["q_proj"]["input_activations"] == {**fp8, "dynamic": True}
    assert groups["k_proj"]["weights"] == {**fp8, "group_size": 32}
    assert groups["down_proj"]["input_activations"] is None
    for leaf, (_, grid, _) in leaves.items():
        assert OURS.grid(leaf, {"quantization_config": said}) == grid
    assert OURS.grid("gate_proj", {"quantization_config": said}) is None


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([matrix("m", NVFP4, inputs=INPUT_SPECS["int8-token"])], "no algorithm of ModelOpt has inputs of int8-token"),
        ([matrix("m", Float8Spec())], "no algorithm of ModelOpt has inputs of 16 bits beside fp8-row"),
        ([matrix("m", Mxfp8Spec(), inputs=INPUT_SPECS["fp8-token"])], "inputs of fp8-token beside mxfp8"),
        ([matrix("m", TiledFloatSpec(128, 128), (128, 192), inputs=INPUT_SPECS["fp8-group"])], "groups of 128 do not"),
        ([matrix("m", NVFP4, transposed=True)], "Conv1D"),
        ([matrix("m")], "cannot hold int4"),
    ],
)
def test_what_has_no_algorithm_is_refused(entries, words):
    what, way = OURS.refuses(entries, {})
    assert words in what
    assert way
