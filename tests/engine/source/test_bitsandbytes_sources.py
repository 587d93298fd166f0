"""bitsandbytes checkpoints as others make them, by the library itself, read as sources."""

import json

import pytest
import torch
from safetensors.torch import load_file

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.source.open import checkpoint_headers, open_checkpoint
from llmcompress.errors import CheckpointError
from llmcompress.recipe import parse
from llmcompress.validate.verify import passed, verify
from shippedmodels import changed, shipped

bnb = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")

UP = "model.layers.1.mlp.up_proj"
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
EIGHT = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True, "llm_int8_threshold": 6.0}
KINDS = {
    "nf4": ("nf4", 64, False),
    "nf4 nested": ("nf4", 64, True),
    "nf4 in blocks of 128": ("nf4", 128, True),
    "fp4": ("fp4", 64, False),
    "fp4 nested": ("fp4", 64, True),
}


def four(kind, storage=torch.uint8):
    name, size, nested = KINDS[kind]

    def parts(module, weight):
        codes, state = bnb.quantize_4bit(
            weight, blocksize=size, compress_statistics=nested, quant_type=name, quant_storage=storage
        )
        stored = {"weight": codes, **{f"weight.{part}": t for part, t in state.as_dict(packed=True).items()}}
        state.shape = torch.Size([weight.numel() // size, size])  # on a processor it misreads blocks that begin in rows
        return stored, bnb.dequantize_4bit(codes, state).view(weight.shape)

    return parts


def eight(module, weight):
    absmax = weight.abs().amax(1)
    codes = (weight * 127 / absmax[:, None]).round().to(torch.int8)
    stored = {"weight": codes, "SCB": absmax, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, codes.double() * (absmax.double()[:, None] / 127)


@pytest.fixture(scope="module")
def model(random_model_dir):
    """Rows of 96 and 160 inputs, in which blocks of 64 begin anywhere."""
    return random_model_dir("llama", hidden_size=96, intermediate_size=160, num_attention_heads=4)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_values_of_4_bits_are_those_of_the_library(kind, storage, model, tmp_path):
    values = shipped(model, tmp_path / "source", {**FOUR, "bnb_4bit_quant_type": KINDS[kind][0]}, four(kind, storage))
    checkpoint = open_checkpoint(checkpoint_headers(tmp_path / "source"))
    assert set(checkpoint.names()) == set(load_file(model / "model.safetensors"))
    for name, expected in values.items():
        assert torch.equal(checkpoint.read(name), expected.float()), name
        coded = checkpoint.coded(name.removesuffix(".weight"))
        assert torch.equal(coded.rows(slice(3, 9)).decode(), expected.float()[3:9])


def test_values_of_8_bits_are_those_of_brute_force(model, tmp_path):
    values = shipped(model, tmp_path / "source", EIGHT, eight)
    checkpoint = open_checkpoint(checkpoint_headers(tmp_path / "source"))
    for name, expected in values.items():
        assert torch.allclose(checkpoint.read(name), expected.float(), rtol=1e-6, atol=0), name


@pytest.mark.parametrize("kind", ["nf4 nested", "fp4 nested", "int8"])
def test_runs_begin_with_it_and_verify_knows_it_as_the_source(kind, model, tmp_path):
    settings, parts = (EIGHT, eight) if kind == "int8" else (FOUR, four(kind))
    shipped(model, tmp_path / "source", settings, parts)
    recipe = {"steps": [{"method": "rtn", "bits": 8, "group_size": -1}]}
    report = run(make_plan(parse(recipe), tmp_path / "source", Options(out=tmp_path / "out")))
    assert [entry["subject"] for entry in report["ledger"] if entry["kind"] == "requantised"] == ["14 matrices"]
    checks = verify(tmp_path / "out", tmp_path / "source")
    assert passed(checks), [check for check in checks if not check.ok]


def stated(**changes):
    """A change of what the packed state of a matrix says."""

    def change(tensors):
        name = f"{UP}.weight.quant_state.bitsandbytes__nf4"
        said = json.dumps({**json.loads(bytes(tensors[name].tolist())), **changes}).encode()
        tensors[name] = torch.tensor(list(said), dtype=torch.uint8)

    return change


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (stated(quant_type="af4"), "tells one of nf4, fp4"),
        (stated(shape=[10, 10]), "does not hold 10 x 10 codes"),
        (stated(shape=[10]), "is not stored as bitsandbytes"),
        (lambda tensors: tensors.pop(f"{UP}.weight.quant_state.bitsandbytes__nf4"), "is not stored as bitsandbytes"),
    ],
)
def test_what_states_tell_is_refused_when_planned(spoil, message, model, tmp_path):
    shipped(model, tmp_path / "sound", FOUR, four("nf4"))
    source = changed(tmp_path / "sound", tmp_path / "source", spoil)
    with pytest.raises(CheckpointError, match=message):
        make_plan(parse({"steps": [{"method": "rtn"}]}), source, Options(out=tmp_path / "out"))


def test_a_map_of_scales_that_is_not_whole_is_refused(tmp_path, random_model_dir):
    model = random_model_dir("llama", hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    shipped(model, tmp_path / "sound", FOUR, four("nf4 nested"))
    name = "model.layers.0.mlp.up_proj"
    source = changed(
        tmp_path / "sound",
        tmp_path / "source",
        lambda tensors: tensors.__setitem__(f"{name}.weight.nested_quant_map", torch.zeros(128)),
    )
    with pytest.raises(CheckpointError, match="not the dynamic map"):
        open_checkpoint(checkpoint_headers(source)).read(f"{name}.weight")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (stated(blocksize=32), "in blocks of 32"),
        (stated(blocksize=0), "is not stored as bitsandbytes"),
        (lambda tensors: tensors.__setitem__(f"{UP}.weight.quant_map", torch.zeros(15)), "16 numbers"),
        (lambda tensors: tensors[f"{UP}.weight.absmax"].fill_(torch.nan), "scales that are not finite"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_when_read(spoil, message, model, tmp_path):
    shipped(model, tmp_path / "sound", FOUR, four("nf4"))
    source = changed(tmp_path / "sound", tmp_path / "source", spoil)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(checkpoint_headers(source)).read(f"{UP}.weight")
