"""Logits of a continuation behind a context whose cache kvpress compressed.

    .venv-kvpress/bin/python kvpress_check.py LENGTH IDS FOUND MODEL

IDS has `input_ids` [windows, length], of which the first LENGTH are the context. FOUND gets, by score and ratio
(`snapkv:0.5`), the logits float32 [windows, length - LENGTH, vocabulary].
"""

import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

RATIOS = (0.25, 0.5, 0.7)


def main() -> None:
    context, ids, found, model = int(sys.argv[1]), *sys.argv[2:]

    import kvpress
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, DynamicCache

    presses = {
        "streaming": kvpress.StreamingLLMPress,
        "knorm": kvpress.KnormPress,
        "h2o": kvpress.ObservedAttentionPress,
        "snapkv": kvpress.SnapKVPress,
        "tova": kvpress.TOVAPress,
        "expected": kvpress.ExpectedAttentionPress,
    }
    tokens = load_file(ids)["input_ids"]
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    logits, places = {}, torch.arange(tokens.shape[1])
    for name, press in presses.items():
        for ratio in RATIOS:
            rows = []
            for row in tokens:  # some of its scores go by the largest of a batch
                cache = DynamicCache(config=loaded.config)
                with torch.no_grad():
                    with press(ratio)(loaded):
                        # transformers no longer says by itself which positions these are
                        loaded(row[None, :context], past_key_values=cache, cache_position=places[:context])
                    left = cache.get_seq_length()
                    assert left == int(context * (1 - ratio)), f"{name}:{ratio} kept {left} of {context}"
                    rows.append(behind(loaded, row[None, context:], places[None, context:], cache, left))
            logits[f"{name}:{ratio}"] = torch.cat(rows)
    save_file(logits, found)
    print(json.dumps({}))


def behind(model, ids, places, cache, left):  # type: ignore[no-untyped-def]
    """Logits of tokens at their true positions, which see all that is cached and those before them."""
    import torch

    new = ids.shape[1]
    least = torch.finfo(torch.float32).min
    mask = torch.full((new, left + new), least).triu(left + 1)[None, None]
    return model(ids, past_key_values=cache, position_ids=places, attention_mask=mask).logits


if __name__ == "__main__":
    main()
