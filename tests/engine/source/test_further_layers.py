"""Layers after the last are copied as they are, or rounded to nearest where a pattern asks for it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import llmcompress
from llmcompress import arch
from llmcompress.engine.plan.decoder_share import decoder_share
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.source.further_layers import FurtherLayers
from llmcompress.engine.source.tensor_names import Anatomy
from llmcompress.engine.structure.depth import DepthRequest, plan_depth, prune_depth
from llmcompress.engine.structure.width import WidthRequest, plan_width
from llmcompress.engine.targets.base import targets
from llmcompress.engine.targets.verdicts import violations
from llmcompress.errors import CheckpointError, PlanError
from llmcompress.recipe import Calibration
from llmcompress.store.headers import read_headers
from llmcompress.validate.verify import passed, verify
from tinyruns import LAYERS, compress, recipe, steps_recipe

PLACES = {"numbered": f"model.layers.{LAYERS}.", "mtp": "mtp.layers.0."}
LATENT = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
          "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
          "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
          "first_k_dense_replace": 0, "num_mtp_layers": 0}  # fmt: skip


def further(source, path, place, last, hidden):
    """A copy of a model with its last layer, turned about, once more below `place`, and what joins it to the others."""
    shutil.copytree(source, path)
    tensors, before = load_file(path / "model.safetensors"), f"model.layers.{last}."
    more = {place + name.removeprefix(before): value.flip(0) for name, value in tensors.items() if before in name}
    more |= {f"{place}eh_proj.weight": torch.randn(hidden, 2 * hidden, dtype=torch.bfloat16)}
    save_file(tensors | more, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_model_dir):
    folder = tmp_path_factory.mktemp("further")
    return {name: further(tiny_model_dir, folder / name, place, LAYERS - 1, 128) for name, place in PLACES.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, models):
    """The model in which the further layer is one of the others."""
    path = tmp_path_factory.mktemp("whole") / "model"
    shutil.copytree(models["numbered"], path)
    tensors = load_file(path / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if "eh_proj" not in name}
    (path / "model.safetensors").unlink()
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    changed = {**config, "num_hidden_layers": LAYERS + 1, "num_nextn_predict_layers": 0}
    (path / "config.json").write_text(json.dumps(changed))
    return path


def weights(path):
    return load_file(path / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("name", "further"),
    [
        ("model.layers.3.mlp.up_proj.weight", False),
        ("model.layers.4.mlp.up_proj.weight", True),
        ("model.layers.61.shared_head.norm.weight", True),
        ("model.mtp.layers.0.mlp.up_proj.weight", True),
        ("model.mtp_layers.0.self_attn.q_proj.weight", True),
        ("model.mtp_block.0.self_attn.q_proj.weight", True),
        ("model.mtp_linear_proj.0.weight", True),
        ("mtp.fc.weight", True),
        ("model.smtp.weight", False),
        ("model.embed_tokens.weight", False),
    ],
)
def test_names_that_models_are_published_with_are_known(name, further, tiny_model_dir):
    headers = read_headers(tiny_model_dir)
    layers = FurtherLayers(Anatomy(headers, arch.find("llama"), "model.layers", LAYERS))
    assert (name in layers) == further
    assert layers.first() is None


@pytest.mark.parametrize("kind", PLACES)
def test_they_are_copied_and_the_other_layers_are_as_without_them(kind, models, tiny_model_dir, tmp_path):
    compress(models[kind], tmp_path / "out")
    compress(tiny_model_dir, tmp_path / "plain")
    source, out, place = weights(models[kind]), weights(tmp_path / "out"), PLACES[kind]
    assert same({name: value for name, value in out.items() if place not in name}, weights(tmp_path / "plain"))
    assert same(*({name: value for name, value in part.items() if place in name} for part in (source, out)))
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {name.removesuffix(".weight") for name, value in source.items() if place in name and value.ndim > 1} == {
        name for name in ignored if place in name
    }
    assert passed(verify(tmp_path / "out", source=models[kind]))


@pytest.mark.parametrize("kind", PLACES)
def test_a_pattern_has_them_rounded_as_layers_are(kind, models, whole, tmp_path):
    place = PLACES[kind]
    asked = recipe(set={f"{place}*": {"skip": False}})
    report = compress(models[kind], tmp_path / "out", asked)
    compress(whole, tmp_path / "rtn", recipe("rtn"))
    out, rounded, numbered = weights(tmp_path / "out"), weights(tmp_path / "rtn"), PLACES["numbered"]
    found = {name.removeprefix(place): value for name, value in out.items() if name.startswith(place)}
    joining = found.pop("eh_proj.weight")
    assert same(found, {name.removeprefix(numbered): value for name, value in rounded.items() if numbered in name})
    assert torch.equal(joining, weights(models[kind])[f"{place}eh_proj.weight"])
    assert [item["method"] for item in report["linears"] if place in item["name"]] == ["rtn"] * 7
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert len(settings["config_groups"]) == 1
    assert [name for name in settings["ignore"] if place in name] == [f"{place}eh_proj"]
    assert passed(verify(tmp_path / "out", source=models[kind]))


def test_transformers_gives_the_same_logits_whether_or_not_they_are_rounded(models, tmp_path):
    tokens, found = torch.arange(5, 45).view(1, -1), []
    for name, patterns in {"copied": {}, "rounded": {"layers.4.*": {"skip": False}}}.items():
        compress(models["numbered"], tmp_path / name, recipe(set=patterns))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        with torch.no_grad():
            found.append(model(tokens).logits)
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", PLACES)
def test_their_codes_go_to_another_container_and_back(kind, models, tmp_path):
    left = {"o_proj": {"skip": True}}
    for name, patterns in {"rounded": {f"{PLACES[kind]}*": {"skip": False}, **left}, "copied": left}.items():
        compress(models[kind], tmp_path / name, recipe("rtn", set=patterns))
        llmcompress.export(tmp_path / name, "gptq", tmp_path / f"{name}-gptq")
        assert passed(verify(tmp_path / f"{name}-gptq", source=tmp_path / name))
        llmcompress.export(tmp_path / f"{name}-gptq", "compressed-tensors", tmp_path / f"{name}-back")
        assert same(weights(tmp_path / f"{name}-back"), weights(tmp_path / name))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_blocks_of_small_floats_hold_them(kind, models, tmp_path):
    asked = recipe("rtn", type=kind, bits=4, group_size=None, set={"mtp.*": {"skip": False}})
    report = compress(models["mtp"], tmp_path / "out", asked)
    assert sum("mtp" in item["name"] for item in report["linears"]) == 7
    assert passed(verify(tmp_path / "out", source=models["mtp"]))


def test_experts_of_undeclared_families_are_rounded_too(random_model_dir, tmp_path):
    source = random_model_dir("deepseek_v3", **LATENT)
    model = further(source, tmp_path / "model", "model.layers.2.", 1, 64)
    for name, patterns in {"copied": {}, "rounded": {"layers.2.*": {"skip": False}}}.items():
        plan = make_plan(recipe("rtn", group_size=32, set=patterns), model, Options(out=tmp_path / name))
        assert sum(matrix.layer == 2 for matrix in plan.matrices) == (20 if patterns else 0)
        assert decoder_share(plan).changed > 0.99  # the further layer is not of the decoder
        assert not any("layers.2." in name for name, _ in decoder_share(plan).left)
        refusals = violations(targets()["transformers"], "compressed-tensors", plan.entries, plan.headers.config)
        assert not any("experts" in refusal.what for refusal in refusals)
    compress(model, tmp_path / "rounded", recipe("rtn", group_size=32, set={"layers.2.*": {"skip": False}}))
    assert passed(verify(tmp_path / "rounded", source=model))


def test_inputs_that_would_have_to_be_measured_are_refused(models, tmp_path):
    asked = recipe(bits=8, group_size=-1, activations="int8-tensor", set={"mtp.*": {"skip": False}})
    with pytest.raises(PlanError, match=r"no text runs through mtp\.layers\.0\..*int8-tensor inputs"):
        make_plan(asked, models["mtp"], Options(out=tmp_path / "out"))
    asked = recipe("rtn", bits=8, group_size=-1, activations="int8-token", set={"mtp.*": {"skip": False}})
    plan = make_plan(asked, models["mtp"], Options(out=tmp_path / "out"))
    assert {matrix.entry.inputs.name for matrix in plan.matrices if "mtp" in matrix.module} == {"int8-token"}


def test_more_layers_than_config_counts_are_refused(models, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(models["numbered"], path)
    config = json.loads((path / "config.json").read_text())
    del config["num_nextn_predict_layers"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="speaks of 4 layers"):
        make_plan(recipe(), path, Options(out=tmp_path / "out"))


def test_transforms_of_hidden_states_and_of_widths_are_refused(models, tmp_path):
    steps = [{"method": "rotate"}, {"method": "rtn", "bits": 4, "group_size": 64}]
    with pytest.raises(PlanError, match=r"mtp\.layers\.0\..*of a layer after the last, reads them too"):
        make_plan(steps_recipe(steps), models["mtp"], Options(out=tmp_path / "out"))
    with pytest.raises(PlanError, match="would keep the width"):
        plan_width(models["mtp"], WidthRequest(0.5), Calibration(samples=2, length=32), Options(out=tmp_path / "out"))


def test_their_numbers_follow_those_of_the_layers_that_depth_keeps(models, tmp_path):
    text = Calibration(samples=2, length=32)
    request = DepthRequest(1)
    plan = plan_depth(models["numbered"], request, text, Options(out=tmp_path / "out"))
    prune_depth(plan)
    before, after = weights(models["numbered"]), weights(tmp_path / "out")
    old, new = (f"model.layers.{number}." for number in (LAYERS, LAYERS - 1))
    assert same(
        {name.removeprefix(old): value for name, value in before.items() if name.startswith(old)},
        {name.removeprefix(new): value for name, value in after.items() if name.startswith(new)},
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == LAYERS - 1
