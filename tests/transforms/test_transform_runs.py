"""Recipes with transforms on the tiny trained model: written, verified, read back, taken up again, or refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmcompress import arch
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import PlanError, RecipeError, StoppedError
from llmcompress.recipe import parse
from llmcompress.validate.evaluate import measure
from llmcompress.validate.gguf_verify import verify_gguf
from llmcompress.validate.load import open_streamed
from llmcompress.validate.verify import passed, verify
from tinyruns import FEW, carry_out, kl
from tinyruns import steps_recipe as recipe

RTN = {"method": "rtn", "bits": 4, "group_size": 32, "sym": False}
STEPS = {
    "awq": [{"method": "awq", "steps": 10}, RTN],
    "smoothquant": [{"method": "smoothquant"}, {**RTN, "bits": 8}],
    "smoothquant-fixed": [{"method": "smoothquant", "alpha": 0.7, "flows": False}, {**RTN, "bits": 8}],
    "rotate": [{"method": "rotate"}, {**RTN, "bits": 8}],
    "smoothattention": [{"method": "smoothattention"}, {**RTN, "bits": 8}],
    "both": [{"method": "rotate", "seed": 3}, {"method": "awq", "steps": 5}, {"method": "gptq", "group_size": 32}],
}


@pytest.mark.parametrize(("name", "format_"), [*((name, "compressed-tensors") for name in STEPS), ("both", "dense")])
def test_a_transformed_model_is_near_its_source_and_verified(shallow_model_dir, tmp_path, windows, name, format_):
    carry_out(shallow_model_dir, tmp_path / "out", STEPS[name], format_)
    assert kl(tmp_path / "out", shallow_model_dir, windows) < 0.05
    checks = verify(tmp_path / "out", shallow_model_dir)
    assert passed(checks), [check for check in checks if not check.ok]


@pytest.mark.parametrize("name", ["awq", "smoothquant-fixed"])
def test_verify_sees_a_scale_that_was_not_applied(shallow_model_dir, tmp_path, name):
    carry_out(shallow_model_dir, tmp_path / "out", STEPS[name])
    (tmp_path / "out" / "transforms.npz").unlink()
    assert not passed(verify(tmp_path / "out", shallow_model_dir))


def test_a_rotation_alone_costs_next_to_nothing_and_unties_the_head(shallow_model_dir, tmp_path, windows):
    result = carry_out(shallow_model_dir, tmp_path / "out", [{"method": "rotate"}])
    assert kl(tmp_path / "out", shallow_model_dir, windows) < 1e-4
    before = load_file(shallow_model_dir / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert "lm_head.weight" in after
    assert bool((after["model.norm.weight"] == 1).all())
    assert result["linears"] == []
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(before[name], after[name])


def test_transformers_gives_the_logits_of_the_source_for_a_rotated_model(shallow_model_dir, tmp_path, windows):
    from transformers import AutoModelForCausalLM

    carry_out(shallow_model_dir, tmp_path / "out", [{"method": "rotate"}])
    with torch.no_grad():
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)(windows[:2]).logits.log_softmax(-1)
            for place in (tmp_path / "out", shallow_model_dir)
        )
    assert float((ours - theirs).abs().max()) < 0.2
    assert float((theirs.exp() * (theirs - ours)).sum(-1).mean()) < 1e-3


def test_a_run_that_stopped_goes_on_to_the_same_bytes(shallow_model_dir, tmp_path):
    plan = make_plan(recipe(STEPS["both"]), shallow_model_dir, Options(out=tmp_path / "parts"))
    with pytest.raises(StoppedError):
        run(plan, stop=lambda finished: finished == 1)
    run(make_plan(recipe(STEPS["both"]), shallow_model_dir, Options(out=tmp_path / "parts")))
    carry_out(shallow_model_dir, tmp_path / "whole", STEPS["both"])
    for name in ("model.safetensors", "transforms.npz", "report.json"):
        whole = tmp_path / "whole" / name
        assert whole.exists() == (tmp_path / "parts" / name).exists()
        if whole.exists():
            assert whole.read_bytes() == (tmp_path / "parts" / name).read_bytes()


def test_scales_of_both_steps_are_recorded_with_the_output(shallow_model_dir, tmp_path):
    result = carry_out(shallow_model_dir, tmp_path / "out", STEPS["awq"])
    spaces = {(site["layer"], site["space"]) for site in result["sites"]}
    assert {space for _, space in spaces} == {"attn_in", "attn_out", "mlp_in", "mlp_hidden"}
    assert any(site["largest"] > site["smallest"] for site in result["sites"])
    assert (tmp_path / "out" / "transforms.npz").exists()


@pytest.mark.parametrize("first", [{"method": "awq", "steps": 5}, {"method": "rotate"}], ids=["awq", "rotate"])
def test_a_transformed_model_becomes_a_gguf_file(shallow_model_dir, tmp_path, windows, first):
    steps = [first, {"method": "rtn", "gguf": {"type": "Q8_0"}}]
    out = tmp_path / "out.gguf"
    carry_out(shallow_model_dir, out, steps, "gguf")
    models = [open_streamed(out, dtype=torch.float32, source=shallow_model_dir)]
    models.append(open_streamed(shallow_model_dir, dtype=torch.float32))
    assert float(measure(*models, windows).kl.mean()) < 0.01
    checks = verify_gguf(out, shallow_model_dir)
    assert passed(checks), [check for check in checks if not check.ok]


REFUSED = {
    "a transform after a quantiser": ([RTN, {"method": "awq"}], "step 2, awq, comes after rtn"),
    "two quantisers": ([RTN, {"method": "gptq"}], "is the second one that rounds"),
    "scales for nothing": ([{"method": "awq"}], "awq makes weights fit for rounding, and no step rounds them"),
    "alpha above one": ([{"method": "smoothquant", "alpha": 1.5}, RTN], "alpha = 1.5"),
    "an unknown step": ([{"method": "smoothqaunt"}, RTN], "did you mean 'smoothquant'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_before_anything_is_read(shallow_model_dir, tmp_path, name):
    steps, message = REFUSED[name]
    with pytest.raises((PlanError, RecipeError)) as refused:
        make_plan(recipe(steps), shallow_model_dir, Options(out=tmp_path / "out"))
    assert message in f"{refused.value.message} {refused.value.hint}"
    assert not list(tmp_path.iterdir())


def test_an_undeclared_family_gains_what_a_declared_one_does(shallow_model_dir, tmp_path, windows):
    disguised = tmp_path / "ministral"  # computes the same from the same tensors
    shutil.copytree(shallow_model_dir, disguised)
    config = json.loads((disguised / "config.json").read_text())
    config |= {
        "model_type": "ministral",
        "architectures": ["MinistralForCausalLM"],
        "layer_types": ["full_attention"] * FEW,
    }
    (disguised / "config.json").write_text(json.dumps(config))
    assert arch.find("ministral") is None
    rounding = {**RTN, "bits": 3}
    carry_out(shallow_model_dir, tmp_path / "declared", [{"method": "awq"}, rounding])
    carry_out(disguised, tmp_path / "undeclared", [{"method": "awq"}, rounding])
    carry_out(disguised, tmp_path / "plain", [rounding])
    declared, undeclared = (
        kl(tmp_path / "declared", shallow_model_dir, windows),
        kl(tmp_path / "undeclared", disguised, windows),
    )
    assert undeclared == pytest.approx(declared, rel=0.02)  # attention sums in another order
    assert undeclared < 0.25 * kl(tmp_path / "plain", disguised, windows)


def test_a_model_whose_queries_are_not_declared_cannot_be_smoothed(random_model_dir, tmp_path):
    steps = [{"method": "smoothattention"}, {**RTN, "bits": 8}]
    with pytest.raises(PlanError, match="keys of a 'gpt_neox' model cannot be scaled against queries"):
        make_plan(recipe(steps), random_model_dir("gpt_neox"), Options(out=tmp_path / "out"))


def test_a_rotation_alone_is_refused_for_formats_of_quantised_models(shallow_model_dir, tmp_path):
    with pytest.raises(PlanError, match="format gptq is for quantised models, and no step quantises"):
        make_plan(recipe([{"method": "rotate"}], "gptq"), shallow_model_dir, Options(out=tmp_path / "out"))


def test_paths_of_the_machine_are_not_written(shallow_model_dir, tmp_path):
    carry_out(shallow_model_dir, tmp_path / "out", STEPS["awq"])
    for file in Path(tmp_path / "out").iterdir():
        assert str(tmp_path).encode() not in file.read_bytes()


def test_a_fixed_scale_of_inputs_is_that_of_the_scaled_ones(shallow_model_dir, tmp_path):
    """Of the first layer, whose inputs no rounding has changed, against transformers on the source."""
    from transformers import AutoModelForCausalLM

    from llmcompress.engine.run.tokens import calibration_tokens

    smooth = {"method": "smoothquant", "alpha": 0.7, "flows": False}
    fixed = {"activations": "int8-tensor", "activation_clip": "absmax", "bits": 8, "group_size": -1}
    made = recipe([smooth, {"method": "rtn", **fixed}], "compressed-tensors")
    plan = make_plan(made, shallow_model_dir, Options(out=tmp_path / "out"))
    run(plan)
    assert passed(verify(tmp_path / "out", shallow_model_dir))
    name = "model.layers.0.self_attn.q_proj"
    model, seen = AutoModelForCausalLM.from_pretrained(shallow_model_dir, dtype=torch.float32), []
    model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(calibration_tokens(plan))
    factors = np.load(tmp_path / "out" / "transforms.npz")[f"{name}.weight/1"]
    most = float((seen[0][:, 1:].double() / torch.from_numpy(factors)).abs().max())
    stored = float(load_file(tmp_path / "out" / "model.safetensors")[f"{name}.input_scale"])
    assert stored * 127.5 == pytest.approx(most, rel=0.02)
    assert stored * 127.5 != pytest.approx(float(seen[0][:, 1:].abs().max()), rel=0.05)


@pytest.mark.parametrize(
    "method",
    [
        {"type": "fp8", "bits": 8, "activations": "fp8-token"},
        {"bits": 8, "group_size": -1, "activations": "int8-token"},
    ],
    ids=["fp8", "int8"],
)
@pytest.mark.parametrize(
    "step", [{"method": "awq", "steps": 4}, {"method": "smoothquant"}, {"method": "rotate"}], ids=str
)
def test_transforms_go_before_every_kind_of_grid(shallow_model_dir, tmp_path, windows, step, method):
    carry_out(shallow_model_dir, tmp_path / "out", [step, {"method": "rtn", **method}], "compressed-tensors")
    assert kl(tmp_path / "out", shallow_model_dir, windows) < 0.01
    assert passed(verify(tmp_path / "out", shallow_model_dir))


@pytest.mark.parametrize(
    ("format_", "method"),
    [
        ("bitsandbytes", {"type": "nf4"}),
        ("bitsandbytes", {"type": "int8", "bits": 8}),
        pytest.param("codebook", {"type": "codebook", "bits": 4}, marks=pytest.mark.slow),
        ("int8-outliers", {"type": "int8", "bits": 8, "outliers": "topk", "outlier_count": 4}),
        ("qoq", {"type": "progressive", "activations": "int8-token"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_awq_is_searched_on_grids_of_their_own(shallow_model_dir, tmp_path, windows, format_, method):
    steps = [{"method": "awq", "steps": 2}, {"method": "rtn", **method}]
    carry_out(shallow_model_dir, tmp_path / "out", steps, format_)
    assert kl(tmp_path / "out", shallow_model_dir, windows) < 0.05
    assert passed(verify(tmp_path / "out", shallow_model_dir))


MORE = {
    "a rotation after scales": (
        [{"method": "awq"}, {"method": "rotate"}, RTN],
        "step 2, rotate, comes after awq, whose channels it would turn",
    ),
    "types of GGUF beside another type": (
        [{"method": "rtn", "type": "nf4", "gguf": {"type": "Q4_0"}}],
        "types of GGUF stand in place of type, outliers and activations",
    ),
}


@pytest.mark.parametrize("name", MORE)
def test_contradictions_are_refused(shallow_model_dir, tmp_path, name):
    steps, message = MORE[name]
    with pytest.raises((PlanError, RecipeError)) as refused:
        make_plan(recipe(steps), shallow_model_dir, Options(out=tmp_path / "out"))
    assert message in refused.value.message


def test_an_importance_matrix_is_refused_where_channels_change(shallow_model_dir, tmp_path):
    data = {
        "calibration": {"imatrix": str(tmp_path / "imatrix.gguf")},
        "steps": [{"method": "rotate"}, {"method": "rtn", "gguf": {"type": "Q4_0"}}],
        "output": {"format": "gguf"},
    }
    with pytest.raises(PlanError, match="rotate changes channels that the importance matrix speaks of"):
        make_plan(parse(data), shallow_model_dir, Options(out=tmp_path / "out.gguf"))


def test_overwriting_leaves_no_scales_of_the_file_before(shallow_model_dir, tmp_path):
    out = tmp_path / "out.gguf"
    rtn = {"method": "rtn", "gguf": {"type": "Q8_0"}}
    carry_out(shallow_model_dir, out, [{"method": "awq", "steps": 5}, rtn], "gguf")
    assert (tmp_path / "out.gguf.transforms.npz").exists()
    carry_out(shallow_model_dir, out, [rtn], "gguf", overwrite=True)
    assert not (tmp_path / "out.gguf.transforms.npz").exists()
    assert passed(verify_gguf(out, shallow_model_dir))


PARTLY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("family", "options"),
    [("phi3", {"rope_parameters": PARTLY}), ("qwen3", {})],
    ids=["partly rotated", "normed keys"],
)
def test_smoothed_keys_leave_the_logits_as_they_were(random_model_dir, tmp_path, family, options):
    model = random_model_dir(family, dtype="float32", **options)
    ids = torch.randint(3, 96, (4, 32), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    data = {
        "calibration": {"source": str(tmp_path / "ids.safetensors"), "samples": 4, "length": 32},
        "steps": [{"method": "smoothattention", "alpha": 1.0}, {"method": "rtn", "bits": 8, "group_size": 32}],
        "output": {"format": "dense"},
    }
    data["steps"][1]["set"] = {"*": {"skip": True}, "layers.0.self_attn.o_proj": {"skip": False}}  # next to nothing
    run(make_plan(parse(data), model, Options(out=tmp_path / "out")))
    models = (open_streamed(path, dtype=torch.float32) for path in (tmp_path / "out", model))
    assert float(measure(*models, ids).kl.mean()) < 1e-4
