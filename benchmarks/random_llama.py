"""Write a llama checkpoint of random bfloat16 weights, and a file of random token ids to calibrate it with.

    python benchmarks/random_llama.py DIR IDS.safetensors --layers 48

One shard per layer, one tensor at a time: writing takes the memory of one layer. Without a tokenizer, as calibration
comes as ids. The widths are TinyLlama's unless told otherwise. Every tensor has a seed of its own, so a model with more
layers begins with the same ones.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

Shapes = dict[str, tuple[int, ...]]


def layer_shapes(args: argparse.Namespace, at: int) -> Shapes:
    """Tensors of layer `at`."""
    hidden, head = args.hidden, args.hidden // args.heads
    wide, narrow = args.heads * head, args.kv_heads * head
    shapes: Shapes = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (wide, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, wide),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (args.ffn, hidden),
        "mlp.up_proj": (args.ffn, hidden),
        "mlp.down_proj": (hidden, args.ffn),
    }
    return {f"model.layers.{at}.{name}.weight": shape for name, shape in shapes.items()}


def filled(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Ones for a norm; else normal with the deviation models are initialised with."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)


def write_model(args: argparse.Namespace) -> None:
    """Configuration, shards and their index."""
    shards: list[Shapes] = [
        {"model.embed_tokens.weight": (args.vocabulary, args.hidden)},
        {"lm_head.weight": (args.vocabulary, args.hidden), "model.norm.weight": (args.hidden,)},
        *(layer_shapes(args, at) for at in range(args.layers)),
    ]
    where, size = {}, 0
    for number, shapes in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        tensors = {name: filled(shape, 1000 * number + at) for at, (name, shape) in enumerate(shapes.items())}
        save_file(tensors, args.out / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (args.out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.hidden,
        "intermediate_size": args.ffn,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.hidden // args.heads,
        "vocab_size": args.vocabulary,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (args.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="DIR")
    parser.add_argument("ids", type=Path, metavar="IDS.safetensors")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--ffn", type=int, default=5632)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_model(args)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(args.vocabulary, (args.samples, args.length), generator=generator)
    save_file({"input_ids": ids}, args.ids)


if __name__ == "__main__":
    main()
