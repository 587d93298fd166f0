"""Weights of one byte and rounded inputs in compressed-tensors: bytes, config, and what no format holds."""

import pytest
import torch

from entries import DENSE, FORMATS, GPTQ, PACKED, matrix, model
from llmcompress.errors import CheckpointError, RunError
from llmcompress.grids.base import INPUT_SPECS
from llmcompress.grids.coded import Coded
from llmcompress.grids.fitting import fit
from llmcompress.grids.float8 import Float8Spec
from llmcompress.grids.integer import IntegerGrid, IntegerSpec

INT8, FP8, W4 = IntegerSpec(8, -1), Float8Spec(), IntegerSpec(4, 32)
NAMED = "model.layers.0.mlp.up_proj"


def coded(entry, scale=None):
    weight = torch.randn(entry.out_features, entry.in_features, generator=torch.Generator().manual_seed(0)) * 0.1
    grid = fit(weight, entry.grid, scale_dtype=torch.bfloat16)
    return Coded(grid.encode(weight), grid, None if scale is None else torch.tensor([scale]))


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(
    ("grid", "inputs", "kind", "stored"),
    [
        (INT8, "int8", "int-quantized", "I8"),
        (FP8, "fp8", "float-quantized", "F8_E4M3"),
        (W4, "int8", "pack-quantized", "I32"),
        (FP8, None, "float-quantized", "F8_E4M3"),
        (INT8, None, "pack-quantized", "I32"),
    ],
)
def test_what_is_written_is_read_again(grid, inputs, kind, stored, dynamic):
    spec = None if inputs is None else INPUT_SPECS[f"{inputs}-{'token' if dynamic else 'tensor'}"]
    fixed = spec is not None and not dynamic
    entry = matrix(NAMED, grid, (48, 64), inputs=spec)
    item = coded(entry, 0.5 if fixed else None)
    tensors = PACKED.encode(entry, item)
    names = {torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3", torch.int32: "I32", torch.bfloat16: "BF16"}
    layout = {spec.name: spec for spec in PACKED.layout(entry)}
    assert list(layout) == list(tensors)
    for name, tensor in tensors.items():
        assert tuple(tensor.shape) == layout[name].shape
        assert names.get(tensor.dtype, "I64") == layout[name].dtype
    assert stored in {spec.dtype for spec in layout.values()}
    settings = PACKED.config([entry], {})["config.json"]["quantization_config"]
    config = {"quantization_config": settings}
    assert settings["format"] == settings["config_groups"]["group_0"]["format"] == kind
    assert PACKED.recognises(config)
    assert PACKED.shape(NAMED, layout, tensors.__getitem__, config) == (48, 64)
    again = PACKED.decode(NAMED, tensors.__getitem__, config)
    assert torch.equal(again.codes, item.codes)
    assert torch.equal(again.decode(), item.decode())
    rounding = PACKED.inputs(NAMED, tensors.__getitem__, config)
    assert (rounding and rounding.spec) == spec
    assert not fixed or rounding.scale.tolist() == [0.5]


def test_bytes_of_integers_are_those_of_compressed_tensors():
    weight = torch.tensor([[-1, 0.5, 0.25, 2, 0.1, -0.2, 0.3, -0.4], [0, 3, 6, 1.5, -7.5, 7.5, 1, -1]])
    scale = weight.abs().amax(1, keepdim=True) / 127.5
    grid = IntegerGrid(INT8, scale, torch.full((2, 1), 128.0), torch.zeros(8, dtype=torch.int64))
    entry = matrix(NAMED, INT8, (2, 8), inputs=INPUT_SPECS["int8-token"], dtype="F32")
    tensors = PACKED.encode(entry, Coded(grid.encode(weight), grid))
    first, second = tensors[f"{NAMED}.weight"].tolist()
    assert first[:-1] == [-64, 32, 16, 127, 6, -13, 19]
    assert first[-1] in (-25, -26)  # -0.4 is 25.5 steps, to the last bit of a float32
    assert second == [0, 51, 102, 26, -128, 127, 17, -17]
    assert tensors[f"{NAMED}.weight_scale"].shape == (2, 1)


def test_several_schemes_make_a_config_of_several_kinds():
    entries = [
        matrix("model.layers.0.mlp.up_proj", INT8, inputs=INPUT_SPECS["int8-token"]),
        matrix("model.layers.0.mlp.down_proj", FP8, inputs=INPUT_SPECS["fp8-tensor"]),
        matrix("model.layers.0.self_attn.o_proj", W4),
    ]
    settings = PACKED.config(entries, {})["config.json"]["quantization_config"]
    assert settings["format"] == "mixed-precision"
    found = {group["targets"][0]: group for group in settings["config_groups"].values()}
    up, down, out = (found[entry.module] for entry in entries)
    assert [group["format"] for group in (up, down, out)] == ["int-quantized", "float-quantized", "pack-quantized"]
    assert up["input_activations"] == {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "group_size": None, "dynamic": True
    }  # fmt: skip
    assert down["input_activations"]["strategy"] == "tensor"
    assert down["input_activations"]["dynamic"] is False
    assert down["weights"]["type"] == "float"
    assert out["input_activations"] is None


@pytest.mark.parametrize(
    ("grid", "inputs", "said"),
    [
        (FP8, "int8-token", "not multiplied"),
        (INT8, "fp8-token", "not multiplied"),
        (IntegerSpec(8, 64), "int8-token", "one symmetric scale per row"),
        (IntegerSpec(8, -1, False), "int8-tensor", "one symmetric scale per row"),
    ],
)
def test_schemes_that_no_engine_multiplies_are_refused(grid, inputs, said):
    entry = matrix(NAMED, grid, inputs=INPUT_SPECS[inputs])
    what, way = PACKED.refuses([entry], {})
    assert said in what
    assert way


@pytest.mark.parametrize("name", ["gptq", "dense"])
def test_formats_that_cannot_say_that_inputs_are_rounded_refuse_them(name):
    entries = model({".": INT8}, inputs=INPUT_SPECS["int8-token"])
    what, way = FORMATS[name].refuses(entries, {})
    assert "inputs are rounded to int8-token" in what
    assert "--activations none" in way


def test_floats_fit_into_dense_and_not_into_gptq():
    entry = matrix(NAMED, FP8, (48, 64))
    assert DENSE.refuses([entry], {}) is None
    weight = DENSE.encode(entry, item := coded(entry))[f"{NAMED}.weight"]
    assert torch.equal(weight, item.decode().bfloat16())
    assert "fp8-row" in GPTQ.refuses([entry], {})[0]


def test_a_fixed_scale_must_be_there_when_it_was_planned_and_only_then():
    for inputs, scale in (("int8-tensor", None), ("int8-token", 0.5)):
        entry = matrix(NAMED, INT8, (48, 64), inputs=INPUT_SPECS[inputs])
        with pytest.raises(RunError, match="scale of its inputs"):
            PACKED.encode(entry, coded(entry, scale))


def group(weights=None, inputs=None):
    said = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", **(weights or {})}
    return {"quantization_config": {"config_groups": {"g": {"targets": ["Linear"], "weights": said, **(inputs or {})}}}}


def test_one_scale_for_a_whole_matrix_is_read_too():
    codes = torch.randint(-128, 128, (3, 8), dtype=torch.int8)
    tensors = {"m.weight": codes, "m.weight_scale": torch.tensor([0.25])}
    found = PACKED.decode("m", tensors.__getitem__, group({"strategy": "tensor"}))
    assert torch.equal(found.decode(), codes.float() / 4)


def test_ways_to_round_inputs_that_are_not_known_are_refused():
    said = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "token", "dynamic": True}
    with pytest.raises(CheckpointError, match="rounded in a way other"):
        PACKED.inputs("m", {}.__getitem__, group(inputs={"input_activations": said}))


def test_inputs_rounded_by_groups_are_left_as_they_are():
    said = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": True}
    assert PACKED.inputs("m", {}.__getitem__, group(inputs={"input_activations": said})) is None


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0])
def test_fixed_scales_that_are_none_are_refused(value):
    said = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
    tensors = {"m.input_scale": torch.tensor([value])}
    with pytest.raises(CheckpointError, match="not one positive number"):
        PACKED.inputs("m", tensors.__getitem__, group(inputs={"input_activations": said}))


def test_floats_that_are_no_numbers_are_refused():
    tensors = {
        "m.weight": torch.tensor([[0x7F, 1]], dtype=torch.uint8).view(torch.float8_e4m3fn),
        "m.weight_scale": torch.ones(1, 1),
    }
    with pytest.raises(CheckpointError, match="no numbers"):
        PACKED.decode("m", tensors.__getitem__, group({"type": "float"}))
