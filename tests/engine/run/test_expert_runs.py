"""Families of experts that nobody declared: every expert is calibrated, quantised, reported and verified."""

import shutil

import pytest
import torch
from safetensors import safe_open
from torch import nn

from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.run.starved_experts import ExpertInputs
from llmcompress.errors import PlanError, StoppedError
from llmcompress.model.experts import Expert, ExpertLayout, UnfusedExperts
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.validate.verify import verify
from llmcompress.workers import Workers
from tinyruns import after, compress, recipe, steps_recipe

FEW = {"samples": 2}  # so few tokens that every expert borrows from its layer
SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES = {
    "qwen2_moe": ({**SMALL, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                   "shared_expert_intermediate_size": 64},
                  "mlp.experts.{e}", ("gate_proj", "up_proj", "down_proj")),
    "minimax_m2": ({**SMALL, "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
                   "block_sparse_moe.experts.{e}", ("w1", "w2", "w3")),
    "nemotron_h": ({**SMALL, "layers_block_type": ["full_attention", "moe"], "n_routed_experts": 3, "head_dim": 16,
                    "num_experts_per_tok": 2, "moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 64,
                    "n_group": 1, "topk_group": 1},
                   "mixer.experts.{e}", ("up_proj", "down_proj")),
}  # fmt: skip


@pytest.fixture
def model(request, random_model_dir, tiny_model_dir, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(random_model_dir(request.param, vocab_size=1200, **FAMILIES[request.param][0]), path)
    for file in tiny_model_dir.iterdir():
        if file.suffix in (".json", ".jinja") and file.name != "config.json" and not (path / file.name).exists():
            shutil.copy(file, path)
    return request.param, path


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_every_expert_of_an_undeclared_family_is_quantised_under_its_own_name(model, tmp_path):
    family, source = model
    _, block, parts = FAMILIES[family]
    report = compress(source, tmp_path / "out", recipe(calibration=FEW, group_size=32))
    stored = set(safe_open(source / "model.safetensors", "pt").keys())
    written = set(safe_open(tmp_path / "out" / "model.safetensors", "pt").keys())
    recorded = {record["name"]: record for record in report["linears"]}
    starved = {note["subject"] for note in report["ledger"] if note["kind"] == "starved_expert"}
    experts = {name.removesuffix(".weight") for name in stored if ".experts." in name}
    assert {f"{block.format(e=e)}.{part}" for e in range(3) for part in parts} == {
        name.partition("layers.1.")[2] for name in experts if "layers.1." in name
    }
    for name in experts:
        assert f"{name}.weight_packed" in written
        assert recorded[name]["relative_error"] < 0.3
        assert name in starved or ".gate_proj" in name or ".up_proj" in name or ".w1" in name or ".w3" in name
    untouched = {name for name in stored & written if "router" in name or ".gate." in name}
    assert untouched
    assert not [check for check in verify(tmp_path / "out", source) if not check.ok]


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_experts_that_are_read_for_every_product_get_the_same_codes(model, tmp_path, monkeypatch):
    family, source = model
    made, usual = recipe(calibration=FEW, group_size=32), {"batch": 1, "threads": 1}
    compress(source, tmp_path / "held", made, **usual)
    held = make_plan(made, source, Options(out=tmp_path / "out", **usual))
    tight = {**usual, "max_memory": int(held.estimate.memory_bytes * 1.1) - 1}
    plan = make_plan(made, source, Options(out=tmp_path / "out", **tight))
    assert plan.estimate.memory_bytes < held.estimate.memory_bytes
    assert [note.subject for note in plan.ledger if note.kind == "experts_on_demand"] == ["1"]
    left = []
    leave = StreamedModel._leave_on_disk
    monkeypatch.setattr(StreamedModel, "_leave_on_disk", lambda *args: (left.append(args[3]), leave(*args)))
    with pytest.raises(StoppedError):
        compress(source, tmp_path / "out", made, stop=after(1), **tight)
    compress(source, tmp_path / "out", made, **tight)  # goes on behind the first layer, whose codes it installs
    assert set(left) == plan.on_demand(1)
    assert len(plan.on_demand(1)) == 3 * len(FAMILIES[family][2])
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "held" / "model.safetensors"
    ).read_bytes()
    with pytest.raises(PlanError, match="memory are needed"):
        make_plan(made, source, Options(out=tmp_path / "less", **{**tight, "max_memory": tight["max_memory"] // 2}))


def test_scaled_experts_are_held(random_model_dir, tmp_path):
    source = random_model_dir("qwen3_moe", num_experts=64, hidden_size=128, moe_intermediate_size=128)
    made = steps_recipe([{"method": "awq"}, {"method": "rtn", "group_size": 32}], "compressed-tensors")
    held = make_plan(made, source, Options(out=tmp_path / "out", batch=1, threads=1)).estimate.memory_bytes
    with pytest.raises(PlanError, match="memory are needed"):
        make_plan(made, source, Options(out=tmp_path / "out", batch=1, threads=1, max_memory=int(held * 1.09)))


def test_zeros_that_stand_for_tokens_sent_elsewhere_are_no_tokens():
    layout = ExpertLayout(2, 8, 6, {}, sorted=True)
    block = UnfusedExperts(layout, [Expert(layout, nn.SiLU(), None) for _ in range(2)])
    watch = ExpertInputs("mlp.experts", block, torch.device("cpu"), Workers())
    sent = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    watch.update(torch.cat([sent, torch.zeros(7, 8)]))
    assert watch.gram.tokens == 5
    assert torch.equal(watch.sample(), sent)
