"""Formats of NF4, int8, codebooks and progressive groups: what is announced is written, and comes back to the bit."""

import json
from dataclasses import replace

import pytest
import torch

from entries import FORMATS, matrix, model
from llmcompress.errors import CheckpointError, RunError
from llmcompress.grids.base import INPUT_SPECS
from llmcompress.grids.codebook import CodebookSpec
from llmcompress.grids.coded import Coded
from llmcompress.grids.fitting import fit
from llmcompress.grids.int8 import Int8Spec
from llmcompress.grids.integer import IntegerSpec
from llmcompress.grids.nf4 import Nf4Spec
from llmcompress.grids.progressive import ProgressiveSpec

BNB = FORMATS["bitsandbytes"]
CASES = [
    ("bitsandbytes", Nf4Spec()),
    ("bitsandbytes", Nf4Spec(double=False)),
    ("bitsandbytes", Int8Spec()),
    ("codebook", CodebookSpec(2)),
    ("codebook", CodebookSpec(3)),
    ("codebook", CodebookSpec(4)),
    ("int8-outliers", Int8Spec(5)),
    ("qoq", ProgressiveSpec(32)),
    ("qoq", ProgressiveSpec(64)),
]
TYPES = {"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64} | {
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
}  # fmt: skip


def coded_on(spec, rows=20, width=192):
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)) * 0.03
    if isinstance(spec, Int8Spec) and spec.outliers:
        index = torch.tensor([2, 30, 31, 190, -1])
        inner = fit(weight[:, 4:], Int8Spec(), clip="search")
        return inner.beside_outliers(inner.encode(weight[:, 4:]), index, weight[:, index[:4]], width)
    grid = fit(weight, spec, clip="search")
    return Coded(grid.encode(weight), grid)


def reader(tensors):
    return lambda name: tensors[name]


@pytest.mark.parametrize(("name", "spec"), CASES, ids=str)
def test_what_is_written_is_what_was_announced_and_decodes_to_the_same(name, spec):
    format_, coded = FORMATS[name], coded_on(spec)
    entry = matrix("model.layers.0.m", spec, (20, 192))
    assert format_.refuses([entry], {}) is None
    tensors = format_.encode(entry, coded)
    layout = format_.layout(entry)
    assert [(key, value.dtype, tuple(value.shape)) for key, value in tensors.items()] == [
        (item.name, TYPES[item.dtype], item.shape) for item in layout
    ]
    own = sum(
        item.nbytes for item in layout if not item.name.endswith(("_map", "__nf4", "_shape", "_format", "_index"))
    )
    assert abs(8 * own / (20 * 192) - spec.bits_per_weight(192)) < 0.01
    config = format_.config([entry], {})["config.json"]
    assert [other for other in FORMATS if FORMATS[other].recognises(config)] == [name]
    specs = {item.name: item for item in layout}
    assert format_.shape(entry.module, specs, reader(tensors), config) == (20, 192)
    read = format_.decode(entry.module, reader(tensors), config)
    assert read.grid.spec == spec
    assert torch.equal(read.codes, coded.codes)
    assert torch.equal(read.decode(), coded.decode())
    assert format_.decode("other", reader(tensors), config) is None


def test_the_first_of_two_codes_lies_in_the_high_bits():
    coded = coded_on(Nf4Spec())
    tensors = BNB.encode(matrix("m", Nf4Spec(), (20, 192)), coded)
    first, second = int(coded.codes[0, 0]), int(coded.codes[0, 1])
    assert int(tensors["m.weight"][0, 0]) == 16 * first + second


def test_the_state_is_json_of_a_size_known_beforehand():
    entry = matrix("m", Nf4Spec(), (20, 192))
    tensors = BNB.encode(entry, coded_on(Nf4Spec()))
    state = json.loads(bytes(tensors["m.weight.quant_state.bitsandbytes__nf4"].tolist()))
    offset = state.pop("nested_offset")
    assert state == {
        "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [20, 192],
        "nested_blocksize": 256, "nested_dtype": "float32",
    }  # fmt: skip
    assert offset == float(coded_on(Nf4Spec()).grid.common[0])


def test_the_config_is_that_of_transformers():
    four = BNB.config(model({"": Nf4Spec()}), {})["config.json"]["quantization_config"]
    assert four == {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": ["lm_head"],
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
    }
    eight = BNB.config(model({"layers.1.*down": None, "": Int8Spec()}), {})["config.json"]["quantization_config"]
    assert (eight["load_in_4bit"], eight["load_in_8bit"]) == (False, True)
    assert eight["llm_int8_skip_modules"] == ["model.layers.1.mlp.down_proj", "lm_head"]


