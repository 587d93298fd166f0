"""mlx and mlx-lm read what we write, and compute what we promised."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import llmcompress
from llmcompress.calib.pack import save
from llmcompress.errors import PlanError
from llmcompress.formats.base import Entry, TensorSpec
from llmcompress.formats.mlx import FORMAT
from llmcompress.grids.coded import Coded
from llmcompress.grids.fitting import fit
from llmcompress.grids.grid_type import spec_named
from llmcompress.validate.load import load_whole
from llmcompress.validate.verify import passed, verify

pytestmark = pytest.mark.interop

GRIDS = [*(f"int{bits}-g{size}-offset" for bits in (2, 3, 4, 5, 6, 8) for size in (32, 64, 128))]
GRIDS += ["int2-g32-sym", "int4-g64-sym", "int8-g128-sym", "mxfp4", "mxfp8", "nvfp4-plain"]
SETTINGS = {
    "offset": {"type": "offset", "bits": 4, "group_size": 32},
    "symmetric": {"bits": 4, "group_size": 32},
    "mxfp4": {"type": "mxfp4"},
    "mxfp8": {"type": "mxfp8"},
    "nvfp4": {"type": "nvfp4-plain"},
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


@pytest.mark.parametrize(
    ("mode", "bits", "size"), [("affine", 4, 64), ("affine", 3, 32), ("mxfp4", 4, 32), ("nvfp4", 4, 16)]
)
def test_what_mlx_lm_converts_is_read_as_it_computes_it(mode, bits, size, mx, tiny_model_dir, tmp_path, main, capsys):
    load_model, convert = pytest.importorskip("mlx_lm.utils").load_model, pytest.importorskip("mlx_lm").convert
    out = tmp_path / "out"
    convert(str(tiny_model_dir), str(out), quantize=True, q_bits=bits, q_group_size=size, q_mode=mode, dtype="float32")
    ids = torch.randint(3, 1000, (2, 24), generator=torch.Generator().manual_seed(0))
    model, _ = load_model(out)
    theirs = torch.from_numpy(np.array(model(mx.array(ids.numpy())).astype(mx.float32)))
    with torch.no_grad():
        ours = load_whole(out, dtype=torch.float32, linear=None).eval()(ids).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4 * float(ours.abs().max()))
    assert main("inspect", out) == 0
    printed = capsys.readouterr().out
    assert f"mlx {mode}: {bits} bits, group size {size}" in printed
    assert "None" not in printed
    llmcompress.export(out, "mlx", tmp_path / "again")  # with the embedding, which mlx-lm has in codes too
    before, after = (load_file(path / "model.safetensors") for path in (out, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    model, _ = load_model(tmp_path / "again")
    assert torch.equal(theirs, torch.from_numpy(np.array(model(mx.array(ids.numpy())).astype(mx.float32))))


EXPERTS = {
    "mixtral": {},
    "olmoe": {"num_experts": 8},
    "phimoe": {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64},
}


@pytest.fixture(scope="module")
def converted(random_model_dir, tiny_model_dir, tmp_path_factory):
    """converted(family): a mixture of experts as mlx-lm converts it, two layers' projections down in 8 bits."""
    convert = pytest.importorskip("mlx_lm").convert
    root = tmp_path_factory.mktemp("converted")
    wider = {"bits": 8, "group_size": 32}

    def of(family):
        if not (root / family).exists():
            turned = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
            source = root / f"{family}-source"
            shutil.copytree(random_model_dir(family, dtype="float32", **turned, **EXPERTS[family]), source)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(tiny_model_dir / name, source)
            config = json.loads((source / "config.json").read_text())
            older = {"rope_theta": 5e4, "num_experts": config.get("num_experts", config.get("num_local_experts"))}
            (source / "config.json").write_text(json.dumps({**config, **older}))
            convert(
                str(source),
                str(root / family),
                quantize=True,
                q_bits=4,
                q_group_size=32,
                dtype="float32",
                quant_predicate=lambda path, _: wider if path.endswith("switch_mlp.down_proj") else True,
            )
        return root / family

    return of


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_that_mlx_lm_has_stacked_are_read_as_it_computes_them(family, converted, mx, tmp_path):
    load_model, path = pytest.importorskip("mlx_lm.utils").load_model, converted(family)
    model, _ = load_model(path)
    theirs = torch.from_numpy(np.array(model(mx.array(IDS.numpy())).astype(mx.float32)))
    with torch.no_grad():
        ours = load_whole(path, dtype=torch.float32, linear=None).eval()(IDS).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4 * float(ours.abs().max()))
    llmcompress.export(path, "dense", tmp_path / "dense")
    assert passed(verify(tmp_path / "dense", source=path))
    found, held = load_file(tmp_path / "dense" / "model.safetensors"), mx.load(str(path / "model.safetensors"))
    said = json.loads((path / "config.json").read_text())["quantization"]
    blocks = 0
    for name in [name for name in held if name.endswith(".scales")]:
        module = name.removesuffix(".scales")
        own = {key: said.get(module, said)[key] for key in ("bits", "group_size")}
        parts = (held[f"{module}.{part}"] for part in ("weight", "scales", "biases"))
        values = torch.from_numpy(np.array(mx.dequantize(*parts, **own)))
        block, expert, leaf = module.partition(".switch_mlp.")
        leaf = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[leaf] if expert and "sparse" in block else leaf
        names = [f"{block}.experts.{number}.{leaf}" for number in range(len(values))] if expert else [module]
        blocks += bool(expert)
        for one, value in zip(names, values if expert else [values], strict=True):
            torch.testing.assert_close(found[f"{one}.weight"], value, rtol=1e-6, atol=1e-6)
    assert blocks == 2 * 3


def test_what_else_mlx_lm_puts_in_codes_is_named_where_there_is_no_room(converted, tmp_path):
    with pytest.raises(PlanError, match=r"layers\.0\.mlp\.gate is neither head nor embedding nor") as error:
        llmcompress.export(converted("qwen3_moe"), "mlx", tmp_path / "out")
    assert "--format dense" in error.value.hint
    step = {"method": "rtn", "type": "offset", "group_size": 32, "set": {"down_proj": {"bits": 8}}}
    llmcompress.compress(converted("qwen3_moe"), {"steps": [step], "output": {"format": "mlx"}}, tmp_path / "out")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {item["method"] for item in report["linears"]} == {"recoded"}


def test_no_other_tensors_are_written(random_model_dir, tmp_path):
    """mlx-lm refuses tensors that its model has no place for."""
    out = tmp_path / "out"
    settings = {"type": "offset", "bits": 4, "group_size": 32}
    llmcompress.compress(random_model_dir("llama"), output=out, method="rtn", format="mlx", **settings)
    with safe_open(out / "model.safetensors", "pt") as file:
        kinds = {name.rpartition(".")[2] for name in file.keys()}  # noqa: SIM118
    assert kinds == {"weight", "scales", "biases"}
    assert json.loads((out / "config.json").read_text())["quantization"]["mode"] == "affine"
