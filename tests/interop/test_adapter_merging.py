"""What we merge of an adapter is what PEFT merges."""

import pytest
import torch
from safetensors.torch import load_file

from llmcompress.engine.source.adapting import with_adapter
from llmcompress.engine.source.matrix_refs import matrices_of
from llmcompress.engine.source.open import open_checkpoint, source_headers
from llmcompress.ledger import Ledger

pytestmark = pytest.mark.interop

CASES = {
    "a list of targets": {"target_modules": ["q_proj", "v_proj"]},
    "every linear, by the root of the rank": {"target_modules": "all-linear", "use_rslora": True},
    "magnitudes": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "patterns": {
        "target_modules": r".*layers\.[01]\.mlp\.(up|down)_proj",
        "rank_pattern": {"down_proj": 6},
        "alpha_pattern": {r"layers\.1\.mlp\.up_proj": 32},
    },
    "saved modules": {"target_modules": ["k_proj"], "modules_to_save": ["norm", "lm_head"]},
    "some layers": {"target_modules": ["o_proj"], "layers_to_transform": [1]},
    "the embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "the embedding with magnitudes": {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    "biases": {"target_modules": ["q_proj"], "bias": "all", "lora_bias": False},
    "biases of corrections": {"target_modules": ["q_proj"], "lora_bias": True},
    "stored the other way": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "stored the other way with magnitudes": {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True},
}


def family(name):
    return "gpt2" if name.startswith("stored") else "qwen2" if name.startswith("biases") else "llama"


@pytest.mark.parametrize("name", CASES)
def test_a_merged_adapter_gives_the_tensors_that_peft_gives(name, random_model_dir, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    source = random_model_dir(family(name), dtype="float32", tie_word_embeddings=family(name) == "gpt2")
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **CASES[name])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(base, config)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += 0.05 * torch.randn(parameter.shape)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")

    headers = source_headers(source, Ledger())
    found = with_adapter(headers, matrices_of(headers, False, Ledger()), tmp_path / "adapter", Ledger())
    checkpoint, before = open_checkpoint(found), load_file(source / "model.safetensors")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    changed = 0
    for tensor, wanted in merged.items():
        torch.testing.assert_close(checkpoint.read(tensor), wanted, rtol=1e-5, atol=1e-6)
        changed += not torch.equal(wanted, before[tensor])
    assert changed == len(found.merged.changes)
