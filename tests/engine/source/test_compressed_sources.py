"""compressed-tensors checkpoints as others make them, by the library's own compressors, read as sources."""

import json

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.source.open import checkpoint_headers, open_checkpoint
from llmcompress.engine.source.quantised import code_grid
from llmcompress.errors import CheckpointError
from llmcompress.recipe import parse
from llmcompress.validate.verify import passed, verify
from shippedmodels import changed, shipped

UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"


def args(**options):
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**options))


SCHEMES = {
    "FP8": ("float-quantized", preset_name_to_scheme("FP8", ["Linear"])),
    "FP8_DYNAMIC": ("float-quantized", preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])),
    "FP8_BLOCK": ("float-quantized", preset_name_to_scheme("FP8_BLOCK", ["Linear"])),
    "W4A16": ("pack-quantized", args(num_bits=4, group_size=32, strategy="group", symmetric=True)),
    "W4A16_ASYM": ("pack-quantized", args(num_bits=4, group_size=32, strategy="group", symmetric=False)),
    "W3A16": ("pack-quantized", args(num_bits=3, group_size=64, strategy="group", symmetric=False)),
    "W8A8": ("int-quantized", preset_name_to_scheme("W8A8", ["Linear"])),
    "W8 asymmetric": ("int-quantized", args(num_bits=8, group_size=64, strategy="group", symmetric=False)),
    "NVFP4": ("nvfp4-pack-quantized", preset_name_to_scheme("NVFP4", ["Linear"])),
    "MXFP4": ("mxfp4-pack-quantized", preset_name_to_scheme("MXFP4", ["Linear"])),
    "MXFP8": ("mxfp8-quantized", preset_name_to_scheme("MXFP8", ["Linear"])),
}


def compressed(kind):
    """What the library stores of a matrix, and what it decompresses that to."""
    form, scheme = SCHEMES[kind]

    def parts(name, weight):
        weights, state = scheme.weights, {"weight": weight}
        strategy, size = str(weights.strategy), weights.group_size
        if strategy == "block":
            rows, columns = weights.block_structure
            tiles = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
            tiles = tiles.view(tiles.shape[0] // rows, rows, -1, columns).transpose(1, 2).flatten(2)
            low, high = tiles.amin(-1), tiles.amax(-1)
        elif strategy == "tensor":
            low, high = weight.min().reshape(1), weight.max().reshape(1)
        else:
            grouped = weight.view(len(weight), -1, size or weight.shape[1])
            low, high = grouped.amin(-1), grouped.amax(-1)
        if strategy == "tensor_group":
            state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
            known = {"global_scale": state["weight_global_scale"]}
        else:
            known = {}
        state["weight_scale"], state["weight_zero_point"] = calculate_qparams(low, high, weights, **known)
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(state, scheme)
        if scheme.input_activations is not None and scheme.input_activations.dynamic is False:
            stored["input_scale"] = torch.tensor([0.5])
        if strategy == "tensor_group":
            stored["input_global_scale"] = torch.tensor([100.0])
        return stored, compressor.decompress(stored, scheme)["weight"]

    return parts


def settings(kind):
    form, scheme = SCHEMES[kind]
    group = {**json.loads(scheme.model_dump_json()), "format": form}
    said = {"format": form, "quant_method": "compressed-tensors", "quantization_status": "compressed"}
    return {**said, "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*embed.*"]}


@pytest.fixture(scope="module")
def model(random_model_dir):
    return random_model_dir("llama", hidden_size=128, intermediate_size=192, num_key_value_heads=4)


@pytest.mark.parametrize("kind", SCHEMES)
def test_values_are_those_of_the_library(kind, model, tmp_path):
    values = shipped(model, tmp_path / "source", settings(kind), compressed(kind))
    checkpoint = open_checkpoint(checkpoint_headers(tmp_path / "source"))
    assert set(checkpoint.names()) == set(load_file(model / "model.safetensors"))
    for name, expected in values.items():
        found = checkpoint.read(name)
        if expected.dtype == torch.float32 and kind not in ("NVFP4", "MXFP4", "MXFP8"):
            assert torch.equal(found, expected), name
        else:  # the library decodes to 16 bits, here and there by way of them
            assert torch.allclose(found, expected.float(), rtol=2**-7, atol=0), name


