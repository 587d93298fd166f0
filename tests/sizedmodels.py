"""Random models of real widths for what is measured of processes, and the command line as a process."""

import json
import os
import subprocess
import sys

import torch
from safetensors.torch import save_file

from madetokenizers import byte_level, save

WIDTHS = {  # hidden, feed-forward, heads, key-value heads, vocabulary
    "small": (256, 704, 4, 2, 8192),
    "smollm2": (576, 1536, 9, 3, 49152),
    "wide": (1024, 2816, 16, 4, 32000),
}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def write(path, hidden, inner, heads, pairs, vocabulary, layers=2, tied=True):
    path.mkdir()
    generator = torch.Generator().manual_seed(hidden)
    dim = hidden // heads
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for number in range(layers):
        below = f"model.layers.{number}"
        shapes |= {f"{below}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{below}.self_attn.{n}_proj.weight": (dim * pairs, hidden) for n in "kv"}
        shapes |= {f"{below}.self_attn.{n}_proj.weight": (hidden, hidden) for n in "qo"}
        shapes |= {f"{below}.mlp.{n}_proj.weight": (inner, hidden) for n in ("gate", "up")}
        shapes[f"{below}.mlp.down_proj.weight"] = (hidden, inner)
    shapes |= {} if tied else {"lm_head.weight": (vocabulary, hidden)}
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * hidden**-0.5
        for name, shape in shapes.items()
    }
    save_file({name: t.to(torch.bfloat16) for name, t in tensors.items()}, path / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": pairs,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    save(byte_level(), path)
    ids = torch.randint(0, vocabulary, (32, 512), generator=generator)
    save_file({"input_ids": ids}, path.with_suffix(".ids.safetensors"))
    return path


def call(*arguments):
    """The command line as a user has it, in whose environment nothing says how many threads a library may start."""
    command = [sys.executable, "-m", "llmcompress", *map(str, arguments), "--json"]
    environment = {key: value for key, value in os.environ.items() if key not in THREADS}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
