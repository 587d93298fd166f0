"""Undeclared families are scaled where that was proven: transformers computes the same with the scaled model."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from llmcompress import arch
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.plan.scaled_sites import with_sites
from llmcompress.engine.source.folding import scaling_folds
from llmcompress.engine.source.matrix_refs import matrices_of
from llmcompress.engine.source.tensor_names import Anatomy
from llmcompress.errors import PlanError
from llmcompress.ledger import Ledger
from llmcompress.model import proven_sites
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.folds import FoldedCheckpoint
from llmcompress.store.headers import read_headers
from llmcompress.validate.verify import passed, verify
from streaming import ids
from tinyruns import steps_recipe

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
AWQ = [{"method": "awq", "steps": 4}, {"method": "rtn", "bits": 4, "group_size": 32}]
UNDECLARED = {
    "starcoder2": HEADS,
    "falcon": {"num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2},  # one key-value head, parallel branches
    "bloom": {"n_head": 4},
    "codegen": {"n_head": 4, "n_embd": 64, "rotary_dim": 8, "bos_token_id": 1, "eos_token_id": 2},
    "gemma": {**HEADS, "head_dim": 16},
    "lfm2": {**HEADS, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "qwen2_moe": {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                  "shared_expert_intermediate_size": 48},
    "deepseek_v3": {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16,
                    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4,
                    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                    "first_k_dense_replace": 1},
}  # fmt: skip


def scaled_anatomy(path, ledger=None):
    headers, ledger = read_headers(path), ledger or Ledger()
    matrices = with_sites(headers, matrices_of(headers, False, ledger), steps_recipe(AWQ), False, ledger)
    return Anatomy(headers, matrices.spec, matrices.prefix, matrices.layers)


def scales(anatomy, skip=None):
    """Changes by random factors at every site of every layer; skip: (layer, site, part) that is forgotten."""
    generator = torch.Generator().manual_seed(0)
    for layer in range(anatomy.layers):
        for number, site in enumerate(anatomy.sites(layer)):
            factors = torch.rand(site.channels, dtype=torch.float64, generator=generator) * 1.5 + 0.5
            parts = [part for place, part in enumerate(site.parts) if (layer, number, place) != skip]
            yield scaling_folds(anatomy, layer, parts, factors)


@torch.no_grad()
def logits(path):
    """By transformers, from a directory."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    return model(input_ids=ids(2), use_cache=False).logits


def scaled_logits(anatomy, source, folder, skip=None):
    """Logits of the model with its tensors scaled in float64, written and loaded again."""
    checkpoint = FoldedCheckpoint(Checkpoint(source), frozenset(anatomy.headers.tensors))
    for folds in scales(anatomy, skip):
        checkpoint.fold(folds)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    tensors = {name: checkpoint.read(name).contiguous() for name in anatomy.headers.tensors}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return logits(folder)


