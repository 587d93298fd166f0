"""Tensors by the part of a model that they are of, by names that checkpoints and GGUF files have."""

import pytest

from llmcompress.report.parts import part_of, parts_of

NAMES = {
    "embedding": [
        "model.embed_tokens.weight",
        "transformer.wte.weight",
        "token_embd.weight",
        "gpt_neox.embed_in.weight",
    ],
    "head": ["lm_head.weight", "output.weight", "embed_out.weight", "lm_head.qweight"],
    "attention": [
        "model.layers.0.self_attn.q_proj.weight_packed",
        "blk.3.attn_output.weight",
        "transformer.h.1.attn.c_proj.weight",
        "gpt_neox.layers.0.attention.query_key_value.weight",
    ],
    "feed-forward": [
        "model.layers.0.mlp.experts.7.up_proj.weight_scale",
        "blk.3.ffn_gate_exps.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.0.block_sparse_moe.experts.0.w1.weight",
        "model.decoder.layers.0.fc1.weight",
    ],
    "norms": [
        "model.norm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "blk.0.ffn_norm.weight",
        "transformer.ln_f.weight",
        "output_norm.weight",
        "model.layers.2.self_attn.k_norm.weight",
    ],
    "other": ["rope_freqs.weight"],
}


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, names in NAMES.items() for name in names])
def test_every_name_has_its_part(part, name):
    assert part_of(name) == part


def test_an_output_without_weights_has_no_parts(tmp_path):
    assert parts_of(tmp_path) == {}
