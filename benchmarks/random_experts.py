"""Write a model of one layer of experts, random bfloat16 weights in a real model's shapes, and token ids for it.

    python benchmarks/random_experts.py qwen3-30b-a3b DIR --samples 64 --length 512

The layer is whole: attention, router and every expert; the vocabulary is small. Values are those of
scripts/make_random_model.py, whose tokenizer and ids these are too. Shards of at most some 2 GB, one in memory at a
time.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

from make_random_model import SHAPES, filled, write_ids, write_tokenizer

Shapes = dict[str, tuple[int, ...]]
VOCABULARY, SHARD = 4096, 1 << 30  # tokens; weights in a shard at most
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
TINY = {**QWEN3, "hidden_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
TINY |= {"num_experts": 4, "num_experts_per_tok": 2}
SIZES = {"tiny": TINY, "qwen3-30b-a3b": QWEN3}
COMMON = {
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def feed_forward(path: str, hidden: int, inner: int) -> Shapes:
    """The three matrices of an expert."""
    sizes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {f"{path}.{name}": size for name, size in sizes.items()}


def around(config: dict, hidden: int) -> Shapes:
    """Attention and router of a layer."""
    head = config["head_dim"]
    wide, narrow = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        "self_attn.q_proj": (wide, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, wide),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate": (config["num_experts"], hidden),
    }


def tensors(shape: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes of all tensors."""
    config = SIZES[shape]
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    yield from (("model.embed_tokens.weight", (VOCABULARY, hidden)), ("lm_head.weight", (VOCABULARY, hidden)))
    yield "model.norm.weight", (hidden,)
    below = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), **around(config, hidden)}
    for number in range(config["num_experts"]):
        below |= feed_forward(f"mlp.experts.{number}", hidden, inner)
    yield from ((f"model.layers.0.{name}.weight", size) for name, size in below.items())


def write(shape: str, out: Path) -> int:
    """Configuration, shards and their index; the bytes of all tensors."""
    shards: list[Shapes] = [{}]
    held = 0
    for name, size in tensors(shape):
        held += torch.Size(size).numel()
        if held > SHARD:
            shards.append({})
            held = torch.Size(size).numel()
        shards[-1][name] = size
    where, total = {}, 0
    for number, sizes in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        made = {name: filled(name, size, 0) for name, size in sizes.items()}
        save_file(made, out / file, metadata={"format": "pt"})
        where |= dict.fromkeys(made, file)
        total += sum(tensor.nbytes for tensor in made.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (out / "config.json").write_text(json.dumps({**COMMON, **SIZES[shape]}, indent=1) + "\n")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SIZES)
    parser.add_argument("out", type=Path, metavar="DIR")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    write_tokenizer(args.out)
    widths = type(SHAPES["tiny"])(0, 0, 1, 1, 1, VOCABULARY)
    write_ids(widths, args.out / "ids.safetensors", args.samples, args.length, 0)
    print(json.dumps({"bytes": write(args.shape, args.out)}))


if __name__ == "__main__":
    main()
