"""Codes of a quantised checkpoint in another container: the same bytes, of several types at once, without any text."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import llmcompress
from llmcompress.calib.pack import save
from llmcompress.engine.source.open import checkpoint_headers
from llmcompress.engine.source.quantised import DecodedCheckpoint
from llmcompress.errors import PlanError, RunError
from llmcompress.recipe import parse
from llmcompress.validate.verify import passed, verify
from shippedmodels import changed
from tinyruns import compress

MIX = {
    "type": "nvfp4",
    "activations": "nvfp4",
    "set": {
        "self_attn.*": {"type": "fp8-tensor", "activations": "fp8-tensor"},
        "o_proj": {"type": "fp8-block", "activations": "fp8-group"},
        "layers.0.mlp.down_proj": {"type": "mxfp8", "activations": "mxfp8"},
        "layers.1.self_attn.o_proj": {"skip": True},
        "layers.1.mlp.down_proj": {"activations": "none"},
    },
}


@pytest.fixture(scope="module")
def model(random_model_dir):
    return random_model_dir("llama", hidden_size=128, intermediate_size=256)


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    """made(name, format, **options): the model rounded to nearest."""
    root = tmp_path_factory.mktemp("made")
    save(torch.randint(3, 96, (2, 32), generator=torch.Generator().manual_seed(0)), root / "ids.safetensors")

    def of(name, format_, **options):
        if not (root / name).exists():
            calibration = {"source": str(root / "ids.safetensors"), "samples": 2, "length": 32}
            steps = [{"method": "rtn", **options}]
            recipe = {"calibration": calibration, "steps": steps, "output": {"format": format_}}
            compress(model, root / name, parse(recipe))
        return root / name

    return of


def same(one, other, *, exact=False):
    assert set(one) == set(other)
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape)
        if not exact and name.endswith(("global_scale", "weight_scale_2", "input_scale")):
            assert torch.allclose(tensor, other[name], rtol=2e-7)  # a reciprocal of a reciprocal
        else:
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8)), name


def said(path):
    """What config.json says, groups in any order."""
    config = json.loads((path / "config.json").read_text())
    settings = config["quantization_config"]
    groups = [{**group, "targets": sorted(group["targets"])} for group in settings.pop("config_groups").values()]
    return config, sorted(json.dumps(group, sort_keys=True) for group in groups), sorted(settings.pop("ignore"))


@pytest.mark.parametrize("start", ["compressed-tensors", "modelopt"])
def test_several_types_go_to_the_other_container_and_back_byte_for_byte(start, made, tmp_path):
    """There is no text to calibrate on and no tokenizer: what is fixed of inputs is that of the source."""
    other = {"compressed-tensors": "modelopt", "modelopt": "compressed-tensors"}[start]
    source, there, back = made(f"mix-{start}", start, **MIX), tmp_path / "there", tmp_path / "back"
    (done,) = llmcompress.export(source, other, there)
    assert (done.format, done.output) == (other, there)
    llmcompress.export(there, start, back)
    for out, before in ((there, source), (back, there)):
        checks = verify(out, before)
        assert passed(checks), [check for check in checks if not check.ok]
        report = json.loads((out / "report.json").read_text())
        assert {item["method"] for item in report["linears"]} == {"recoded"}
    same(load_file(source / "model.safetensors"), load_file(back / "model.safetensors"))
    assert said(source) == said(back)
    # the other container is what a run from the original writes in it
    same(load_file(there / "model.safetensors"), load_file(made(f"mix-{other}", other, **MIX) / "model.safetensors"))


def test_integers_go_to_any_format_that_holds_them(made, tmp_path):
    options = {"group_size": 32, "set": {"down_proj": {"bits": 8}}}
    out = [item.output for item in llmcompress.export(made("int", "compressed-tensors", **options), ["gptq", "mlx"])]
    assert [path.name for path in out] == ["int-gptq", "int-mlx"]
    for path, form in zip(out, ("gptq", "mlx"), strict=True):
        same(load_file(path / "model.safetensors"), load_file(made(form, form, **options) / "model.safetensors"))


@pytest.mark.parametrize(
    ("start", "others", "options"),
    [
        ("gptq", ["compressed-tensors", "awq", "auto-round", "mlx"], {}),
        ("gptq", ["compressed-tensors", "auto-round"], {"set": {"down_proj": {"bits": 8}}}),
        ("awq", ["compressed-tensors", "gptq"], {"sym": False}),
        ("auto-round", ["compressed-tensors", "gptq", "awq", "mlx"], {}),
    ],
)
def test_words_of_codes_go_to_other_containers_and_back(start, others, options, made, model, tmp_path):
    source = made(f"{start}-{len(options)}-words", start, group_size=32, **options)
    whole = DecodedCheckpoint(checkpoint_headers(source))
    for other in others:
        (done,) = llmcompress.export(source, other, tmp_path / other)
        report = json.loads((done.output / "report.json").read_text())
        assert {item["method"] for item in report["linears"]} == {"recoded"}
        assert passed(verify(done.output, source))
        there = DecodedCheckpoint(checkpoint_headers(done.output))
        assert all(torch.equal(there.read(name), whole.read(name)) for name in whole.headers.tensors)
        llmcompress.export(done.output, start, tmp_path / f"{other}-back")
        same(load_file(tmp_path / f"{other}-back" / "model.safetensors"), load_file(source / "model.safetensors"))


@pytest.mark.parametrize("start", ["gptq", "awq"])
def test_scales_of_float16_go_where_they_have_room(start, made, tmp_path):
    """As other tools write them, beside a model in bfloat16."""

    def finer(tensors):
        for name, tensor in tensors.items():
            if name.endswith(".scales"):
                tensor.mul_(1.0009)

    source = changed(made(f"{start}-words", start, group_size=32, sym=start == "gptq"), tmp_path / "source", finer)
    other = {"gptq": "auto-round", "awq": "gptq"}[start]
    for name in (other, "dense"):
        llmcompress.export(source, name, tmp_path / name)
        assert passed(verify(tmp_path / name, source))
    with pytest.raises(PlanError, match="stores scales as BF16, which does not hold those of model"):
        llmcompress.export(source, "compressed-tensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()


HEAD = {"lm_head": {"skip": False, "bits": 8}}
EMBEDDING = {"model.embed_tokens": {"skip": False, "bits": 6, "group_size": 64}}


@pytest.mark.parametrize(
    ("start", "others", "named"),
    [
        ("gptq", ["compressed-tensors", "mlx"], HEAD),
        ("compressed-tensors", ["gptq"], HEAD),
        ("mlx", ["gptq", "compressed-tensors"], HEAD),
        ("mlx", ["mlx"], HEAD | EMBEDDING),
    ],
)
def test_codes_of_head_and_embedding_go_where_loaders_read_them_and_back(start, others, named, made, model, tmp_path):
    kind = "-".join(named)
    source = made(f"{start}-{kind}", start, group_size=32, set=named)
    for other in others:
        (done,) = llmcompress.export(source, other, tmp_path / other)
        report = json.loads((done.output / "report.json").read_text())
        assert {item["name"] for item in report["linears"]} > set(named)
        assert {item["method"] for item in report["linears"]} == {"recoded"}
        assert passed(verify(done.output, source))
        weights = load_file(done.output / "model.safetensors")
        same(weights, load_file(made(f"{other}-{kind}", other, group_size=32, set=named) / "model.safetensors"))
        (back,) = llmcompress.export(done.output, start, tmp_path / f"{other}-back")
        same(load_file(back.output / "model.safetensors"), load_file(source / "model.safetensors"))


@pytest.fixture(scope="module")
def tied(random_model_dir, tmp_path_factory):
    """A model whose head is its embedding, in MLX's codes."""
    source = random_model_dir("llama", tie_word_embeddings=True)
    out = tmp_path_factory.mktemp("tied") / "mlx"
    steps = [{"method": "rtn", "type": "offset", "group_size": 32, "set": EMBEDDING}]
    compress(source, out, parse({"steps": steps, "output": {"format": "mlx"}}))
    return out


