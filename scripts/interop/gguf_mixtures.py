"""Record which tensor types llama-quantize chooses, for models of many shapes and for every file type.

    scripts/interop/build_llama_cpp.sh DIR
    python scripts/interop/gguf_mixtures.py DIR/bin/llama-quantize tests/golden/gguf_mixtures.json

Nothing is quantised: the models are headers and sparse data, and llama-quantize runs dry. Of each model the file keeps
the facts and the shapes, `{}` standing for a layer's number, and which roles are F32 in any case. For each file type it
keeps the types of each other role over the layers: one, or runs such as "Q6_K*2 Q4_K" for three layers. "*" stands for
all roles that are not named. Where knowing the importance of inputs changes anything, the file type stands there again
with "+imatrix".
"""

import argparse
import json
import re
import subprocess
import tempfile
from itertools import groupby
from math import prod
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFWriter
from transformers import AutoConfig, AutoModelForCausalLM

from llmcompress.formats.gguf.keys import write
from llmcompress.formats.gguf.metadata import architecture, metadata
from llmcompress.formats.gguf.mixture import visiting_order
from llmcompress.formats.gguf.names import gguf_tensors
from llmcompress.formats.gguf.types import FILE_TYPES

WIDE = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 1024}
MODELS = {
    "llama": ("llama", WIDE | {"num_hidden_layers": 32, "num_attention_heads": 8, "num_key_value_heads": 8}),
    "llama-grouped-tied": (
        "llama",
        WIDE | {"num_hidden_layers": 17, "num_attention_heads": 8, "num_key_value_heads": 2,
                "tie_word_embeddings": True},
    ),
    "llama-narrow-tied": (
        "llama",
        {"hidden_size": 576, "intermediate_size": 1536, "vocab_size": 1024, "num_hidden_layers": 30,
         "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "llama-odd": (
        "llama",
        {"hidden_size": 80, "intermediate_size": 288, "vocab_size": 96, "num_hidden_layers": 9,
         "num_attention_heads": 5, "num_key_value_heads": 5},
    ),
    "llama-65b": ("llama", WIDE | {"num_hidden_layers": 80, "num_attention_heads": 8, "num_key_value_heads": 8}),
    "llama-70b": ("llama", WIDE | {"num_hidden_layers": 80, "num_attention_heads": 16, "num_key_value_heads": 2}),
    "qwen2-80": ("qwen2", WIDE | {"num_hidden_layers": 80, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "qwen3": ("qwen3", WIDE | {"num_hidden_layers": 28, "num_attention_heads": 8, "num_key_value_heads": 4,
                               "head_dim": 128}),
    "gpt2": ("gpt2", {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 64, "vocab_size": 1024}),
    "phi3": ("phi3", WIDE | {"num_hidden_layers": 40, "num_attention_heads": 8, "num_key_value_heads": 2,
                             "pad_token_id": 0}),
    "gemma2": ("gemma2", WIDE | {"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
                                 "head_dim": 64, "query_pre_attn_scalar": 64}),
    "gpt_neox": ("gpt_neox", {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 1024,
                              "num_hidden_layers": 6, "num_attention_heads": 8}),
    "mixtral": ("mixtral", WIDE | {"num_hidden_layers": 32, "num_attention_heads": 8, "num_key_value_heads": 2,
                                   "num_local_experts": 8}),
    "qwen3_moe": ("qwen3_moe", WIDE | {"num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 4,
                                       "head_dim": 64, "num_experts": 64, "moe_intermediate_size": 384,
                                       "norm_topk_prob": True}),
}  # fmt: skip
UNKNOWN = {"MXFP4", "NVFP4"}  # file types that llama-quantize does not write
# options of llama-quantize, as regular expressions that mean the same as the globs of the second column
WISHES = {
    "llama": [
        (["--pure"], {"pure": True}, "Q4_K_M"),
        (["--tensor-type", r"blk\.3\.attn_v=q8_0"], {"tensors": {"blk.3.attn_v": "Q8_0"}}, "Q4_K_M"),
        (["--tensor-type", r"blk\.3\.ffn_down=q8_0"], {"tensors": {"blk.3.ffn_down": "Q8_0"}}, "Q4_K_M"),
        (["--tensor-type", "attn_v=iq4_xs"], {"tensors": {"attn_v": "IQ4_XS"}}, "Q3_K_M"),
        (["--output-tensor-type", "q5_K"], {"output": "Q5_K"}, "Q4_K_M"),
        (["--token-embedding-type", "q8_0"], {"embedding": "Q8_0"}, "Q2_K"),
    ],
    "llama-grouped-tied": [
        (["--output-tensor-type", "q5_K"], {"output": "Q5_K"}, "Q4_K_M"),
        (["--token-embedding-type", "q4_0"], {"embedding": "Q4_0"}, "Q4_K_M"),
        (["--output-tensor-type", "q5_K", "--token-embedding-type", "q4_0"],
         {"output": "Q5_K", "embedding": "Q4_0"}, "Q4_K_M"),
        (["--output-tensor-type", "q5_K", "--tensor-type", "token_embd=q5_1"],
         {"output": "Q5_K", "tensors": {"token_embd": "Q5_1"}}, "Q4_K_M"),
    ],
    "mixtral": [
        (["--tensor-type", r"blk\.3\.ffn_down=q8_0"], {"tensors": {"blk.3.ffn_down_exps": "Q8_0"}}, "Q4_K_M"),
    ],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("quantizer", metavar="LLAMA-QUANTIZE", type=Path)
    parser.add_argument("output", metavar="OUTPUT.json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        importance = write_importance(Path(folder) / "imatrix.gguf")
        found = {name: answers(name, arguments.quantizer.resolve(), Path(folder), importance) for name in MODELS}
    lines = ",\n".join(f"{json.dumps(name)}: {one_per_line(model)}" for name, model in found.items())
    arguments.output.write_text("{\n" + lines + "\n}\n")


def answers(name: str, quantizer: Path, folder: Path, importance: Path) -> dict:
    model_type, changes = MODELS[name]
    config = AutoConfig.for_model(model_type, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    stored = config.to_dict() | {"model_type": model_type}
    source = [(key, tuple(value.shape)) for key, value in model.state_dict().items()]
    tensors = gguf_tensors(stored, source)
    file = folder / f"{name}.gguf"
    write_sparse(file, stored, tensors)
    types = {}
    for kind in (kind for kind in FILE_TYPES if kind not in UNKNOWN):
        plain, informed = (ask(quantizer, [*more, file, kind]) for more in ([], ["--imatrix", importance]))
        types[kind] = plain
        if informed != plain:
            types[f"{kind}+imatrix"] = informed
    wishes = [
        {"file_type": kind, "wishes": wishes, "types": ask(quantizer, [*options, file, kind])}
        for options, wishes, kind in WISHES.get(name, [])
    ]
    always = [key for key in types["F32"] if all(answer[key] == "F32" for answer in types.values())]
    types = {kind: compact(answer, always) for kind, answer in types.items()}
    for wish in wishes:
        wish["types"] = compact(wish["types"], always)
    heads = stored.get("num_attention_heads") or stored["n_head"]
    file.unlink()
    return {
        "facts": {
            "arch": architecture(stored),
            "layers": config.num_hidden_layers,
            "heads": heads,
            "heads_kv": stored.get("num_key_value_heads") or heads,
            "experts": stored.get("num_local_experts") or stored.get("num_experts") or 0,
        },
        "tensors": {role(tensor.name): list(tensor.shape) for tensor in tensors},
        "always_f32": always,
        "types": types,
        "wishes": wishes,
    }


def write_sparse(file: Path, config: dict, tensors: list) -> None:
    """A GGUF file whose tensors are all zeros that take no space on disk."""
    writer = GGUFWriter(file, architecture(config))
    write(writer, metadata(config, tensors, FILE_TYPES["F32"], name="model"))
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), 4 * prod(tensor.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    padded = sum(-(-4 * prod(tensor.shape) // 32) * 32 for tensor in tensors)
    with file.open("r+b") as handle:
        start = -(-file.stat().st_size // 32) * 32
        handle.truncate(start + padded)


def write_importance(file: Path) -> Path:
    """An imatrix file of one entry: whether there is one is all that the choice of types looks at."""
    writer = GGUFWriter(file, "x")
    writer.kv_data[0].clear()
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["none"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    writer.add_tensor("blk.0.attn_q.weight.in_sum2", np.ones((1, 512), np.float32))
    writer.add_tensor("blk.0.attn_q.weight.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def ask(quantizer: Path, arguments: list) -> dict[str, str]:
    """Types by role, as runs over the layers."""
    done = subprocess.run(
        [quantizer, "--dry-run", *map(str, arguments)], capture_output=True, text=True, check=False, errors="replace"
    )
    pattern = r"^\[ *\d+/ *\d+\] +(\S+) .*?type = +(\w+), .*?size = .*?MiB(?: +-> .*?\((\w+)\))?$"
    lines = re.findall(pattern, done.stdout + done.stderr, re.MULTILINE)
    if done.returncode or not lines:
        raise SystemExit(f"{quantizer} {arguments} failed:\n{done.stdout}\n{done.stderr}")
    by_role: dict[str, list[str]] = {}
    for name, before, after in sorted(lines, key=lambda item: visiting_order(item[0])):
        by_role.setdefault(role(name), []).append((after or before).upper())
    return {key: runs(types) for key, types in by_role.items()}


def compact(answer: dict[str, str], always: list[str]) -> dict[str, str]:
    """An answer without what is F32 in any case, and with the most frequent types under "*"."""
    found = {key: types for key, types in answer.items() if key not in always}
    most = max(sorted(found.values()), key=list(found.values()).count)
    return {"*": most} | {key: types for key, types in found.items() if types != most}


def runs(types: list[str]) -> str:
    if len(set(types)) == 1:
        return types[0]
    counted = [(kind, len(list(same))) for kind, same in groupby(types)]
    return " ".join(kind if count == 1 else f"{kind}*{count}" for kind, count in counted)


def role(name: str) -> str:
    return re.sub(r"^blk\.\d+\.", "blk.{}.", name)


def one_per_line(model: dict) -> str:
    types = ",\n  ".join(f"{json.dumps(kind)}: {json.dumps(found)}" for kind, found in model["types"].items())
    wishes = ",\n  ".join(json.dumps(wish) for wish in model["wishes"])
    head = ",\n ".join(f"{json.dumps(key)}: {json.dumps(model[key])}" for key in ("facts", "tensors", "always_f32"))
    return f'{{{head},\n "types": {{\n  {types}}},\n "wishes": [{wishes}]}}'


if __name__ == "__main__":
    main()