@pytest.mark.parametrize("kind", ["NVFP4", "MXFP4", "MXFP8"])
def test_small_floats_are_those_of_brute_force(kind, model, tmp_path):
    shipped(model, tmp_path / "source", settings(kind), compressed(kind))
    tensors, found = (
        load_file(tmp_path / "source" / "model.safetensors"),
        open_checkpoint(checkpoint_headers(tmp_path / "source")).read(f"{UP}.weight"),
    )
    scale = tensors[f"{UP}.weight_scale"]
    if kind == "NVFP4":
        spread = (scale.float() / tensors[f"{UP}.weight_global_scale"]).double()
    else:
        spread = torch.exp2(scale.double() - 127)
    spread = spread.repeat_interleave(found.shape[1] // scale.shape[1], 1)
    if kind == "MXFP8":
        levels = tensors[f"{UP}.weight"].double()
    else:
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        table = torch.cat([table, -table])
        pairs = tensors[f"{UP}.weight_packed"].long()
        levels = torch.stack([table[pairs & 15], table[pairs >> 4]], -1).flatten(1)
    assert torch.equal(found, (levels * spread).float())


def rounded(source, out, **step):
    recipe = {"steps": [{"method": "rtn", **step}]}
    report = run(make_plan(parse(recipe), source, Options(out=out)))
    checks = verify(out, source)
    assert passed(checks), [check for check in checks if not check.ok]
    return report


@pytest.mark.parametrize("kind", ["FP8_BLOCK", "W4A16_ASYM", "NVFP4"])
def test_runs_begin_with_it_and_verify_knows_it_as_the_source(kind, model, tmp_path):
    shipped(model, tmp_path / "source", settings(kind), compressed(kind))
    report = rounded(tmp_path / "source", tmp_path / "out", bits=8, group_size=-1)
    assert {item["method"] for item in report["linears"]} == {"rtn"}
    assert [entry["subject"] for entry in report["ledger"] if entry["kind"] == "requantised"] == ["14 matrices"]


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("W4A16", {"bits": 4, "group_size": 32}),
        ("MXFP4", {"bits": 4, "type": "mxfp4"}),
        ("FP8_DYNAMIC", {"bits": 8, "type": "fp8", "activations": "fp8-token"}),
    ],
)
def test_codes_are_kept_where_the_grid_is_the_same(kind, step, model, tmp_path):
    def parts(name, weight):
        stored, value = compressed(kind)(name, weight)
        if stored["weight_scale"].dtype == torch.float32:
            stored["weight_scale"] = stored["weight_scale"].bfloat16()
        return stored, value

    shipped(model, tmp_path / "source", settings(kind), parts)
    report = rounded(tmp_path / "source", tmp_path / "out", **step)
    assert {(item["method"], item["relative_error"]) for item in report["linears"]} == {("recoded", 0.0)}
    assert "requantised" not in {entry["kind"] for entry in report["ledger"]}
    written, held = (load_file(tmp_path / item / "model.safetensors") for item in ("out", "source"))
    for name in held:
        if ".layers." in name and not name.endswith(("input_scale", "weight_shape")):
            assert torch.equal(written[name].view(torch.uint8), held[name].view(torch.uint8)), name


def test_codes_with_a_scale_of_their_own_are_kept_only_where_neighbours_share_it(model, tmp_path):
    shipped(model, tmp_path / "source", settings("NVFP4"), compressed("NVFP4"))
    report = rounded(tmp_path / "source", tmp_path / "out", bits=4, type="nvfp4")
    methods = {item["name"].rpartition(".")[2]: item["method"] for item in report["linears"]}
    assert methods == {**dict.fromkeys(methods, "rtn"), "o_proj": "recoded", "down_proj": "recoded"}
    assert sum(entry["kind"] == "requantised" for entry in report["ledger"]) == 10


def test_scales_that_the_output_cannot_hold_make_codes_new(model, tmp_path):
    shipped(model, tmp_path / "source", settings("W4A16"), compressed("W4A16"))  # of float32, in a bfloat16 model
    report = rounded(tmp_path / "source", tmp_path / "out", bits=4, group_size=32)
    assert {item["method"] for item in report["linears"]} == {"rtn"}
    assert [entry["subject"] for entry in report["ledger"] if entry["kind"] == "requantised"] == ["14 matrices"]


def test_groups_in_activation_order_are_read(model, tmp_path):
    """Each input has the group that its index names: by brute force, and with the codes of one order for all."""
    shipped(model, tmp_path / "sound", settings("W4A16_ASYM"), compressed("W4A16_ASYM"))
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0)) // 32
    group = settings("W4A16_ASYM")["config_groups"]["group_0"]
    group["weights"]["actorder"] = "group"
    source = changed(
        tmp_path / "sound",
        tmp_path / "source",
        lambda tensors: tensors.__setitem__(f"{UP}.weight_g_idx", order.to(torch.int32)),
        config_groups={"group_0": group},
    )
    before, after = (open_checkpoint(checkpoint_headers(path)).coded(UP) for path in (tmp_path / "sound", source))
    levels = before.codes.double() - before.grid.zero.double()[:, order]
    assert torch.equal(after.decode(), (levels * before.grid.scale.double()[:, order]).float())
    report = rounded(source, tmp_path / "out", bits=4, group_size=32, sym=False)
    assert {item["method"] for item in report["linears"]} == {"rtn"}