def test_an_embedding_that_is_the_head_is_decoded_by_dense_output(tied, tmp_path):
    """By the formula of MLX: bits of a row from the lowest of each byte on, times scale, plus bias, in groups."""
    llmcompress.export(tied, "dense", tmp_path / "dense")
    assert passed(verify(tmp_path / "dense", tied))
    held = load_file(tied / "model.safetensors")
    words = held["model.embed_tokens.weight"].view(torch.uint8).numpy()
    bits = np.unpackbits(words, axis=1, bitorder="little").reshape(96, -1, 6)
    codes = (bits << np.arange(6)).sum(axis=2)
    scale, start = (
        np.repeat(held[f"model.embed_tokens.{part}"].double().numpy(), 64, axis=1) for part in ("scales", "biases")
    )
    found = load_file(tmp_path / "dense" / "model.safetensors")
    assert torch.equal(found["model.embed_tokens.weight"], torch.from_numpy(codes * scale + start).bfloat16())
    assert "lm_head.weight" not in found


@pytest.mark.parametrize("format_", ["compressed-tensors", "gptq", "auto-round"])
def test_codes_of_a_tied_head_are_refused_where_there_is_no_room(format_, tied, tmp_path):
    with pytest.raises(PlanError, match=f"{format_} read no codes of the head, which is the embedding,") as error:
        llmcompress.export(tied, ["mlx", format_], tmp_path / "out")
    assert "--format mlx or dense" in error.value.hint
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("start", "named", "format_", "why", "way"),
    [
        ("mlx", EMBEDDING, "compressed-tensors", "no codes of the embedding", "--format mlx or dense"),
        ("gptq", HEAD, "awq", "no codes of a head", "compressed-tensors, gptq, mlx or dense"),
        ("gptq", HEAD, "auto-round", "no codes of a head", "compressed-tensors, gptq, mlx or dense"),
    ],
)
def test_codes_of_head_and_embedding_are_refused_where_there_is_no_room(
    start, named, format_, why, way, made, tmp_path
):
    source = made(f"{start}-{'-'.join(named)}", start, group_size=32, set=named)
    with pytest.raises(PlanError, match=f"loaders of format {format_} read {why}") as error:
        llmcompress.export(source, format_, tmp_path / "out")
    assert way in error.value.hint
    assert not list(tmp_path.iterdir())


