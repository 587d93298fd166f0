"""Write a model of one layer of experts, random weights in a real model's shapes and types, and token ids for it.

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
BLOCK, LARGEST = 128, 448.0  # rows and columns that share a scale of FP8; the largest value of E4M3
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
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
}
SIZES = {"tiny": TINY, "qwen3-30b-a3b": QWEN3, "deepseek-v3": DEEPSEEK}
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


def latent(config: dict, hidden: int) -> Shapes:
    """Latent attention, router and shared expert of a layer of DeepSeek-V3."""
    heads, count = config["num_attention_heads"], config["n_routed_experts"]
    queries, keys = config["q_lora_rank"], config["kv_lora_rank"]
    turned, plain, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    return {
        "self_attn.q_a_proj": (queries, hidden),
        "self_attn.q_a_layernorm": (queries,),
        "self_attn.q_b_proj": (heads * (plain + turned), queries),
        "self_attn.kv_a_proj_with_mqa": (keys + turned, hidden),
        "self_attn.kv_a_layernorm": (keys,),
        "self_attn.kv_b_proj": (heads * (plain + value), keys),
        "self_attn.o_proj": (hidden, heads * value),
        "mlp.gate": (count, hidden),
        **feed_forward("mlp.shared_experts", hidden, config["moe_intermediate_size"]),
    }


def around(config: dict, hidden: int) -> Shapes:
    """Attention and router of a layer."""
    if "kv_lora_rank" in config:
        return latent(config, hidden)
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


def tensors(config: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes of all tensors."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    yield from (("model.embed_tokens.weight", (VOCABULARY, hidden)), ("lm_head.weight", (VOCABULARY, hidden)))
    yield "model.norm.weight", (hidden,)
    below = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), **around(config, hidden)}
    for number in range(config[_count(config)]):
        below |= feed_forward(f"mlp.experts.{number}", hidden, inner)
    yield from ((f"model.layers.0.{name}.weight", size) for name, size in below.items())


def _count(config: dict) -> str:
    """The key of the number of experts."""
    return "n_routed_experts" if "n_routed_experts" in config else "num_experts"


def in_blocks(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A matrix [out, in] in FP8 with a scale for each block, as DeepSeek ships it."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((1, 3)) / LARGEST
    codes = (blocks / scale[:, None, :, None]).view(padded.shape)[: weight.shape[0], : weight.shape[1]]
    return {name: codes.to(torch.float8_e4m3fn).contiguous(), f"{name}_scale_inv": scale}


def made(name: str, size: tuple[int, ...], config: dict) -> dict[str, torch.Tensor]:
    """A tensor, with the scales of its blocks where the model is shipped in FP8."""
    value = filled(name, size, 0)
    matrix = len(size) == 2 and ".layers." in name and not name.endswith("mlp.gate.weight")
    return in_blocks(name, value.float()) if matrix and "quantization_config" in config else {name: value}


def write(config: dict, out: Path) -> int:
    """Configuration, shards and their index; the bytes of all tensors."""
    shards: list[Shapes] = [{}]
    held = 0
    for name, size in tensors(config):
        held += torch.Size(size).numel()
        if held > SHARD:
            shards.append({})
            held = torch.Size(size).numel()
        shards[-1][name] = size
    where, total = {}, 0
    for number, sizes in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        held = {name: value for item in sizes.items() for name, value in made(*item, config).items()}
        save_file(held, out / file, metadata={"format": "pt"})
        where |= dict.fromkeys(held, file)
        total += sum(tensor.nbytes for tensor in held.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (out / "config.json").write_text(json.dumps({**COMMON, **config}, indent=1) + "\n")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SIZES)
    parser.add_argument("out", type=Path, metavar="DIR")
    parser.add_argument("--experts", type=int, metavar="N", help="fewer experts than the shape has")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    write_tokenizer(args.out)
    widths = type(SHAPES["tiny"])(0, 0, 1, 1, 1, VOCABULARY)
    write_ids(widths, args.out / "ids.safetensors", args.samples, args.length, 0)
    config = SIZES[args.shape]
    if args.experts is not None:
        config = {**config, _count(config): args.experts}
    print(json.dumps({"bytes": write(config, args.out)}))


if __name__ == "__main__":
    main()
