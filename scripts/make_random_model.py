"""Write a llama checkpoint of random bfloat16 weights in a real model's shapes, and token ids to calibrate it with.

    python scripts/make_random_model.py llama-2-7b models/7b
    python scripts/make_random_model.py llama-2-70b models/70b-slice --layers 2

One shard per layer, several at a time. Every tensor has a seed of its own, so a model with fewer layers holds the same
ones. Weights are normal with the deviations of trained models; a few channels of the residual stream are much larger,
as there. Ids lie beside the shards as ids.safetensors: 128 windows of 2048 tokens, frequent ones as in text. The
tokenizer knows bytes alone. What is there already is left alone.
"""

import argparse
import json
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

OUTLIERS, FACTOR = 6, 12.0  # channels, and how much larger they are
LEAST_IDS = 3  # below are the special tokens


@dataclass(frozen=True)
class Shape:
    """Of a llama model."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int = 32000

    @property
    def narrow(self) -> int:
        """Width of all keys."""
        return self.hidden // self.heads * self.kv_heads


SHAPES = {
    "tiny": Shape(256, 768, 8, 4, 2, 512),
    "small": Shape(1024, 2816, 16, 4, 2, 4096),
    "tinyllama": Shape(2048, 5632, 32, 4, 22),
    "llama-3-8b": Shape(4096, 14336, 32, 8, 32, 128256),
    "llama-2-7b": Shape(4096, 11008, 32, 32, 32),
    "llama-2-13b": Shape(5120, 13824, 40, 40, 40),
    "llama-2-70b": Shape(8192, 28672, 64, 8, 80),
}


def layer(shape: Shape, number: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a layer, by name."""
    hidden, narrow, ffn = shape.hidden, shape.narrow, shape.ffn
    sizes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    return {f"model.layers.{number}.{name}.weight": size for name, size in sizes.items()}


def shards(shape: Shape) -> list[dict[str, tuple[int, ...]]]:
    """Tensors of every file."""
    table = (shape.vocabulary, shape.hidden)
    ends = [{"model.embed_tokens.weight": table}, {"lm_head.weight": table, "model.norm.weight": (shape.hidden,)}]
    return [*ends, *(layer(shape, number) for number in range(shape.layers))]


def filled(name: str, size: tuple[int, ...], seed: int) -> torch.Tensor:
    """Values of a tensor, the same for the same name and seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + (seed << 32))
    large = torch.randperm(size[-1], generator=torch.Generator().manual_seed(seed))[:OUTLIERS]
    if len(size) == 1:
        norm = 0.5 + 0.1 * torch.randn(size, generator=generator)
        norm[large] *= FACTOR
        return norm.to(torch.bfloat16)
    weight = torch.empty(size, dtype=torch.bfloat16).normal_(std=size[-1] ** -0.5, generator=generator)
    if "embed_tokens" in name:
        weight[:, large] *= FACTOR
    if "o_proj" in name or "down_proj" in name:
        weight *= 0.2  # what layers add to the residual stream is small beside it
    return weight


def config(shape: Shape) -> dict[str, object]:
    """config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 4096,
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


def write(shape: Shape, out: Path, seed: int, threads: int) -> int:
    """Write a model into an empty directory; its bytes."""
    files = shards(shape)
    names = [f"model-{number + 1:05}-of-{len(files):05}.safetensors" for number in range(len(files))]

    def one(number: int) -> int:
        tensors = {name: filled(name, size, seed) for name, size in files[number].items()}
        save_file(tensors, out / names[number], metadata={"format": "pt"})
        return sum(tensor.nbytes for tensor in tensors.values())

    torch.set_num_threads(1)  # threads are shared out by file
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(one, range(len(files))))
    index = {"metadata": {"total_size": total}}
    index["weight_map"] = {tensor: name for name, file in zip(names, files, strict=True) for tensor in file}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (out / "config.json").write_text(json.dumps(config(shape), indent=1) + "\n")
    return total


def write_ids(shape: Shape, file: Path, samples: int, length: int, seed: int) -> None:
    """Token ids whose frequencies fall with their rank, as those of words do."""
    uniform = torch.rand(samples, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ids = (LEAST_IDS * (shape.vocabulary / LEAST_IDS) ** uniform).long().clamp_(LEAST_IDS, shape.vocabulary - 1)
    save_file({"input_ids": ids}, file)


def write_tokenizer(out: Path) -> None:
    """A tokenizer of bytes, which leaves most of a vocabulary unused."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    words[2 * alphabet[-1]] = len(words)  # llama.cpp loads none without a merge
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[(alphabet[-1], alphabet[-1])]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    made.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path, metavar="DIR")
    parser.add_argument("--layers", type=int, help="in place of the model's")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=8)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    shape = Shape(**{**asdict(shape), "layers": args.layers or shape.layers})
    about = json.dumps([asdict(shape), args.samples, args.length, args.seed])
    done = args.out / "made.json"  # last: with it, all is there
    if done.exists():
        sys.exit(None if done.read_text() == about else f"{args.out} holds another model")
    args.out.mkdir(parents=True)
    write_tokenizer(args.out)
    write_ids(shape, args.out / "ids.safetensors", args.samples, args.length, args.seed)
    total = write(shape, args.out, args.seed, args.threads)
    done.write_text(about)
    print(json.dumps({"bytes": total}))


if __name__ == "__main__":
    main()