def test_a_head_alone_in_codes_goes_over(made, tmp_path):
    """With no matrix of a layer, which other tools leave to themselves."""
    alone = {"self_attn.*": {"skip": True}, "mlp.*": {"skip": True}, **HEAD}
    source = made("alone", "gptq", group_size=32, set=alone)
    llmcompress.export(source, "compressed-tensors", tmp_path / "there")
    assert passed(verify(tmp_path / "there", source))
    llmcompress.export(tmp_path / "there", "gptq", tmp_path / "back")
    same(load_file(tmp_path / "back" / "model.safetensors"), load_file(source / "model.safetensors"))


def test_a_head_with_rounded_inputs_is_refused(made, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(made("head", "compressed-tensors", group_size=32, set=HEAD), source)
    config = json.loads((source / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"].values()
    (group,) = (group for group in groups if group["targets"] == ["lm_head"])
    group["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match="lm_head has rounded inputs"):
        llmcompress.export(source, "compressed-tensors", tmp_path / "out")


def test_what_cannot_be_taken_over_is_refused(made, model, tmp_path):
    with pytest.raises(PlanError, match="a command of their own"):
        llmcompress.export(made("int", "compressed-tensors", group_size=32), ["mlx", "gguf"])
    with pytest.raises(PlanError, match="is not quantised"):
        llmcompress.export(model, "modelopt", tmp_path / "out")
    with pytest.raises(PlanError, match="cannot hold int8-g32-sym"):
        llmcompress.export(made("int8", "compressed-tensors", bits=8, group_size=32), "modelopt", tmp_path / "out")
    ordered = tmp_path / "ordered"
    shutil.copytree(made("gptq", "gptq", group_size=32), ordered)
    config = json.loads((ordered / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (ordered / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match="format gptq does not tell the grid of"):
        llmcompress.export(ordered, "compressed-tensors", tmp_path / "out")
    shutil.rmtree(ordered)
    source = changed(
        made("int", "compressed-tensors", group_size=32, set={"down_proj": {"bits": 8}}),
        tmp_path / "source",
        lambda tensors: tensors["model.layers.1.mlp.up_proj.weight_scale"][0, 0].fill_(3e-9),
    )
    with pytest.raises(RunError, match="int4-g32-sym with scales or zero points that the output cannot hold"):
        llmcompress.export(source, "gptq", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_has_rounded_inputs_is_decoded_too(made, tmp_path):
    source = made("mix-modelopt", "modelopt", **MIX)
    llmcompress.export(source, "dense", tmp_path / "out")
    checks = verify(tmp_path / "out", source)
    assert passed(checks), [check for check in checks if not check.ok]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    said = {entry["subject"] for entry in report["ledger"] if "inputs are not rounded" in entry["why"]}
    assert said == {"nvfp4", "fp8-tensor", "fp8-group", "mxfp8"}
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize(
    ("start", "other", "options"),
    [
        ("modelopt", "compressed-tensors", {"type": "nvfp4"}),
        ("compressed-tensors", "modelopt", {"type": "nvfp4"}),
        ("modelopt", "compressed-tensors", {"type": "fp8-block", "activations": "fp8-group"}),
        ("compressed-tensors", "gptq", {"group_size": 32}),
        ("mlx", "mlx", {"type": "nvfp4-plain"}),
    ],
)
def test_scales_of_zero_stay_where_codes_are_kept(start, other, options, made, tmp_path):
    """Sources have them where all weights of a block are zero, or too small for the scale's type."""

    def none(tensors):
        scale = tensors[
            next(name for name in sorted(tensors) if name.endswith(("up_proj.weight_scale", "up_proj.scales")))
        ]
        scale.view(-1)[0] = 0

    name = f"zero-{start}-{options.get('type', 'int')}"
    source = changed(made(name, start, **options), tmp_path / "source", none)
    assert not passed(verify(source))
    llmcompress.export(source, other, tmp_path / "out")
    checks = verify(tmp_path / "out", source)
    assert passed(checks), [check for check in checks if not check.ok]


@pytest.mark.parametrize("kind", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"])
def test_scales_of_others_that_16_bits_do_not_hold_stay_as_they_are(kind, made, tmp_path):
    """As ModelOpt has them, float32: largest magnitudes over 448."""
    types = {"FP8": "fp8-tensor", "FP8_PER_CHANNEL_PER_TOKEN": "fp8", "FP8_PB_WO": "fp8-block"}
    inputs = {"FP8": "fp8-tensor", "FP8_PER_CHANNEL_PER_TOKEN": "fp8-token", "FP8_PB_WO": "fp8-group"}

    def finer(tensors):
        for name, tensor in tensors.items():
            if name.endswith("_scale"):
                tensor.mul_(1.0013)

    source = changed(made(kind, "modelopt", type=types[kind], activations=inputs[kind]), tmp_path / "source", finer)
    llmcompress.export(source, "compressed-tensors", tmp_path / "there")
    assert passed(verify(tmp_path / "there", source))
    there = load_file(tmp_path / "there" / "model.safetensors")
    assert {tensor.dtype for name, tensor in there.items() if name.endswith("_scale")} == {torch.float32}
    llmcompress.export(tmp_path / "there", "modelopt", tmp_path / "back")
    same(load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors"), exact=True)


def test_experts_that_no_one_puts_together_again_are_told_of(random_model_dir, tmp_path, capsys, main):
    """transformers would load the decoded model with experts at random values."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    source = random_model_dir("granitemoe", num_local_experts=3, num_experts_per_tok=2, **heads)
    assert main("rtn", source, "--bits", 4, "--group-size", 32, "-o", tmp_path / "codes") == 0
    capsys.readouterr()
    assert main("export", tmp_path / "codes", "--format", "dense", "-o", tmp_path / "dense") == 0
    said = capsys.readouterr().err
    assert "transformers does not load this: it leaves at random values experts" in said
    assert "next: llmcompress verify" in said
