"""What the formats make of a matrix: the words of other writers, layouts known beforehand, and the way back."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import llmcompress.formats
from llmcompress.errors import CheckpointError, RunError
from llmcompress.formats.base import Entry, TensorSpec
from llmcompress.grids.base import PER_ROW
from llmcompress.grids.coded import Coded
from llmcompress.grids.integer import IntegerGrid, IntegerSpec, fit
from llmcompress.grids.scales import natural_groups
from llmcompress.registry import discover

FORMATS = discover(llmcompress.formats, "FORMAT")
GPTQ, AWQ, PACKED = FORMATS["gptq"], FORMATS["awq"], FORMATS["compressed-tensors"]
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def entry_of(rows, width, grid, dtype="F16", **about):
    shape = (width, rows) if about.get("transposed") else (rows, width)
    return Entry(TensorSpec("m.weight", dtype, shape), grid=grid, block=True, linear=True, **about)


def coded_of(rows, width, grid, dtype="F16", seed=0):
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    fitted = fit(weight, grid, scale_dtype=DTYPES[dtype])
    return Coded(fitted.encode(weight), fitted)


def config_of(format_, entry):
    return {"model_type": "llama", **format_.config([entry], {})["config.json"]}


def words(text):
    return torch.tensor([int(word, 16) for word in text.split()]).to(torch.uint32).view(torch.int32)


def reader(tensors):
    return tensors.__getitem__


def two_groups():
    """The golden matrix of GPTQModel with two groups: 32 inputs, 8 outputs."""
    grid = IntegerSpec(4, 16, symmetric=False)
    zero = torch.stack([torch.full((8,), 8.0), torch.arange(8) + 1.0], dim=1)
    fitted = IntegerGrid(grid, torch.full((8, 2), 0.25), zero, natural_groups(grid, 32))
    codes = (7 * torch.arange(32) + 3 * torch.arange(8).view(-1, 1)) % 16
    return entry_of(8, 32, grid), Coded(codes.to(torch.uint8), fitted)


def test_gptq_tensors_are_those_of_gptqmodel():
    entry, coded = two_groups()
    tensors = GPTQ.encode(entry, coded)
    assert torch.equal(tensors["m.qweight"][:, 0], words("1a3c5e70 92b4d6f8 1a3c5e70 92b4d6f8"))
    assert torch.equal(tensors["m.qweight"][:, 7], words("6f81a3c5 e7092b4d 6f81a3c5 e7092b4d"))
    assert torch.equal(tensors["m.qzeros"][:, 0], words("88888888 87654321"))  # asymmetric: format v2
    assert tensors["m.scales"].shape == (2, 8)
    assert tensors["m.g_idx"].tolist() == [0] * 16 + [1] * 16


def test_both_zero_point_conventions_of_gptq_are_read():
    entry, coded = two_groups()
    tensors = GPTQ.encode(entry, coded)
    config = config_of(GPTQ, entry)
    assert config["quantization_config"]["checkpoint_format"] == "gptq_v2"
    old = dict(tensors, **{"m.qzeros": words("77777777 76543210").view(2, 1)})
    for settings_, stored in (
        ({"checkpoint_format": "gptq"}, old),
        ({"checkpoint_format": "gptq_v2"}, tensors),
        ({}, tensors),
    ):
        read = GPTQ.decode("m", reader(stored), {"quantization_config": {**config["quantization_config"], **settings_}})
        assert torch.equal(read.decode(), coded.decode())
    unnamed = {k: v for k, v in config["quantization_config"].items() if k not in ("checkpoint_format", "format")}
    assert torch.equal(GPTQ.decode("m", reader(old), {"quantization_config": unnamed}).decode(), coded.decode())


@pytest.mark.parametrize(("bits", "word"), [(2, "55555555"), (4, "77777777"), (8, "7f7f7f7f")])
def test_symmetric_gptq_has_the_zero_points_that_engines_assume(bits, word):
    grid = IntegerSpec(bits, 32)
    tensors = GPTQ.encode(entry_of(32, 64, grid), coded_of(32, 64, grid))
    assert set(tensors["m.qzeros"].flatten().tolist()) == set(words(word).tolist())


def golden_awq():
    """The golden matrix of AutoAWQ: 4 inputs in groups of 2, 32 outputs."""
    grid = IntegerSpec(4, 2, symmetric=False)
    zero = torch.stack([torch.arange(32) % 16, torch.full((32,), 8)], dim=1).to(torch.float32)
    fitted = IntegerGrid(grid, torch.full((32, 2), 0.25), zero, natural_groups(grid, 4))
    codes = (torch.arange(32).view(-1, 1) + 5 * torch.arange(4)) % 16
    return entry_of(32, 4, grid), Coded(codes.to(torch.uint8), fitted)


def test_awq_tensors_are_those_of_autoawq():
    entry, coded = golden_awq()
    tensors = AWQ.encode(entry, coded)
    assert torch.equal(tensors["m.qweight"][:, 0], words("75316420 ca86b975 1fdb0eca 6420531f"))
    assert torch.equal(tensors["m.qweight"][:, 3], words("fdb9eca8 420e31fd 97538642 eca8db97"))
    assert torch.equal(tensors["m.qzeros"][0], words("75316420 fdb9eca8 75316420 fdb9eca8"))
    assert torch.equal(tensors["m.qzeros"][1], words("88888888 88888888 88888888 88888888"))
    assert (tensors["m.scales"].shape, tensors["m.scales"].dtype) == ((2, 32), torch.float16)


def test_awq_without_zero_points_says_so_and_stores_the_middle():
    grid = IntegerSpec(4, 32)
    entry = entry_of(32, 64, grid)
    tensors = AWQ.encode(entry, coded_of(32, 64, grid))
    assert config_of(AWQ, entry)["quantization_config"]["zero_point"] is False
    assert set(tensors["m.qzeros"].flatten().tolist()) == set(words("88888888").tolist())
    config = config_of(AWQ, entry)
    with pytest.raises(CheckpointError, match="zero_point is false"):
        AWQ.decode("m", reader({**tensors, "m.qzeros": tensors["m.qzeros"] + 1}), config)


def test_awq_is_read_under_the_names_of_either_writer_and_in_no_other_version():
    entry, coded = golden_awq()
    tensors = AWQ.encode(entry, coded)
    for settings_ in (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 2, "zero_point": True},
        {"quant_method": "awq", "bits": 4, "group_size": 2, "zero_point": True, "version": "GEMM"},
    ):
        config = {"quantization_config": settings_}
        assert AWQ.recognises(config)
        assert torch.equal(AWQ.decode("m", reader(tensors), config).decode(), coded.decode())
    assert not AWQ.recognises({"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}})
    for wrong in ({"bits": 8, "group_size": 2}, {"bits": 4, "group_size": 4}, {"bits": 4, "group_size": 3}):
        with pytest.raises(CheckpointError):
            AWQ.decode("m", reader(tensors), {"quantization_config": wrong})


def test_compressed_tensors_are_those_of_its_own_quantiser():
    """W4A16, symmetric and asymmetric by groups of 4: codes and scales of compressed-tensors 0.20.0."""
    symmetric = IntegerSpec(4, 4)
    scale = torch.tensor([[0.26666668, 0.053333335], [0.80000001, 1]])
    codes = torch.tensor([[-4, 2, 1, 7, 2, -4, 6, -8], [0, 4, 7, 2, -8, 7, 1, -1]]) + 8
    fitted = IntegerGrid(symmetric, scale, torch.full((2, 2), 8.0), natural_groups(symmetric, 8))
    tensors = PACKED.encode(entry_of(2, 8, symmetric, "F32"), Coded(codes.to(torch.uint8), fitted))
    assert torch.equal(tensors["m.weight_packed"][:, 0], words("0e4af9a4 79f0afc8"))
    assert torch.equal(tensors["m.weight_scale"], scale)
    assert tensors["m.weight_shape"].tolist() == [2, 8]
    assert "m.weight_zero_point" not in tensors

    asymmetric = IntegerSpec(4, 4, symmetric=False)
    zero = torch.tensor([[-3.0, 1.0], [-8.0, 0.0]]) + 8
    codes = torch.tensor([[-8, 0, -2, 7, 3, -3, 7, -8], [-8, 0, 7, -4, -8, 7, 1, -1]]) + 8
    fitted = IntegerGrid(asymmetric, torch.ones(2, 2), zero, natural_groups(asymmetric, 8))
    tensors = PACKED.encode(entry_of(2, 8, asymmetric, "F32"), Coded(codes.to(torch.uint8), fitted))
    assert torch.equal(tensors["m.weight_packed"][:, 0], words("0f5bf680 79f04f80"))
    assert torch.equal(tensors["m.weight_zero_point"], words("00000005 00000089").view(1, 2))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["compressed-tensors", "dense", "gptq"]),
    bits=st.sampled_from([2, 3, 4, 5, 6, 8]),
    symmetric=st.booleans(),
    dtype=st.sampled_from(sorted(DTYPES)),
    rows=st.integers(1, 40),
    groups=st.integers(1, 3),
    size=st.sampled_from([PER_ROW, 5, 8, 32]),
    transposed=st.booleans(),
)
def test_what_is_written_is_what_was_announced_and_decodes_to_the_same(
    name, bits, symmetric, dtype, rows, groups, size, transposed
):
    format_ = FORMATS[name]
    width = 24 * groups if size == PER_ROW else size * groups
    if bits == 3:
        rows, width = 32, width * 32
    if name == "awq":
        bits, transposed, rows = 4, False, -(-rows // 32) * 32
    grid = IntegerSpec(bits, size, symmetric)
    entry = entry_of(rows, width, grid, dtype, transposed=transposed)
    assume(format_.refuses([entry], {}) is None)
    coded = coded_of(rows, width, grid, dtype, seed=rows)
    tensors = format_.encode(entry, coded)
    assert [(name, tuple(tensor.shape)) for name, tensor in tensors.items()] == [
        (spec.name, spec.shape) for spec in format_.layout(entry)
    ]
    types = {"I32": torch.int32, "I64": torch.int64, **DTYPES}
    assert all(tensors[spec.name].dtype == types[spec.dtype] for spec in format_.layout(entry))
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    config = config_of(format_, entry)
    assert [other for other in FORMATS if FORMATS[other].recognises(config)] == [name]
    read = format_.decode("m", reader(tensors), config)
    if name == "dense":
        assert read is None
        stored = tensors["m.weight"].t() if transposed else tensors["m.weight"]
        assert torch.equal(stored, coded.decode().to(DTYPES[dtype]))
    else:
        assert read.grid.spec == grid
        assert torch.equal(read.codes, coded.codes)
        assert torch.equal(read.decode(), coded.decode())


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed-tensors"])
def test_a_module_without_codes_is_not_quantised(name):
    def nothing(tensor):
        raise KeyError(tensor)

    grid = IntegerSpec(4, 32)
    assert FORMATS[name].decode("other", nothing, config_of(FORMATS[name], entry_of(32, 32, grid))) is None


def test_groups_in_activation_order_come_back_in_that_order():
    grid = IntegerSpec(4, 16)
    entry = entry_of(32, 64, grid, permuted=True)
    coded = coded_of(32, 64, grid)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    shuffled = Coded(coded.codes, replace(coded.grid, group_index=coded.grid.group_index[order]))
    tensors = GPTQ.encode(entry, shuffled)
    config = config_of(GPTQ, entry)
    assert config["quantization_config"]["desc_act"] is True
    assert torch.equal(tensors["m.g_idx"], coded.grid.group_index[order].to(torch.int32))
    assert torch.equal(GPTQ.decode("m", reader(tensors), config).decode(), shuffled.decode())
    with pytest.raises(RunError, match="permuted"):
        GPTQ.encode(replace(entry, permuted=False), shuffled)


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed-tensors"])
def test_scales_that_the_stored_type_cannot_hold_are_an_error_and_not_rounded(name):
    grid = IntegerSpec(4, 32)
    coded = coded_of(32, 64, grid, "F16")
    scale = coded.grid.scale.clone()
    scale[3, 1] = 0.1  # in no 16-bit type
    wrong = Coded(coded.codes, replace(coded.grid, scale=scale))
    with pytest.raises(RunError, match="scales of m are not exact in F16"):
        FORMATS[name].encode(entry_of(32, 64, grid), wrong)


@pytest.mark.parametrize("name", sorted(name for name, item in FORMATS.items() if item.writes))
@pytest.mark.parametrize("part", ["codes", "zero", "grid"])
def test_codes_that_do_not_belong_to_their_grid_are_an_error(name, part):
    grid = IntegerSpec(4, 32)
    coded = coded_of(32, 64, grid)
    wrong = {
        "codes": Coded(coded.codes + 9, coded.grid),
        "zero": Coded(coded.codes, replace(coded.grid, zero=coded.grid.zero + 1)),
        "grid": coded_of(32, 64, IntegerSpec(2, 32)),
    }[part]
    with pytest.raises(RunError, match="m "):
        FORMATS[name].encode(entry_of(32, 64, grid), wrong)


def test_files_that_contradict_their_config_are_refused():
    entry, coded = two_groups()
    tensors, config = GPTQ.encode(entry, coded), config_of(GPTQ, entry)
    other = {"quantization_config": {**config["quantization_config"], "bits": 8}}
    with pytest.raises(CheckpointError, match="int8-g16-asym"):
        GPTQ.decode("m", reader(tensors), other)
    far = dict(tensors, **{"m.g_idx": tensors["m.g_idx"] + 1})
    with pytest.raises(CheckpointError, match="group that does not exist"):
        GPTQ.decode("m", reader(far), config)