def error(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", UNDECLARED)
def test_scaled_at_every_proven_site_transformers_computes_the_same(random_model_dir, tmp_path, family):
    assert arch.find(family) is None
    source = random_model_dir(family, dtype="float32", **UNDECLARED[family])
    anatomy = scaled_anatomy(source)
    assert all(anatomy.sites(layer) for layer in range(anatomy.layers))
    assert error(scaled_logits(anatomy, source, tmp_path / "scaled"), logits(source)) < 2e-5


@pytest.mark.parametrize("family", ["falcon", "qwen2_moe"])
def test_no_part_of_a_proven_site_can_be_left_out(random_model_dir, tmp_path, family):
    source = random_model_dir(family, dtype="float32", **UNDECLARED[family])
    anatomy, expected = scaled_anatomy(source), logits(source)
    for number, site in enumerate(anatomy.sites(1)):
        for place, part in enumerate(site.parts):
            found = scaled_logits(anatomy, source, tmp_path / "scaled", (1, number, place))
            assert error(found, expected) > 1e-4, (site.writer.path, part.path)


def test_experts_are_scaled_each_by_itself(random_model_dir):
    anatomy = scaled_anatomy(random_model_dir("qwen2_moe", **UNDECLARED["qwen2_moe"]))
    writers = {site.writer.path: [part.path for part in site.readers] for site in anatomy.sites(0)}
    for number in range(4):
        assert writers[f"mlp.experts.{number}.up_proj"] == [f"mlp.experts.{number}.down_proj"]
        assert f"mlp.experts.{number}.gate_proj" in writers["post_attention_layernorm"]
    assert {"mlp.gate", "mlp.shared_expert_gate"} <= set(writers["post_attention_layernorm"])


def test_an_undeclared_family_is_scaled_rounded_and_verified_and_the_ledger_names_the_rest(
    random_model_dir, tiny_model_dir, tmp_path
):
    source = tmp_path / "source"
    shutil.copytree(random_model_dir("starcoder2", **HEADS, vocab_size=1300, bos_token_id=1, eos_token_id=2), source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model_dir / name, source)
    plan = make_plan(steps_recipe(AWQ, "compressed-tensors"), source, Options(out=tmp_path / "out"))
    unscaled = [(note.subject, note.why) for note in plan.ledger if note.kind == "unscaled"]
    assert unscaled == [("mlp.c_proj", "in 2 of 2 layers: no norm and no matrix writes its inputs channel by channel")]
    run(plan)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [site["space"] for site in report["sites"] if site["layer"] == 0] == [
        "what self_attn.q_proj reads",
        "what mlp.c_fc reads",
        "what self_attn.o_proj reads",
    ]
    assert all(site["smallest"] < 1 < site["largest"] for site in report["sites"])
    checks = verify(tmp_path / "out", source)
    assert passed(checks), [check for check in checks if not check.ok]


def test_a_matrix_that_layers_share_is_not_scaled(random_model_dir):
    source, ledger = random_model_dir("starcoder2", **HEADS), Ledger()
    headers = read_headers(source)
    matrices = matrices_of(headers, False, ledger)
    lost = "model.layers.1.self_attn.v_proj.weight"  # layer 1 uses that of layer 0
    headers = replace(headers, tensors={name: stored for name, stored in headers.tensors.items() if name != lost})
    found = with_sites(headers, matrices, steps_recipe(AWQ), False, ledger)
    assert [site.writer.path for site in found.spec.proven[0]] == ["post_attention_layernorm"]
    why = {note.subject: note.why for note in ledger.entries if note.kind == "unscaled"}
    assert why["self_attn.q_proj"] == "in 2 of 2 layers: not every layer has a tensor of its own of self_attn.v_proj"
    assert set(why) == {f"self_attn.{part}_proj" for part in "qkvo"} | {"mlp.c_proj"}


def test_a_family_without_a_site_is_refused_with_the_reason(random_model_dir, monkeypatch):
    source = random_model_dir("starcoder2", **HEADS)
    why = {"mlp.c_fc": "it was so decided"}
    nothing = proven_sites.ProvenSites({0: (), 1: ()}, {0: why, 1: why})
    monkeypatch.setattr(proven_sites, "prove_sites", lambda *_: nothing)
    words = "awq finds no place in a 'starcoder2' model where channels can be scaled; mlp.c_fc: it was so decided"
    with pytest.raises(PlanError, match=words):
        make_plan(steps_recipe(AWQ), source)


@pytest.mark.parametrize("step", [{"method": "rotate"}, {"method": "smoothattention"}])
def test_what_needs_more_than_sites_still_needs_a_declaration(random_model_dir, step):
    with pytest.raises(PlanError, match="needs a declaration of the architecture, 'starcoder2' has none"):
        make_plan(steps_recipe([step, AWQ[1]]), random_model_dir("starcoder2", **HEADS))


def test_nothing_is_proven_where_nothing_is_scaled(random_model_dir, monkeypatch):
    monkeypatch.delattr(proven_sites, "prove_sites")
    assert make_plan(steps_recipe([AWQ[1]]), random_model_dir("starcoder2", **HEADS)).spec.proven == {}