@pytest.mark.parametrize(
    ("name", "entries", "words"),
    [
        ("bitsandbytes", [matrix("m", IntegerSpec(4, 64))], "cannot hold int4-g64-sym"),
        ("bitsandbytes", [matrix("m", CodebookSpec(3))], "cannot hold codebook3-row"),
        ("bitsandbytes", [matrix("m", Int8Spec(4))], "stores none"),
        ("bitsandbytes", [matrix("m", Nf4Spec(), transposed=True)], "Conv1D"),
        ("bitsandbytes", [matrix("m", Nf4Spec(), (64, 96))], "does not divide the 96 inputs"),
        ("bitsandbytes", [matrix("a", Nf4Spec()), matrix("b", Int8Spec())], "one type as a whole"),
        ("bitsandbytes", [matrix("lm_head", Nf4Spec(), block=False)], "head"),
        ("bitsandbytes", [matrix("m", Nf4Spec(), dtype="F64")], "F64"),
        ("bitsandbytes", [matrix("m", None)], "no module is to be quantised"),
        ("int8-outliers", [matrix("m", Int8Spec())], "0 of the 128 inputs"),
        ("int8-outliers", [matrix("m", Int8Spec(128))], "128 of the 128 inputs"),
        ("codebook", [matrix("m", Nf4Spec())], "cannot hold nf4-double"),
        ("gptq", [matrix("m", Nf4Spec())], "cannot hold nf4-double"),
        ("gptq", [matrix("m", ProgressiveSpec(32))], "cannot hold progressive-g32"),
        ("qoq", [matrix("m", IntegerSpec(4, 32, False))], "cannot hold int4-g32-asym"),
        ("qoq", [matrix("m", ProgressiveSpec(128), (64, 96))], "does not divide the 96 inputs"),
        ("qoq", [matrix("m", ProgressiveSpec(32), permuted=True)], "groups in activation order"),
        ("qoq", [matrix("m", ProgressiveSpec(32), inputs=INPUT_SPECS["int8-tensor"])], "rounded to int8-tensor"),
        ("compressed-tensors", [matrix("m", CodebookSpec(4))], "cannot hold codebook4-row"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(name, entries, words):
    what, way_out = FORMATS[name].refuses(entries, {})
    assert words in what
    assert way_out


@pytest.mark.parametrize("name", ["int8-token", None])
def test_qoq_says_how_inputs_are_rounded(name):
    qoq, spec = FORMATS["qoq"], None if name is None else INPUT_SPECS[name]
    entries = [matrix("m", ProgressiveSpec(32), inputs=spec), matrix("n", None)]
    config = qoq.config(entries, {})["config.json"]
    assert config["quantization_config"]["modules"] == {"m": {"group_size": 32, "inputs": name}}
    found = qoq.inputs("m", reader({}), config)
    assert (found and found.spec) == spec


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("scale_group", lambda t: t * 0, "scales or zero points"),
        ("scale_group", lambda t: t * 0 + 17, "scales or zero points"),
        ("zero_group", lambda t: t + 16, "scales or zero points"),
        ("scale_group", lambda t: t * 0 + 16, "leave the range of int8"),
        ("scale_group", lambda t: t[:, :-1], "shapes"),
        ("scale_row", lambda t: t[:-1], "shapes"),
    ],
)
def test_files_of_codes_that_leave_int8_or_of_other_shapes_are_refused(part, change, words):
    qoq, spec = FORMATS["qoq"], ProgressiveSpec(32)
    entry = matrix("m", spec, (20, 192))
    tensors, config = qoq.encode(entry, coded_on(spec)), qoq.config([entry], {})["config.json"]
    with pytest.raises(CheckpointError, match=words):
        qoq.decode("m", reader({**tensors, f"m.{part}": change(tensors[f"m.{part}"])}), config)


def test_codes_beyond_the_protective_range_are_never_written():
    spec = ProgressiveSpec(32)
    coded = coded_on(spec)
    beyond = Coded(coded.codes * 0 + 15, replace(coded.grid, multiple=coded.grid.multiple * 0 + 16))
    with pytest.raises(RunError, match="protective range"):
        FORMATS["qoq"].encode(matrix("m", spec, (20, 192)), beyond)


def test_scales_quantised_over_more_than_one_matrix_are_an_error():
    weight = torch.randn(40, 192, generator=torch.Generator().manual_seed(0))
    grid = fit(weight, Nf4Spec())
    second = Coded(grid.encode(weight), grid).rows(slice(20, 40))  # whose nested block began in the first
    wrong = replace(second, grid=replace(second.grid, nested=second.grid.nested + torch.arange(20)[:, None] / 1e3))
    with pytest.raises(RunError, match="together with those of another matrix"):
        BNB.encode(matrix("m", Nf4Spec(), (20, 192)), wrong)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("weight.quant_map", torch.zeros(16)),
        ("weight.nested_quant_map", torch.zeros(256)),
        ("weight.absmax", torch.zeros(3, dtype=torch.uint8)),
        ("weight.nested_absmax", torch.zeros(2)),
        ("weight", torch.zeros(5, 1, dtype=torch.uint8)),
    ],
)
def test_files_of_other_4_bit_types_or_shapes_are_refused(part, value):
    tensors = BNB.encode(matrix("m", Nf4Spec(), (20, 192)), coded_on(Nf4Spec()))
    with pytest.raises(CheckpointError, match="m"):
        BNB.decode("m", reader({**tensors, f"m.{part}": value}), {})
