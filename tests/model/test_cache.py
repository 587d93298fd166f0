"""Layers run alone on changed keys and values against transformers' whole model with a cache that does the same."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from llmcompress.errors import CheckpointError
from llmcompress.grids.cache import by_token
from llmcompress.model.changing_cache import ChangingCache
from llmcompress.validate.key_value_cache import TokenCodes
from llmcompress.validate.load import open_streamed

IDS = torch.randint(3, 96, (2, 20), generator=torch.Generator().manual_seed(1))
FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "opt", "gpt2", "gpt_neox", "mixtral",
            "qwen3_moe", "falcon", "bloom"]  # fmt: skip


class Rounding(DynamicCache):
    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return super().update(by_token(key_states, 4), by_token(value_states, 4), layer_idx, *args, **kwargs)


def streamed_logits(model, ids):
    states = model.embed(ids)
    with torch.no_grad():
        for number in range(len(model.layers)):
            with model.layer(number) as layer:
                states = model.call(number, layer, states)
        with model.outer(embed=False, head=True) as causal:
            return model.logits(causal, states)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_read_what_a_cache_of_the_whole_model_would_give_them(random_model_dir, family):
    path = random_model_dir(family, dtype="float32", **({"num_attention_heads": 4} if family == "falcon" else {}))
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        plain = whole(IDS, use_cache=False).logits
        wanted = whole(IDS, use_cache=True, past_key_values=Rounding(config=whole.config)).logits
    model = open_streamed(path, dtype=torch.float32)
    model.cache = TokenCodes(4)
    found = streamed_logits(model, IDS)
    assert (wanted - plain).abs().max() > 1e-3  # four bits do show
    # a code may fall to the other side of a tie, since sums come in another order
    assert (found - wanted).abs().mean() < 0.02 * (wanted - plain).abs().mean()


def test_a_model_that_keeps_no_keys_and_values_is_refused(random_model_dir):
    model = open_streamed(random_model_dir("mamba"), dtype=torch.float32)
    model.cache = TokenCodes(8)
    with pytest.raises(CheckpointError, match="keeps no keys and values"):
        streamed_logits(model, IDS)


def test_generation_keeps_changed_keys_and_values(random_model_dir):
    whole = AutoModelForCausalLM.from_pretrained(random_model_dir("llama"), dtype=torch.float32).eval()
    options = {"do_sample": False, "max_new_tokens": 6, "attention_mask": torch.ones_like(IDS), "pad_token_id": 0}
    wanted = whole.generate(IDS, past_key_values=Rounding(config=whole.config), **options)
    assert torch.equal(
        whole.generate(IDS, past_key_values=ChangingCache(whole.config, TokenCodes(4)), **options), wanted
    )
