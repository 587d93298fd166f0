"""Blocks of small floats: what is announced is written, comes back to the bit, or is refused."""

import pytest
import torch

from entries import FORMATS, PACKED, matrix, model
from llmcompress.grids.base import INPUT_SPECS
from llmcompress.grids.coded import Coded
from llmcompress.grids.fitting import fit
from llmcompress.grids.mxfp4 import Mxfp4Spec
from llmcompress.grids.mxfp8 import Mxfp8Spec
from llmcompress.grids.nvfp4 import Nvfp4Spec
from llmcompress.grids.tiled_floats import TiledFloatSpec

BLOCK, MX, FP8 = TiledFloatSpec(128, 128), Mxfp8Spec(), FORMATS["fp8"]
NAMED = "model.layers.0.mlp.up_proj"
TYPES = {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32", torch.bfloat16: "BF16"}


@pytest.mark.parametrize(
    ("form", "spec", "inputs", "width", "stored"),
    [
        ("compressed-tensors", BLOCK, None, 200, ("BF16", (2, 2))),
        ("compressed-tensors", BLOCK, "fp8-group", 256, ("BF16", (2, 2))),
        ("compressed-tensors", MX, None, 96, ("U8", (130, 3))),
        ("compressed-tensors", MX, "mxfp8", 96, ("U8", (130, 3))),
        ("compressed-tensors", Mxfp4Spec(), "mxfp4", 96, ("U8", (130, 3))),
        ("compressed-tensors", Nvfp4Spec(), "nvfp4", 96, ("F8_E4M3", (130, 6))),
        ("fp8", BLOCK, "fp8-group", 256, ("F32", (2, 2))),
    ],
)
def test_what_is_written_is_read_again(form, spec, inputs, width, stored):
    format_, rounding = FORMATS[form], None if inputs is None else INPUT_SPECS[inputs]
    entry = matrix(NAMED, spec, (130, width), inputs=rounding)
    weight = torch.randn(130, width, generator=torch.Generator().manual_seed(0)) * 0.1
    grid = fit(weight, spec, scale_dtype=torch.bfloat16)
    fixed = rounding is not None and not rounding.dynamic
    coded = Coded(grid.encode(weight), grid, torch.tensor([123.25]) if fixed else None)
    assert format_.refuses([entry], {}) is None
    tensors, layout = format_.encode(entry, coded), {item.name: item for item in format_.layout(entry)}
    assert {name: (TYPES[part.dtype], tuple(part.shape)) for name, part in tensors.items()} == {
        name: (item.dtype, item.shape) for name, item in layout.items()
    }
    scales = next(item for name, item in layout.items() if "scale" in name)
    assert (scales.dtype, scales.shape) == stored
    config = format_.config([entry], {})["config.json"]
    assert [other for other in FORMATS if FORMATS[other].recognises(config)] == [form]
    assert format_.shape(NAMED, layout, tensors.__getitem__, config) == (130, width)
    again = format_.decode(NAMED, tensors.__getitem__, config)
    assert again.grid.spec == spec
    assert torch.equal(again.codes, coded.codes)
    assert torch.equal(again.decode(), coded.decode())
    found = format_.inputs(NAMED, tensors.__getitem__, config)
    assert (found and found.spec) == rounding
    if fixed:
        assert layout[f"{NAMED}.input_global_scale"].dtype == "F32"
        assert found.scale.tolist() == [123.25]


def test_the_configs_are_those_of_the_library_and_of_vendors():
    """As presets FP8_BLOCK and MXFP8 of compressed-tensors have it, and as DeepSeek writes it."""
    block = PACKED.config([matrix(NAMED, BLOCK, inputs=INPUT_SPECS["fp8-group"])], {})["config.json"]
    (group,) = block["quantization_config"]["config_groups"].values()
    assert group["format"] == block["quantization_config"]["format"] == "float-quantized"
    assert group["weights"] == {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "group_size": None, "dynamic": False,
        "block_structure": [128, 128], "actorder": None,
    }  # fmt: skip
    assert group["input_activations"] == {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": True
    }  # fmt: skip
    mx = PACKED.config([matrix(NAMED, MX, inputs=INPUT_SPECS["mxfp8"])], {})["config.json"]
    (group,) = mx["quantization_config"]["config_groups"].values()
    assert group["format"] == mx["quantization_config"]["format"] == "mxfp8-quantized"
    assert group["weights"] == {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False,
        "scale_dtype": "torch.uint8", "actorder": None,
    }  # fmt: skip
    assert group["input_activations"]["scale_dtype"] == "torch.uint8"
    nv = PACKED.config([matrix(NAMED, Nvfp4Spec(), inputs=INPUT_SPECS["nvfp4"])], {})["config.json"]
    (group,) = nv["quantization_config"]["config_groups"].values()
    assert group["input_activations"] == {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16,
        "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn",
    }  # fmt: skip
    entries = model({"layers.1.*down": None, "": BLOCK}, inputs=INPUT_SPECS["fp8-group"])
    assert FP8.config(entries, {})["config.json"]["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.layers.1.mlp.down_proj", "lm_head"],
    }


@pytest.mark.parametrize(
    ("form", "spec", "inputs", "width", "words"),
    [
        ("compressed-tensors", BLOCK, "fp8-token", 256, "not multiplied by any engine"),
        ("compressed-tensors", BLOCK, "mxfp8", 256, "not multiplied by any engine"),
        ("compressed-tensors", BLOCK, "fp8-group", 200, "groups of 128 do not divide the 200 inputs"),
        ("compressed-tensors", MX, "fp8-group", 256, "not multiplied by any engine"),
        ("compressed-tensors", MX, None, 200, "does not divide"),
        ("compressed-tensors", Nvfp4Spec(), "mxfp4", 256, "not multiplied by any engine"),
        ("compressed-tensors", Mxfp4Spec(), "nvfp4", 256, "not multiplied by any engine"),
        ("compressed-tensors", Nvfp4Spec(), "int8-token", 256, "not multiplied by any engine"),
        ("fp8", BLOCK, None, 256, "engines round the inputs"),
        ("fp8", BLOCK, "fp8-group", 200, "groups of 128 do not divide the 200 inputs"),
        ("fp8", MX, "mxfp8", 256, "cannot hold mxfp8"),
    ],
)
def test_what_no_engine_reads_is_refused(form, spec, inputs, width, words):
    entry = matrix(NAMED, spec, (130, width), inputs=None if inputs is None else INPUT_SPECS[inputs])
    what, way = FORMATS[form].refuses([entry], {})
    assert words in what
    assert way
