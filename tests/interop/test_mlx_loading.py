"""mlx and mlx-lm read what we write, and compute what we promised."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

import llmcompress
from llmcompress.calib.pack import save
from llmcompress.formats.base import Entry, TensorSpec
from llmcompress.formats.mlx import FORMAT
from llmcompress.grids.coded import Coded
from llmcompress.grids.fitting import fit
from llmcompress.grids.grid_type import spec_named
from llmcompress.validate.load import load_whole
from llmcompress.validate.verify import passed, verify

pytestmark = pytest.mark.interop

GRIDS = [*(f"int{bits}-g{size}-offset" for bits in (2, 3, 4, 5, 6, 8) for size in (32, 64, 128))]
GRIDS += ["int2-g32-sym", "int4-g64-sym", "int8-g128-sym", "mxfp4", "mxfp8"]
SETTINGS = {
    "offset": {"type": "offset", "bits": 4, "group_size": 32},
    "symmetric": {"bits": 4, "group_size": 32},
    "mxfp4": {"type": "mxfp4"},
    "mxfp8": {"type": "mxfp8"},
    "mixed": {
        "type": "offset",
        "bits": 3,
        "group_size": 32,
        "set": {"layers.1.*": {"bits": 6}, "o_proj": {"skip": True}},
    },
}
IDS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def mx():
    return pytest.importorskip("mlx.core")


@pytest.mark.parametrize("name", GRIDS)
def test_mlx_decodes_the_same_values(name, mx):
    spec = spec_named(name)
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(1))
    fitted = fit(weight, spec, scale_dtype=torch.float32)
    coded = Coded(fitted.encode(weight), fitted)
    tensors = FORMAT.encode(Entry(TensorSpec("m.weight", "F32", (16, 256)), grid=spec, block=True, linear=True), coded)
    said = FORMAT.config([Entry(TensorSpec("m.weight", "F32", (16, 256)), grid=spec, block=True, linear=True)], {})
    said = said["config.json"]["quantization"]
    parts = {part.removeprefix("m."): mx.array(tensor.numpy()) for part, tensor in tensors.items()}
    found = mx.dequantize(
        parts["weight"],
        parts["scales"],
        parts.get("biases"),
        group_size=said["group_size"],
        bits=said["bits"],
        mode=said["mode"],
    )
    theirs = torch.from_numpy(np.array(found.astype(mx.float32)))
    torch.testing.assert_close(theirs, coded.decode(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "mixtral"])
def test_mlx_lm_runs_a_checkpoint(family, settings, mx, random_model_dir, tmp_path):
    load_model = pytest.importorskip("mlx_lm.utils").load_model
    made = random_model_dir(family, dtype="float32", rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    out = tmp_path / "out"
    llmcompress.compress(made, output=out, method="rtn", format="mlx", **SETTINGS[settings])
    model, _ = load_model(out)
    theirs = torch.from_numpy(np.array(model(mx.array(IDS.numpy())).astype(mx.float32)))
    with torch.no_grad():
        ours = load_whole(out, dtype=torch.float32, linear=None).eval()(IDS).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4 * float(ours.abs().max()))


@pytest.mark.parametrize(
    ("family", "tied", "bits"),
    [
        ("llama", True, {"head_bits": 6}),
        ("llama", False, {"head_bits": 8, "embedding_bits": 4}),
        ("llama", False, {"embedding_bits": 6}),
        ("qwen2", True, {"head_bits": 8, "type": "int"}),
        ("qwen3", True, {"head_bits": 6, "set": {"embed_tokens": {"group_size": 64}}}),
        ("phi3", True, {"head_bits": 5}),
        ("granite", True, {"head_bits": 6}),
        ("gemma4_text", True, {"head_bits": 6}),
        ("olmo2", False, {"embedding_bits": 8}),
    ],
)
def test_mlx_lm_looks_codes_of_embeddings_up_and_multiplies_by_them(family, tied, bits, mx, random_model_dir, tmp_path):
    load_model = pytest.importorskip("mlx_lm.utils").load_model
    turned = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}} if family != "gemma4_text" else {}
    made = random_model_dir(family, dtype="float32", tie_word_embeddings=tied, **turned)
    save(torch.randint(3, 96, (8, 32), generator=torch.Generator().manual_seed(0)), tmp_path / "ids.safetensors")
    text = {"calibration": str(tmp_path / "ids.safetensors"), "samples": 8, "length": 32}
    settings = {"type": "offset", "bits": 4, "group_size": 32, **bits}
    llmcompress.compress(made, output=tmp_path / "out", method="gptq", format="mlx", **settings, **text)
    model, _ = load_model(tmp_path / "out")
    assert type(model.model.embed_tokens).__name__ == "QuantizedEmbedding"
    theirs = torch.from_numpy(np.array(model(mx.array(IDS.numpy())).astype(mx.float32)))
    with torch.no_grad():
        ours = load_whole(tmp_path / "out", dtype=torch.float32, linear=None).eval()(IDS).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4 * float(ours.abs().max()))
    assert passed(verify(tmp_path / "out", source=made))


def test_no_other_tensors_are_written(random_model_dir, tmp_path):
    """mlx-lm refuses tensors that its model has no place for."""
    out = tmp_path / "out"
    settings = {"type": "offset", "bits": 4, "group_size": 32}
    llmcompress.compress(random_model_dir("llama"), output=out, method="rtn", format="mlx", **settings)
    with safe_open(out / "model.safetensors", "pt") as file:
        kinds = {name.rpartition(".")[2] for name in file.keys()}  # noqa: SIM118
    assert kinds == {"weight", "scales", "biases"}
    assert json.loads((out / "config.json").read_text())["quantization"]["mode"] == "affine"