def test_several_groups_of_modules_have_each_its_scheme(model, tmp_path):
    """By name, by pattern and by class, in this order."""
    said, groups = settings("FP8_DYNAMIC"), {}
    kinds = {"W4A16": ["re:.*mlp.*proj"], "FP8_DYNAMIC": ["Linear"], "NVFP4": [UP]}
    for number, (kind, targets) in enumerate(kinds.items()):
        groups[f"group_{number}"] = {**settings(kind)["config_groups"]["group_0"], "targets": targets}
    said |= {"format": "mixed-precision", "config_groups": groups}

    def parts(name, weight):
        if "o_proj" in name:
            return None
        kind = "NVFP4" if name.startswith(UP) else "W4A16" if "mlp" in name else "FP8_DYNAMIC"
        return compressed(kind)(name, weight)

    values = shipped(model, tmp_path / "source", said, parts)
    checkpoint = open_checkpoint(checkpoint_headers(tmp_path / "source"))
    for name, expected in values.items():
        assert torch.allclose(checkpoint.read(name), expected.float(), rtol=2**-7, atol=0), name
    names = {code_grid(checkpoint.headers, name.removesuffix(".weight")).name for name in values}
    assert names == {"fp8-row", "int4-g32-sym", "nvfp4"}
    assert code_grid(checkpoint.headers, "model.layers.0.self_attn.o_proj") is None
    assert checkpoint.code_grid(UP).name == "nvfp4"
    assert checkpoint.code_grid(DOWN) is None  # whose scales are float32 in a model of bfloat16
    rounded(tmp_path / "source", tmp_path / "out", bits=8, group_size=-1)


def group_of(kind, **weights):
    group = settings(kind)["config_groups"]["group_0"]
    return {"config_groups": {"group_0": {**group, "weights": {**group["weights"], **weights}}}}


DAMAGES = {
    "another group size": ("W4A16", group_of("W4A16", group_size=64), "not the scales of 128 x 192 weights"),
    "a group that fits nothing": ("W4A16", group_of("W4A16", group_size=48), "not the scales of"),
    "another width": ("W4A16", group_of("W4A16", num_bits=8), "weight_packed is"),
    "a width nobody has": ("W4A16", group_of("W4A16", num_bits=7), "integer grids have"),
    "another block": ("FP8_BLOCK", group_of("FP8_BLOCK", block_structure=[64, 64]), "for each 64 x 64 weights"),
    "a block in words": ("FP8_BLOCK", group_of("FP8_BLOCK", block_structure="big"), "is not stored as"),
    "a strategy nobody knows": ("W4A16", group_of("W4A16", strategy="token"), "other than codes by block, group"),
    "no scheme": ("W4A16", {"config_groups": {}}, "no config group"),
    "nvfp4 in groups of 32": ("NVFP4", group_of("NVFP4", group_size=32), "other than codes by block, group"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_headers_tell_is_refused_when_planned(name, model, tmp_path):
    kind, said, message = DAMAGES[name]
    shipped(model, tmp_path / "sound", settings(kind), compressed(kind))
    source = changed(tmp_path / "sound", tmp_path / "source", **said)
    with pytest.raises(CheckpointError, match=message):
        make_plan(parse({"steps": [{"method": "rtn"}]}), source, Options(out=tmp_path / "out"))


@pytest.mark.parametrize("kind", ["W4A16", "NVFP4", "MXFP4"])
def test_scales_with_a_dimension_too_many_are_refused_when_planned(kind, model, tmp_path):
    def deeper(tensors):
        tensors[f"{DOWN}.weight_scale"] = tensors[f"{DOWN}.weight_scale"][None]

    shipped(model, tmp_path / "sound", settings(kind), compressed(kind))
    with pytest.raises(CheckpointError, match=f"{DOWN}.weight_scale is "):
        checkpoint_headers(changed(tmp_path / "sound", tmp_path / "source", deeper))


@pytest.mark.parametrize(
    ("kind", "part", "value", "message"),
    [
        ("W4A16", "weight_scale", torch.inf, "scales that are not finite"),
        ("NVFP4", "weight_global_scale", 0.0, "scales that are not finite"),
        ("MXFP4", "weight_scale", 255, "scales that are not finite"),
        ("MXFP8", "weight_scale", 255, "scales that are not finite"),
    ],
)
def test_scales_that_are_none_are_refused_when_read(kind, part, value, message, model, tmp_path):
    shipped(model, tmp_path / "sound", settings(kind), compressed(kind))
    source = changed(tmp_path / "sound", tmp_path / "source", lambda tensors: tensors[f"{DOWN}.{part}"].fill_(value))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(checkpoint_headers(source)).read(f"{DOWN}.weight")
