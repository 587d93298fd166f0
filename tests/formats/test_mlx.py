"""MLX checkpoints: words known beforehand, what config.json says, what has no place, and the way back."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import llmcompress
from entries import there_and_back
from llmcompress.errors import CheckpointError, PlanError
from llmcompress.formats.base import Entry, TensorSpec
from llmcompress.formats.mlx import FORMAT
from llmcompress.grids.coded import Coded
from llmcompress.grids.fitting import fit
from llmcompress.grids.grid_type import spec_named
from llmcompress.grids.offset import OffsetGrid, OffsetSpec
from llmcompress.validate.verify import passed, verify

NAMES = [*(f"int{bits}-g32-offset" for bits in (2, 3, 4, 5, 6, 8)), "int4-g64-sym", "int8-g128-sym"]
NAMES += ["mxfp4", "mxfp8", "nvfp4-plain"]


def entry_of(grid, rows=8, width=128, dtype="F16", **about):
    return Entry(TensorSpec("m.weight", dtype, (rows, width)), grid=grid, block=True, linear=True, **about)


def coded_of(grid, rows=8, width=128):
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    fitted = fit(weight, grid, scale_dtype=torch.float16)
    return Coded(fitted.encode(weight), fitted)


def test_words_are_a_stream_of_bits():
    spec = OffsetSpec(3, 32)
    codes = (torch.arange(32) % 8).to(torch.uint8).expand(1, 32)
    grid = OffsetGrid(spec, torch.tensor([[0.5]]), torch.tensor([[-1.25]]))
    tensors = FORMAT.encode(entry_of(spec, 1, 32), Coded(codes, grid))
    stream = "".join(format(code, "03b")[::-1] for code in codes[0].tolist())
    expected = [int(stream[start : start + 32][::-1], 2) for start in range(0, 96, 32)]
    assert tensors["m.weight"].dtype == torch.uint32
    assert tensors["m.weight"].tolist() == [expected]
    assert (tensors["m.scales"].item(), tensors["m.biases"].item()) == (0.5, -1.25)


@pytest.mark.parametrize("name", NAMES)
def test_the_way_back(name):
    grid = spec_named(name)
    coded = coded_of(grid)
    again = there_and_back(FORMAT, entry_of(grid), coded)
    assert torch.equal(again.decode(), coded.decode())


def test_symmetric_integers_have_the_bias_of_their_middle():
    grid = spec_named("int4-g64-sym")
    tensors = FORMAT.encode(entry_of(grid), coded_of(grid))
    assert torch.equal(tensors["m.biases"], -8 * tensors["m.scales"])
    tensors["m.biases"][0, 0] += 1
    with pytest.raises(CheckpointError, match="symmetric"):
        FORMAT.decode("m", tensors.__getitem__, FORMAT.config([entry_of(grid)], {})["config.json"])


def test_a_module_may_have_settings_of_its_own(tiny_model_dir, tmp_path):
    out = tmp_path / "out"
    own = {"mlp.down_proj": {"bits": 8, "group_size": 128}, "layers.0.self_attn.q_proj": {"skip": True}}
    settings = {"type": "offset", "bits": 4, "group_size": 32, "set": own}
    llmcompress.compress(tiny_model_dir, output=out, method="rtn", format="mlx", **settings)
    config = json.loads((out / "config.json").read_text())
    said = config["quantization"]
    assert {key: said[key] for key in ("bits", "group_size", "mode")} == {"bits": 4, "group_size": 32, "mode": "affine"}
    assert said["model.layers.3.mlp.down_proj"] == {"bits": 8, "group_size": 128, "mode": "affine"}
    assert config["quantization_config"] == {"quant_method": "mlx", **said}
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    tensors = load_file(out / "model.safetensors")
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert tensors["model.layers.3.mlp.down_proj.weight"].shape == (256, 128)
    assert passed(verify(out, tiny_model_dir))


@pytest.mark.parametrize("kind", ["mxfp4", "mxfp8", "nvfp4-plain"])
def test_symmetric_integers_among_others_are_told_as_such(kind, shallow_model_dir, tmp_path):
    own = {"o_proj": {"type": "int", "bits": 4, "group_size": 64}}
    llmcompress.compress(shallow_model_dir, output=tmp_path / "out", method="rtn", format="mlx", type=kind, set=own)
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert (said["mode"], said["symmetric"]) == (kind.removesuffix("-plain"), True)
    assert said["model.layers.0.self_attn.o_proj"] == {"group_size": 64, "bits": 4, "mode": "affine"}
    assert passed(verify(tmp_path / "out", shallow_model_dir))


def test_codes_that_are_no_numbers_are_found(shallow_model_dir, tmp_path):
    out = tmp_path / "out"
    llmcompress.compress(shallow_model_dir, output=out, method="rtn", format="mlx", type="mxfp8")
    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"].view(torch.uint8)[0, 5] = 0x7F
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    found = [check.detail for check in verify(out) if not check.ok]
    assert any("up_proj.weight has codes that are no numbers" in detail for detail in found), found


def test_rotations_are_said_in_the_older_spelling_where_it_is_missing():
    entry = entry_of(OffsetSpec(4, 32))
    scaled = {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5}
    made = FORMAT.config([entry], {"rope_parameters": scaled, "rope_theta": 1.0})["config.json"]
    assert "rope_theta" not in made
    assert made["partial_rotary_factor"] == 0.5
    assert made["rope_scaling"] == {key: value for key, value in scaled.items() if key != "rope_theta"}
    by_kind = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}
    assert set(FORMAT.config([entry], {"rope_parameters": by_kind})["config.json"]) == {
        "quantization",
        "quantization_config",
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bits": 4, "sym": False, "group_size": 64}, "use --type offset"),
        ({"bits": 4, "group_size": 16}, "use --group-size 64"),
        ({"type": "offset", "bits": 4, "group_size": 64, "activations": "int8-token"}, "--activations none"),
        ({"type": "offset", "bits": 4, "group_size": 64, "set": {"mlp.*": {"type": "int"}}}, "--type offset"),
        ({"type": "nvfp4"}, "--type nvfp4-plain"),
    ],
    ids=repr,
)
def test_what_has_no_place_is_refused(settings, said, tiny_model_dir):
    with pytest.raises((PlanError, llmcompress.LlmcompressError)) as error:
        llmcompress.plan(tiny_model_dir, method="rtn", format="mlx", **settings)
    assert said in f"{error.value.message} {error.value.hint}"


def test_matrices_that_mlx_turns_around_are_refused(random_model_dir):
    with pytest.raises(PlanError, match="mlx-lm turns"):
        llmcompress.plan(random_model_dir("gpt2"), method="rtn", format="mlx", type="offset", bits=4, group_size=32)


def test_others_are_read_without_what_only_we_say():
    """mlx-lm's own checkpoints have no quant_method; one with it is read whatever else it lacks."""
    spec = OffsetSpec(4, 64)
    tensors = FORMAT.encode(entry_of(spec), coded_of(spec))
    config = {"quantization_config": {"quant_method": "mlx", "bits": 4, "group_size": 64}}
    assert FORMAT.decode("m", tensors.__getitem__, config).grid.spec == spec
    config["quantization_config"]["mode"] = "mxfp6"
    with pytest.raises(CheckpointError, match="not read"):
        FORMAT.decode("m", tensors.__getitem__, config)


def test_values_are_those_of_numpy():
    spec = OffsetSpec(5, 32)
    tensors = FORMAT.encode(entry_of(spec), coded_of(spec))
    bits = np.unpackbits(tensors["m.weight"].numpy().view(np.uint8), axis=1, bitorder="little").reshape(8, 128, 5)
    codes = (bits * (1 << np.arange(5))).sum(-1)
    scales, biases = (tensors[f"m.{name}"].float().numpy().repeat(32, axis=1) for name in ("scales", "biases"))
    config = FORMAT.config([entry_of(spec)], {})["config.json"]
    np.testing.assert_allclose(
        FORMAT.decode("m", tensors.__getitem__, config).decode().numpy(), codes * scales + biases, rtol=1e-6, atol=1e-6
    )
