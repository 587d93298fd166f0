"""Record what the command line puts out, and compare the records of two trees: a refactoring must change nothing.

    PYTHONPATH=src python scripts/compare_outputs.py record before.json            # in the tree as it was
    PYTHONPATH=src python scripts/compare_outputs.py record after.json --jobs 4    # in the tree as it is
    python scripts/compare_outputs.py compare before.json after.json --renamed old_key=new_key

Every case is a few commands in a fresh directory, on the tiny model of the tests and on random ones of other families.
Of every command the exit code, the JSON document and the line of a refusal are recorded, and of every case all files it
has left: tensors and arrays by hash, documents and texts as they are. No part of llmcompress is named but the entry
point, so the script runs on trees that are made otherwise inside. Both records have to be made on one machine with the
same libraries, since last bits of floats depend on them. Work directories are not looked into: how a run keeps what is
unfinished is its own.
"""

import argparse
import contextlib
import fnmatch
import hashlib
import importlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from string import Template
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "tests" / "models" / "tiny-llama"
TEXT = ROOT / "tests" / "models" / "tiny-llama-eval.txt"
LONGEST = 20_000  # characters of a text that is recorded as it is; longer ones are hashed

# What is measured of time and of the process: not the same twice, and not part of what is put out
MEASURED = {
    "elapsed",  # events of --log-format json
    "seconds",  # timings, evaluations
    "solving",  # timings
    "writing",  # timings
    "peak_memory_bytes",  # timings
    "device_peak_bytes",  # timings
    "tokens_per_second",  # events, evaluations
    "speed",  # eval --draft: tokens per second, drafted and alone
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "THP_MEM_ALLOC_ENABLE": "1",
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "120",
    "NO_COLOR": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}

# -- models ---------------------------------------------------------------------------------------------------------

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1216,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "small": {"model_type": "llama", "hidden_size": 128, "intermediate_size": 256},
    "wide": {"model_type": "llama", "hidden_size": 256, "intermediate_size": 256},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "phi3": {},
    "opt": {"ffn_dim": 192, "word_embed_proj_dim": 64},
    "gpt_neox": {},
    "olmo2": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
}


def make_model(family: str, out: Path) -> None:
    """Save a random model of a family whose every parameter matters, with the tiny model's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    own = dict(FAMILIES[family])
    model_type = own.pop("model_type", family)
    known = AutoConfig.for_model(model_type)
    common = {key: value for key, value in COMMON.items() if hasattr(known, key)}
    config = AutoConfig.for_model(model_type, **{**common, **own})
    torch.manual_seed(0)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1 if "emb" in name or "wte" in name else parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        model.to(torch.bfloat16).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, out / name)


# -- cases ----------------------------------------------------------------------------------------------------------

# A line is a command, after the exit code that is expected where that is not 0, and after `ranks=N` or `torchrun=N`
# where several processes share it; `> FILE` at its end keeps stdout. Lines that begin with a colon prepare files.
WORDS = {
    "C": "--samples 4 --length 32 --batch 2 --threads 1",
    "S": "--samples 4 --length 32 --batch 2 --threads 1 -q --json -o out",
    "N": "--threads 1 -q --json -o out",
    "E": "--length 32 --windows 4 --json",
    "D": "--length 32 --samples 4 --calibration default --batch 2 --threads 1 -q --json",
}
CALIBRATION = "calibration: {samples: 4, length: 32}"


def recipe(steps: str, rest: str = "", model: str = "$llama", options: str = "") -> str:
    """Lines that run a recipe of these steps."""
    text = f"{CALIBRATION}\nsteps: [{steps}]\n{rest}\n".replace("\n", "\\n")
    return f":write recipe.yaml {shlex.quote(text)}\nrun recipe.yaml {model} --batch 2 $N {options}"


def cases() -> dict[str, str]:
    """All cases, by name."""
    groups = (rounding, smoothing, pruning, families, gguf_files, shapes, running, proving, plans, refused)
    found = {name: lines for group in groups for name, lines in group().items()}
    for group in (rounding, smoothing, pruning):  # of these, variants are recorded on a smaller model
        for name in group().keys() - TRAINED:
            if not name.startswith("shipped"):
                found[name] = found[name].replace("$llama", "$small")
    return found


TRAINED = {
    "gptq",
    "gptq asym",
    "gptq actorder group",
    "gptq set",
    "gptq set group",
    "gptq shards",
    "gptq self",
    "gptq timings and log",
    "gptq codebook 3",
    "gptq nf4",
    "gptq progressive",
    "gptq int8-tensor",
    "rtn",
    "kv fp8",
    "fp8",
    "nf4",
    "int8",
    "int8 outliers",
    "export",
    "source compressed to q4_k",
    "awq",
    "awq block",
    "smoothquant",
    "rotate",
    "rotate smoothattention gptq",
    "wanda 0.5",
    "wanda owl",
    "sparsegpt 2:4",
    "sparsegpt joint",
}


def rounding() -> dict[str, str]:
    """Methods, their options, grids and formats."""
    made = {
        "gptq": "gptq $llama $S --group-size 64\nverify out --source $llama --json\ninspect out --json --tensors",
        "gptq actorder group": "gptq $llama $S --actorder group --format gptq",
        "gptq actorder none": "gptq $llama $S --actorder none",
        "gptq descent 0": "gptq $llama $S --descent 0",
        "gptq descent 3": "gptq $llama $S --descent 3",
        "gptq without qep": "gptq $llama $S --qep-alpha 0",
        "gptq qep whole": "gptq $llama $S --qep-alpha 1 --qep-samples 2",
        "gptq plain": "gptq $llama $S --descent 0 --qep-alpha 0 --actorder none --clip minmax",
        "gptq damping": "gptq $llama $S --percdamp 0.1 --block-size 32",
        "gptq asym": "gptq $llama $S --asym --format gptq",
        "gptq row": "gptq $llama $S --group-size -1 --bits 8",
        "gptq row asym": "gptq $llama $S --group-size -1 --asym --format gptq",
        "gptq set": "gptq $llama $S --set 'mlp.down_proj: {bits: 8}' --set 'layers.0.*: {skip: true}'",
        "gptq set group": "gptq $llama $S --set 'self_attn.*: {group_size: 32, sym: false}' --format dense",
        "gptq float32": "gptq $llama $S --compute-dtype float32",
        "gptq bfloat16": "gptq $llama $S --compute-dtype bfloat16",
        "gptq shards": "gptq $llama $S --shard-size 0.001",
        "gptq self": "gptq $llama $S --calibration self",
        "gptq text": "gptq $llama $S --calibration $text --seed 3",
        "gptq jsonl": (
            ":write rows.jsonl '"
            + json.dumps({"text": "One text and another. " * 30})
            + "\\n"
            + json.dumps({"messages": [{"role": "user", "content": "What is there to say? " * 30}]})
            + "\\n'\n"
            + "gptq $llama --calibration rows.jsonl --samples 2 --length 32 --threads 1 -q --json -o out"
        ),
        "gptq packed ids": (
            "calib pack $llama -o ids.safetensors --samples 4 --length 32 --json\n"
            "gptq $llama $S --calibration ids.safetensors"
        ),
        "gptq timings and log": (
            "gptq $llama -o out $C --timings times.jsonl --log-format json --junit junit.xml --json\n"
            "report out --timings times.jsonl -o page.html --json"
        ),
        "gptq codebook 2": "gptq $llama $S --type codebook --bits 2 --format codebook",
        "gptq codebook 3": "gptq $llama $S --type codebook --bits 3 --format codebook\nverify out --json",
        "gptq codebook 4": "gptq $llama $S --type codebook --bits 4 --format codebook",
        "gptq nf4": "gptq $llama $S --type nf4 --format bitsandbytes\nverify out --source $llama --json",
        "gptq nf4 single": "gptq $llama $S --type nf4 --no-double-quant --format bitsandbytes",
        "gptq fp8": "gptq $llama $S --type fp8 --bits 8 --group-size -1",
        "gptq int8 absmax": "gptq $llama $S --type int8 --bits 8 --format bitsandbytes",
        "gptq int8 outliers": (
            "gptq $llama $S --type int8 --bits 8 --outliers topk --outlier-count 4 --format int8-outliers\n"
            "verify out --source $llama --json"
        ),
        "gptq progressive": (
            "gptq $llama $S --type progressive --activations int8-token --format qoq\n"
            "verify out --source $llama --json\neval out --ref $llama $E"
        ),
        "gptq progressive 32": (
            "gptq $llama $S --type progressive --group-size 32 --activations int8-token --format qoq"
        ),
        "gptq int8-token": "gptq $llama $S --bits 8 --group-size -1 --activations int8-token",
        "gptq int8-tensor": (
            "gptq $llama $S --bits 8 --group-size -1 --activations int8-tensor --activation-clip percentile "
            "--activation-percentile 99\neval out --ref $llama $E"
        ),
        "gptq fp8-tensor": "gptq $llama $S --type fp8 --bits 8 --group-size -1 --activations fp8-tensor",
        "rtn": "rtn $llama $N\nverify out --source $llama --json",
        "rtn minmax": "rtn $llama $N --clip minmax",
        "rtn output": "rtn $llama $S --clip output --asym --format awq",
        "rtn per tensor": "rtn $llama $S --bits 8 --group-size -1 --per-tensor --activations int8-tensor",
        "rtn per tensor token": "rtn $llama $N --bits 8 --group-size -1 --per-tensor --activations int8-token",
        "rtn int8-tensor absmax": (
            "rtn $llama $S --bits 8 --group-size -1 --activations int8-tensor --activation-clip absmax"
        ),
        "rtn nf4": "rtn $llama $N --type nf4 --format bitsandbytes",
        "rtn codebook": "rtn $llama $S --type codebook --bits 3 --format codebook",
        "rtn progressive": "rtn $llama $N --type progressive --format qoq --activations int8-token",
        "rtn kv int8": "rtn $llama $S --kv-cache int8",
        "kv fp8": "gptq $llama $S --kv-cache fp8\neval out --ref $llama $E\nverify out --json",
        "fp8": "fp8 $llama $N\neval out --ref $llama $E\nverify out --source $llama --json",
        "fp8 tensor": "fp8 $llama $S --activations fp8-tensor --clip minmax --kv-cache fp8",
        "fp8 weights": "fp8 $llama $N --activations none",
        "nf4": "nf4 $llama $N",
        "nf4 single calibrated": "nf4 $llama $S --no-double-quant --calibration default",
        "int8": "int8 $llama $N",
        "int8 outliers": "int8 $llama $S --outliers topk\neval out --ref $llama $E",
        "int8 threshold": "int8 $llama $S --outliers threshold --outlier-threshold 2",
        "export": (
            "gptq $llama $S --group-size 64 --keep-work\n"
            "export out.work --format dense --format gptq -o more --json\n"
            "export out.work --format compressed-tensors -o again --json"
        ),
        "export asym": (
            "rtn $llama $N --asym --group-size 64 --format awq --keep-work\nexport out.work --format gptq -o g --json"
        ),
        "source gptq": (
            "rtn $llama $N --format gptq --group-size 64\ngguf out --type Q4_0 -o out.gguf --threads 1 -q --json\n"
            "eval out --ref $llama $E"
        ),
        "source compressed to q4_k": (
            "rtn $llama $N --group-size 64\ngguf out --type Q4_K_M -o k.gguf --threads 1 -q --json\n"
            "gguf out --type Q8_0 -o q8.gguf --threads 1 -q --json\nverify q8.gguf --source out --json"
        ),
        "source asym to q4_1": (
            "gptq $llama $S --asym --format gptq --group-size 32\n"
            "gguf out --type Q4_1 -o q41.gguf $D\ngguf out --type Q5_0 -o q50.gguf --threads 1 -q --json"
        ),
    }
    for bits in (2, 3, 4, 5, 6, 8):
        for method, sign in (("gptq", "sym"), ("gptq", "asym"), ("rtn", "sym"), ("rtn", "asym")):
            made[f"{method} {bits} {sign}"] = (
                f"{method} $llama $S --bits {bits} --{sign} --group-size 32 --format dense"
            )
    for bits, form in ((2, "gptq"), (3, "gptq"), (8, "gptq"), (2, "compressed-tensors"), (8, "compressed-tensors")):
        made[f"rtn {bits} {form}"] = f"rtn $llama $N --bits {bits} --format {form}\nverify out --source $llama --json"
    return made


def smoothing() -> dict[str, str]:
    """Transforms, and recipes that have several steps."""
    made = {
        "awq": "awq $llama $S --format awq\nverify out --source $llama --json\neval out --ref $llama $E",
        "awq sym": "awq $llama $S --sym --clip search --steps 5 --duo-scaling never",
        "awq block": recipe("{method: awq, objective: block}, {method: rtn, sym: false}"),
        "awq gptq": recipe("{method: awq}, {method: gptq, sym: false}", "output: {format: awq}"),
        "smoothquant": "smoothquant $llama $S\nverify out --source $llama --json\neval out --ref $llama $E",
        "smoothquant alpha": "smoothquant $llama $S --alpha 0.5 --no-flows",
        "smoothquant tensor": "smoothquant $llama $S --activations int8-tensor --per-tensor",
        "smoothattention": recipe(
            "{method: smoothattention}, {method: rtn}", options="\neval out --ref $llama $E --kv-bits 4"
        ),
        "smoothattention cache": recipe(
            "{method: smoothattention, alpha: 0.4}, {method: gptq}", "kv_cache: {code: int8}"
        ),
        "rotate": "rotate $llama $N\nverify out --source $llama --json\neval out --ref $llama $E",
        "rotate values": "rotate $llama $N --no-residual --seed 5",
        "rotate gptq": recipe(
            "{method: rotate, seed: 2}, {method: gptq, bits: 3, group_size: -1}", "output: {format: gptq}"
        ),
        "rotate smoothattention gptq": recipe(
            "{method: rotate}, {method: smoothattention}, {method: gptq, type: progressive, activations: int8-token}",
            "output: {format: qoq}",
        ),
        "awq set": "awq $llama $S --set 'mlp.down_proj: {bits: 8}' --format compressed-tensors",
    }
    for family in ("qwen3_moe", "mixtral", "gpt2", "gemma2", "phi3"):
        made[f"awq {family}"] = f"awq ${family} $S{' --format gptq' if family == 'gpt2' else ''}"
    made["smoothquant qwen3_moe"] = "smoothquant $qwen3_moe $S"
    made["smoothquant phi3"] = "smoothquant $phi3 $S"
    made["rotate phi3"] = "rotate $phi3 $N"
    made["rotate mixtral"] = "rotate $mixtral $N\neval out --ref $mixtral $E"
    for file in sorted((ROOT / "configs").glob("*.yaml")):
        made[f"shipped {file.stem}"] = (
            f"recipe show {file.stem} > r.yaml\n:replace r.yaml 'samples: 128' 'samples: 4'\n"
            ":replace r.yaml 'samples: 64' 'samples: 4'\n:replace r.yaml 'length: 512' 'length: 32'\n"
            f"run r.yaml $llama --threads 1 -q --json -o out{'.gguf' if 'gguf' in file.stem else ''}"
        )
    made["shipped by name"] = "run rtn-w8 $llama $N\nrecipe list --json\nrecipe check rtn-w8 $llama --json"
    return made


def pruning() -> dict[str, str]:
    """Pruners, alone and before what rounds."""
    made = {
        "wanda ria": "wanda $llama $S --sparsity 0.5 --score ria",
        "wanda ria 2:4": "wanda $llama $S --pattern 2:4 --score ria",
        "wanda owl": "wanda $llama $S --sparsity 0.5 --allocation owl --refit 2",
        "wanda owl wide": "wanda $llama $S --sparsity 0.6 --allocation owl --owl-threshold 3 --owl-span 0.15",
        "wanda matrix": "wanda $llama $S --sparsity 0.5 --compare matrix",
        "wanda set": (
            "wanda $llama $S --sparsity 0.5 --set 'mlp.down_proj: {sparsity: 0.3}' --set 'o_proj: {skip: true}'"
        ),
        "wanda phi3": "wanda $phi3 $S --sparsity 0.5",
        "wanda qwen3_moe": "wanda $qwen3_moe $S --pattern 2:4",
        "magnitude row": "magnitude $llama $N --sparsity 0.5 --compare row",
        "magnitude refit": "magnitude $llama $S --sparsity 0.5 --refit 3 --calibration default",
        "sparsegpt plain": "sparsegpt $llama $S --sparsity 0.5 --refit 0 --qep-alpha 0 --shrinkage 0",
        "sparsegpt owl": "sparsegpt $llama $S --sparsity 0.5 --allocation owl",
        "sparsegpt gpt2": "sparsegpt $gpt2 $S --pattern 2:4",
        "sparsegpt mixtral": "sparsegpt $mixtral $S --sparsity 0.5",
        "sparsegpt joint": recipe("{method: sparsegpt, pattern: '2:4', joint: true}, {method: gptq, group_size: 32}"),
        "sparsegpt joint share": recipe("{method: sparsegpt, sparsity: 0.5, joint: true}, {method: gptq}"),
        "awq wanda rtn": recipe("{method: awq}, {method: wanda, pattern: '2:4'}, {method: rtn, sym: false}"),
        "magnitude rtn": recipe("{method: magnitude, sparsity: 0.5}, {method: rtn, bits: 8}"),
        "wanda nf4": recipe(
            "{method: wanda, sparsity: 0.5}, {method: gptq, type: nf4}", "output: {format: bitsandbytes}"
        ),
        "pruned source": "magnitude $llama $N --pattern 2:4\ngptq out --group-size 64 $C -q --json -o again",
    }
    for pruner, options in (("magnitude", "$N"), ("wanda", "$S"), ("sparsegpt", "$S")):
        for amount in ("--sparsity 0.5", "--pattern 2:4", "--pattern 4:8"):
            made[f"{pruner} {amount.split()[1]}"] = (
                f"{pruner} $llama {options} {amount}\nverify out --source $llama --json"
            )
        chosen = f"{{method: {pruner}, pattern: '4:8'}}, {{method: gptq, group_size: 64}}"
        made[f"{pruner} gptq"] = recipe(chosen, "output: {format: gptq}")
    return made


def families() -> dict[str, str]:
    """Every family of models."""
    made = {}
    for family in FAMILIES:
        if family in ("small", "wide"):
            continue
        model = "random" if family == "llama" else family
        made[f"gptq {model}"] = (
            f"gptq ${model} $S --group-size 32 --format {_form(family)}\nverify out --source ${model} --json"
        )
    for family in ("gpt2", "mixtral", "qwen3_moe", "phi3", "gemma2"):
        made[f"rtn {family}"] = (
            f"rtn ${family} $N --bits 8 --group-size 32 --format {_form(family)}\neval out --ref ${family} $E"
        )
        made[f"inspect {family}"] = f"inspect ${family} --json --tensors"
        if family != "gpt2":
            made[f"fp8 {family}"] = f"fp8 ${family} $S --activations fp8-tensor --kv-cache fp8"
        made[f"gguf {family}"] = f"gguf ${family} --type Q4_0 -o out.gguf $D\nverify out.gguf --source ${family} --json"
        made[f"imatrix {family}"] = f"imatrix ${family} $S.gguf"
    made["gptq group mixtral"] = "gptq $mixtral $S --group-size 32 --actorder group --format gptq"
    made["gptq dense phi3"] = "gptq $phi3 $S --group-size 32 --bits 3 --format dense"
    made["gguf mxfp4"] = "gguf $mixtral --type MXFP4_MOE -o out.gguf --threads 1 -q --json"
    made["gguf opt"] = "2 gguf $opt --type Q8_0 -o out.gguf --threads 1 -q --json"
    for family in ("gpt_neox", "olmo2", "qwen2", "qwen3", "gemma3_text", "mistral"):
        made[f"gguf {family}"] = f"gguf ${family} --type Q8_0 -o out.gguf --threads 1 -q --json"
    return made


def _form(family: str) -> str:
    """A packed format that a family's matrices can be written in."""
    return "gptq" if family == "gpt2" else "compressed-tensors"


def gguf_files() -> dict[str, str]:
    """GGUF files: types, what they are rounded by, and what they are made from."""
    made = {
        "imatrix": "imatrix $llama $S.gguf\nimatrix $llama $C -q --json --legacy -o out.dat",
        "imatrix merge": (
            "imatrix $llama $C -q -o a.gguf\nimatrix $llama $C -q --seed 1 -o b.gguf\n"
            "imatrix-merge a.gguf b.gguf -o c.gguf --json\nimatrix-merge a.gguf b.gguf -o c.dat --legacy --json"
        ),
        "gguf from gguf": (
            "gguf $llama --type F16 -o f.gguf -q --threads 1\n"
            "gguf f.gguf --type Q4_K_M -o k.gguf -q --threads 1 --json\n"
            "imatrix $llama $C -q -o i.gguf\n"
            "gguf f.gguf --type Q3_K_M --imatrix i.gguf -o i3.gguf -q --threads 1 --json"
        ),
        "gguf requantised": (
            "gguf $llama --type Q8_0 -o f.gguf -q --threads 1\n2 gguf f.gguf --type Q4_0 -o k.gguf -q --threads 1\n"
            "gguf f.gguf --type Q4_0 --allow-requantize -o k.gguf -q --threads 1 --json\n"
            "eval k.gguf --ref $llama $E\ninspect k.gguf --json --tensors"
        ),
        "gguf several": "gguf $llama --type Q4_0 --type Q6_K -o out -q --threads 1 --json",
        "gguf mixed": (
            "gguf $llama --type Q3_K_M --tensor-type ffn_down=Q6_K --output-type Q8_0 --embedding-type Q4_0 "
            "-o out.gguf $D"
        ),
        "gguf pure": "gguf $llama --type Q4_K_M --pure -o out.gguf -q --threads 1 --json",
        "gguf split": "gguf $llama --type Q8_0 --split-max-size 0.001 -o out -q --threads 1 --json",
        "gguf modelfile": "gguf $llama --type Q4_K_M --modelfile -o out.gguf -q --threads 1 --json",
        "gguf directory": "gguf $llama --type Q4_0 -o out -q --threads 1 --json",
        "gguf bpw": (
            "gguf $wide --bpw 5 --losses losses.json -o out.gguf -q --samples 2 --length 32 --threads 1 --json\n"
            "gguf $wide --size 0.8MB --losses losses.json -o s.gguf -q --samples 2 --length 32 --threads 1 --json"
        ),
        "gguf bpw calibrated": "gguf $wide --bpw 4.5 -o out.gguf $D",
        "gguf awq": recipe(
            "{method: awq}, {method: gptq, gguf: {type: Q4_K_M}}", "output: {format: gguf}", model="$wide"
        ),
        "gguf rotated": recipe(
            "{method: rotate}, {method: gptq, gguf: {type: Q4_0}}", "output: {format: gguf}", model="$small"
        ),
        "gguf print recipe": "gguf $llama --type Q4_K_M --tensor-type ffn_down=Q6_K --print-recipe",
        "gguf evaluated": "gguf $llama --type Q4_K_M -o out.gguf -q --threads 1\neval out.gguf --ref $llama $E\n"
        "verify out.gguf --source $llama --json\ninspect out.gguf --json --tensors",
    }
    for kind in (
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "IQ4_NL",
        "Q2_K",
        "Q3_K_M",
        "Q4_K_M",
        "Q5_K_S",
        "Q6_K",
        "IQ4_XS",
    ):
        one = f"gguf $llama --type {kind} --threads 1 -q --json"
        made[f"gguf {kind}"] = f"{one} --search fast -o out.gguf"
        one = one.replace("$llama", "$wide")
        made[f"gguf {kind} compat"] = f"{one} --search compat -o out.gguf"
        if kind in ("Q4_0", "Q3_K_M", "Q4_K_M", "IQ4_XS"):  # what knows of inputs is searched so anyway
            made[f"gguf {kind} best"] = f"{one} --search best -o out.gguf"
        made[f"gguf {kind} calibrated"] = f"gguf $wide --type {kind} -o out.gguf $D"
    for kinds in ("Q4_0 Q4_1 Q5_0 Q5_1", "Q8_0 IQ4_NL Q2_K Q3_K_M", "Q4_K_M Q5_K_S Q6_K IQ4_XS"):
        one = "gguf $wide --threads 1 -q --json --imatrix i.gguf"
        made[f"gguf imatrix {kinds}"] = "imatrix $wide $C -q -o i.gguf" + "".join(
            f"\n{one} --type {kind} --search {search} -o {kind}-{search}.gguf"
            for kind in kinds.split()
            for search in ("best", "compat")
        )
    for kind in ("F32", "F16", "BF16", "TQ1_0", "TQ2_0", "Q3_K_S", "Q3_K_L", "Q4_K_S", "Q5_K_M"):
        made[f"gguf {kind}"] = f"gguf $llama --type {kind} --threads 1 -q --json -o out.gguf"
    return made


def shapes() -> dict[str, str]:
    """Budgets, fewer and narrower layers, adapters."""
    fit = "fit $small --samples 2 --length 32 --threads 1 -q"
    trained = fit.replace("$small", "$llama")
    return {
        "fit size": f"{trained} --size 2.5MB --format gptq --group-size 32,128 --sensitivity kept.json -o r.yaml\n"
        "run r.yaml $llama $N\neval out --ref $llama $E\n"
        f"{trained} --bpw 4 --format gptq --group-size 32,128 --sensitivity kept.json --json",
        "fit kl": f"{fit} --kl 0.5 --bits 3,4,8 --group-size 64 --format dense --json",
        "fit rtn target": f"{fit} --bpw 5 --method rtn --bits 4,8 --target vllm --json",
        "fit stopped": f"75 {fit} --bpw 5 --bits 4,8 --format gptq -o r.yaml --deadline 0\n"
        f"{fit} --bpw 5 --bits 4,8 --format gptq -o r.yaml",
        "fit mixtral": "fit $mixtral --samples 2 --length 32 --threads 1 -q --bpw 5 --bits 4,8 --group-size 32 "
        "--format dense --json",
        "depth": "depth $llama $S --drop 1\nverify out --json\neval out --ref $llama $E",
        "depth kl": "depth $llama $S --drop 1 --by kl --keep-first 1",
        "depth contiguous": "depth $llama $S --drop 2 --contiguous --keep-first 1",
        "depth plan": "depth $llama $S --drop 1 --dry-run",
        "width": "width $llama $S --ratio 0.25\nverify out --json\neval out --ref $llama $E",
        "width cost": "width $llama $S --ffn 256 --by cost",
        "width without repair": "width $llama $S --ratio 0.5 --no-repair --multiple-of 32",
        "width phi3": "width $phi3 $S --ratio 0.25 --multiple-of 8",
        "width gpt2": "width $gpt2 $S --ratio 0.25",
        "width plan": "width $llama $S --ratio 0.25 --dry-run",
        "depth mixtral": "depth $mixtral $S --drop 1 --keep-first 0 --keep-last 0",
        "lora": "rtn $llama --bits 3 --format gptq --threads 1 -q -o small\nlora $llama small --rank 4 $S\n"
        "eval small --adapter out --ref $llama $E",
        "lora weights": "rtn $llama --bits 2 --format dense --threads 1 -q -o small\n"
        "lora $llama small --rank 8 --by weights $N",
        "lora phi3": "rtn $phi3 --group-size 32 --threads 1 -q -o small\nlora $phi3 small --rank 4 $S",
        "lora plan": "rtn $llama --bits 3 --format gptq --threads 1 -q -o small\n"
        "lora $llama small --rank 4 $S --dry-run",
        "depth then gptq": "depth $llama $C -q -o less --drop 1\nrtn less $N",
    }


def running() -> dict[str, str]:
    """Sweeps, statistics, threads, ranks, and runs that were stopped."""
    swept = f":write r.yaml '{CALIBRATION}\\nsteps: [{{method: gptq, group_size: 64}}]\\n'\n"
    made = {
        "sweep": swept + "sweep r.yaml $small --bits 3,4 --method gptq,rtn --format dense --evaluate $text "
        "--eval-length 32 --eval-windows 2 $N",
        "sweep groups": swept + "sweep r.yaml $small --group-size 32,-1 --method gptq,awq --format gptq $N",
        "sweep plan": swept + "sweep r.yaml $small --bits 3,4 --format dense --dry-run $N",
        "sweep stopped": swept + "75 sweep r.yaml $small --bits 4,8 --deadline 0 --batch 2 $N\n"
        "sweep r.yaml $small --bits 4,8 --batch 2 $N",
        "stats": "gptq $small $C -q -o one --stats kept --json\ngptq $small $C -q -o two --bits 8 --stats kept --json\n"
        "awq $small $C -q -o three --stats kept --json\nstats list kept --json\nstats prune kept --all --json",
        "strict": "3 rtn $llama $N --set 'o_proj: {skip: true}' --strict unquantised --junit junit.xml",
        "overwrite": "rtn $llama $N\nrtn $llama $N --bits 8 --overwrite",
        "memory": "gptq $small $S --max-memory 1",
        "report": "rtn $llama --threads 1 -q -o a\ngptq $llama $C -q -o b\n"
        "eval b --ref $llama $E -o e.json\nreport a b --evaluation e.json -o page.html --json",
    }
    runs = {
        "gptq": "gptq $llama --group-size 32",
        "awq": "awq $small --group-size 32",
        "moe": "gptq $qwen3_moe --group-size 32",
        "fp8": "fp8 $small --activations fp8-tensor --kv-cache fp8",
        "sparsegpt": "sparsegpt $small --pattern 2:4",
        "owl": "wanda $small --sparsity 0.5 --allocation owl --refit 2",
        "codebook": "gptq $small --type codebook --format codebook",
        "rotated": None,
        "gguf": "gguf $wide --type Q4_K_M --calibration default",
    }
    turned = (
        ":write r.yaml '"
        + CALIBRATION
        + "\\nsteps: [{method: rotate}, {method: smoothattention}, {method: gptq}]\\n'\n"
    )
    for name, command in runs.items():
        first, one = ("", f"{command} $S") if command else (turned, "run r.yaml $small --batch 2 $N")
        if name == "gguf":
            one += ".gguf"
        made[f"stopped {name}"] = f"{first}75 {one} --deadline 0\n{one}"
        made[f"ranks {name}"] = f"{first}ranks=2 {one}"
        made[f"one rank {name}"] = f"{first}ranks=1 {one}"
        made[f"threads {name}"] = first + one.replace("--threads 1", "--threads 2") + " --threads 2"
    made["stopped smoothquant"] = "75 smoothquant $llama $S --deadline 0\nsmoothquant $llama $S"
    made["stopped nf4"] = "75 nf4 $llama $N --deadline 0\nnf4 $llama $N"
    made["stopped depth"] = "75 depth $llama $S --drop 1 --deadline 0\ndepth $llama $S --drop 1"
    made["stopped eval"] = "75 eval $llama $E --deadline 0"
    made["stopped gguf of several types"] = "\n".join(
        f"{code} gguf $llama --type Q8_0 --type Q4_0 $N{'' if code == 0 else ' --deadline 0'}" for code in [75, 75, 0]
    )
    made["stopped ranks"] = "ranks=2 75 gptq $llama $S --deadline 0.01\nranks=2 gptq $llama $S"
    made["killed"] = "killed gptq $llama $S\ngptq $llama $S --overwrite"
    made["torchrun"] = "torchrun=2 gptq $llama $S --group-size 32"
    return made


def proving() -> dict[str, str]:
    """Evaluations, lists, schemas, recipes as they are printed."""
    made = {
        "eval": "eval $llama $E\neval $llama --text $text $E",
        "eval default text": "eval $llama --ref $llama --windows 3 --length 64 --json -o e.json",
        "eval kv": "eval $llama --ref $llama $E --kv-bits 8\neval $llama --ref $llama $E --kv-type fp8\n"
        "eval $llama --ref $llama $E --kv-bits 4",
        "eval gate": "rtn $llama --bits 2 --format dense --threads 1 -q -o out\n"
        "3 eval out --ref $llama $E --fail-if 'kl > 0.001' --junit junit.xml",
        "eval generated": "rtn $llama --bits 3 --format dense --threads 1 -q -o out\n"
        "eval out --ref $llama $E --generate 'Once upon a time' --max-new-tokens 8",
        "eval drafted": "rtn $llama --bits 3 --format dense --threads 1 -q -o out\n"
        "eval --draft out --ref $llama --generate 'Once upon a time' --max-new-tokens 12 --json",
        "eval bfloat16": "eval $llama $E --compute-dtype bfloat16 --batch 2",
        "eval moe": "eval $qwen3_moe $E\neval $mixtral $E",
        "inspect": "inspect $llama --json\ninspect $llama --json --tensors",
        "verify broken": "rtn $llama $N\n:truncate out/model.safetensors 100000\n3 verify out --source $llama --json",
        "verify untrue": "rtn $llama $N\n:replace out/report.json int4 int3\n3 verify out --source $llama --json",
        "recipe show": "recipe show gptq-w4\nrecipe show awq-w4 --json",
        "recipe wrong": ":write r.yaml 'steps: [{method: rtn, bitz: 4}]'\n2 recipe check r.yaml $llama --json",
        "calib": "calib pack $llama -o a.safetensors --samples 3 --length 16 --seed 2 --json\n"
        "calib pack $llama -o b.safetensors --samples 3 --length 16 --calibration self --json",
        "kernels": "kernels cache --cache kept --json\n2 kernels check --json",
        "version": "--version",
    }
    for what in ("methods", "grids", "types", "formats", "archs", "sources", "targets", "ledger"):
        made[f"list {what}"] = f"list {what} --json"
    for what in ("report", "evaluation", "tasks", "long", "timings"):
        made[f"schema {what}"] = f"schema {what}"
    for words in (
        "gptq",
        "rtn",
        "awq",
        "smoothquant",
        "rotate",
        "fp8",
        "nf4",
        "int8",
        "magnitude --sparsity 0.5",
        "wanda --pattern 2:4",
        "sparsegpt --sparsity 0.5",
    ):
        command, *options = words.split()
        made[f"recipe of {command}"] = f"{command} $llama --print-recipe {' '.join(options)}"
    return made


def plans() -> dict[str, str]:
    """What would be done, as JSON."""
    target = "--target vllm"
    lines = {
        "gptq": "gptq $llama",
        "gptq max memory": "gptq $llama --max-memory 0.6",
        "rtn": "rtn $llama --bits 8",
        "vllm tp 2": f"gptq $llama {target} --tp 2",
        "vllm repair": f"gptq $llama {target} --tp 4 --group-size 128 --repair",
        "vllm set repair": f"gptq $llama {target} --repair --set 'q_proj: {{bits: 8}}'",
        "sglang": "awq $llama --target sglang --format awq",
        "sglang repair": "rtn $llama --target sglang --repair --group-size 32 --tp 2",
        "transformers": "gptq $llama --target transformers --format gptq",
        "gptqmodel": "gptq $llama --target gptqmodel --format gptq --asym",
        "llama.cpp": "rtn $llama --target llama.cpp",
        "llama.cpp repair": "rtn $llama --target llama.cpp --group-size -1 --repair",
        "awq": "awq $llama --format awq",
        "smoothquant": "smoothquant $llama --kv-cache fp8",
        "rotate": "rotate $llama",
        "fp8": "fp8 $llama",
        "nf4": "nf4 $llama",
        "int8": "int8 $llama --outliers topk",
        "wanda": "wanda $llama --sparsity 0.5 --set 'o_proj: {skip: true}'",
        "sparsegpt": "sparsegpt $llama --pattern 2:4",
        "magnitude": "magnitude $llama --pattern 4:8",
        "gguf": "gguf $llama --type Q4_K_M",
        "gguf calibrated": "gguf $llama --type Q2_K --calibration default",
        "gguf moe": "gguf $qwen3_moe --type Q4_0",
        "run": "run w4a8kv4 $llama",
        "run sparse": "run sparse24-gptq-w4 $llama",
        **{
            family: f"gptq ${family} --group-size 32 --format {_form(family)}"
            for family in FAMILIES
            if family not in ("llama", "small", "wide")
        },
        "mixtral vllm repair": f"gptq $mixtral --group-size 32 {target} --repair",
        "phi3 vllm repair": f"gptq $phi3 --group-size 32 {target} --repair --set 'o_proj: {{bits: 8}}'",
    }
    made = {f"plan {name}": f"plan {line} --threads 1 --json" for name, line in lines.items()}
    made["plan gguf bpw"] = "plan gguf $llama --bpw 4.5 --samples 2 --length 32 --threads 1 --json"
    made["repaired"] = "gptq $llama $S --target vllm --tp 4 --group-size 128 --repair"
    made["repaired recipe"] = "gptq $llama --target vllm --tp 4 --group-size 128 --repair --print-recipe"
    return made


def refused() -> dict[str, str]:
    """Bad input: an exit code and one line."""
    lines = {
        "bits": "rtn $llama --bits 7 -o out",
        "bits of a format": "rtn $llama --bits 3 -o out",
        "group": "rtn $llama --group-size 100 -o out",
        "group of nothing": "rtn $llama --group-size 0 -o out",
        "format": "rtn $llama --format gguff -o out",
        "pattern": "rtn $llama --set oops -o out",
        "pattern of nothing": "rtn $llama --set 'nothing.here: {bits: 8}' -o out",
        "option in a pattern": "rtn $llama --set 'mlp.*: {bits: [1]}' -o out",
        "ledger kind": "rtn $llama --strict dampin -o out",
        "shard size": "rtn $llama --shard-size nan -o out",
        "length": "gptq $llama --samples 1 --length 100000 -o out",
        "samples": "calib pack $llama --samples 0 -o a.safetensors",
        "work": "rtn $llama -o out --work out/work",
        "hub id": "gptq meta-llama/Llama-2-7b -o out",
        "no model": "gptq gone -o out",
        "no option": "gptq $llama --no-such-option",
        "no command": "gptt $llama",
        "memory": "gptq $llama --max-memory 0.01 -o out --threads 1",
        "target": "gptq $llama --target vlm -o out",
        "target facts": "gptq $llama --target vllm --tp 4 --group-size 128 -o out",
        "rotation of nothing": "rotate $llama --no-residual --no-values -o out",
        "rotation of gemma": "rotate $gemma2 -o out",
        "outliers": "int8 $llama --outliers topk --outlier-count 256 --format dense -o out",
        "no sparsity": "wanda $llama -o out",
        "sparsity": "wanda $llama --sparsity 1.5 -o out",
        "n of m": "wanda $llama --pattern 4:2 -o out",
        "gguf type": "gguf $llama --type Q4_K_L -o out.gguf",
        "gguf importance": "gguf $llama --type Q2_K_S -o out.gguf",
        "gguf tensor type": "gguf $llama --type Q4_K_M --tensor-type nope=Q6_K -o out.gguf",
        "gguf two sizes": "gguf $llama --type Q4_K_M --bpw 4.5 -o out.gguf",
        "gguf no size": "gguf $llama -o out.gguf",
        "gguf budget": "gguf $llama --bpw 1 -o out.gguf",
        "fit nothing": "fit $llama --length 32",
        "fit size": "fit $llama --length 32 --size 1kB",
        "fit format": "fit $llama --length 32 --bpw 4 --format awq",
        "depth": "depth $llama --drop 9 -o out --length 32",
        "width": "width $llama --ratio 1.5 -o out --length 32",
        "eval target": "eval $llama --fail-if nonsense --length 32",
        "no text": "gptq $llama --calibration gone.txt -o out",
        "imatrix": "gguf $llama --type Q4_0 --imatrix gone.gguf -o out.gguf",
        "list": "list nothing",
    }
    made = {f"refused {name}": f"2 {line}" for name, line in lines.items()}
    prepared = {
        "output": ":write out x\n2 rtn $llama -o out",
        "recipe": ":write r.yaml 'steps: [{method: rtm}]'\n2 run r.yaml $llama -o out",
        "recipe key": ":write r.yaml 'steps: [{method: rtn}]\\ncalibrate: {}'\n2 run r.yaml $llama -o out",
        "recipe order": ":write r.yaml 'steps: [{method: rtn}, {method: awq}]'\n2 run r.yaml $llama -o out",
        "recipe yaml": ":write r.yaml 'steps: ['\n2 run r.yaml $llama -o out",
        "weights cut": ":copy $llama m\n:truncate m/model.safetensors 1000000\n2 rtn m -o out",
        "no weights": ":copy $llama m\n:remove m/model.safetensors\n2 rtn m -o out",
        "config": ":copy $llama m\n:write m/config.json '{'\n2 rtn m -o out",
        "layers": ":copy $llama m\n:replace m/config.json '\"num_hidden_layers\": 4' '\"num_hidden_layers\": 5'\n"
        "2 rtn m -o out",
        "tokenizer": ":copy $llama m\n:remove m/tokenizer.json\n:remove m/tokenizer_config.json\n"
        "2 gptq m -o out --samples 2 --length 16",
        "short text": ":write t.txt Short.\n2 gptq $llama -o out --calibration t.txt --samples 2 --length 16",
        "rounded twice": "rtn $llama $N\n2 gptq out -o again --samples 2 --length 16",
        "other run in the work": "75 gptq $llama $S --deadline 0\n2 gptq $llama $S --bits 8",
        "ranks of a command": "ranks=2 2 inspect $llama --json",
    }
    return made | {f"refused {name}": text for name, text in prepared.items()}


# -- running them ---------------------------------------------------------------------------------------------------


def forked(function: Any, *arguments: Any) -> int:
    """The process id of a child that calls a function and ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        function(*arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def ended(child: int) -> int:
    """The exit code of a child, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def entry(arguments: list[str], log: str, environment: dict[str, str]) -> None:
    """In a child: the command line, as `llmcompress` runs it."""
    for number, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{log}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(environment)
    sys.argv = ["llmcompress", *arguments]
    from llmcompress.cli.app import main

    main()


def free_port() -> str:
    """A port of this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def started(arguments: list[str], log: str, ranks: int | None) -> list[int]:
    """The children that run a command: one, or several as torchrun starts them."""
    if ranks is None:
        return [forked(entry, arguments, f"{log}-0", {})]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    places = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return [forked(entry, arguments, f"{log}-{rank}", place) for rank, place in enumerate(places)]


def torchrun(arguments: list[str], log: str, ranks: int) -> int:
    """The exit code of a command that torchrun itself starts."""
    place = f"--nnodes 1 --nproc-per-node {ranks} --master-addr 127.0.0.1 --master-port {free_port()}".split()
    command = [sys.executable, "-m", "torch.distributed.run", *place, "-m", "llmcompress", *arguments]
    with Path(f"{log}-0.out").open("wb") as out, Path(f"{log}-0.err").open("wb") as err:
        return subprocess.run(command, stdout=out, stderr=err, check=False).returncode


def kill_once_begun(child: int, timeout: float = 60) -> None:
    """SIGKILL once the first layer is in a work directory."""
    until = time.monotonic() + timeout
    while time.monotonic() < until and not list(Path().glob("*.work/section-*")):
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)


def prepare(words: list[str]) -> None:
    """A line that prepares files."""
    what, path, *rest = words
    file = Path(path)
    match what:
        case ":write":
            file.write_text(rest[0].replace("\\n", "\n"), encoding="utf-8")
        case ":replace":
            file.write_text(file.read_text(encoding="utf-8").replace(rest[0], rest[1]), encoding="utf-8")
        case ":copy":
            shutil.copytree(path, rest[0])
        case ":truncate":
            os.truncate(path, int(rest[0]))
        case ":remove":
            file.unlink()
        case _:
            raise ValueError(what)


class Case:
    """One case, in a directory of its own."""

    def __init__(self, name: str, lines: str, root: Path, version: str) -> None:
        self.name, self.lines, self.root, self.version = name, lines, root, version
        slug = re.sub(r"\W+", "-", name)
        self.place, self.logs = root / "cases" / slug, root / "logs" / slug
        self.result = root / "results" / f"{slug}.json"
        self.unforeseen: list[str] = []

    def run(self) -> None:
        """In a child, and a session of its own: run all lines and write down what came of them."""
        os.setsid()
        self.place.mkdir(parents=True)
        self.logs.mkdir(parents=True)
        os.chdir(self.place)
        known = {path.name.replace("tiny-llama", "llama"): str(path) for path in (self.root / "models").iterdir()}
        known["text"] = known.pop("eval.txt")
        commands = [
            self.command(number, shlex.split(_filled(line, known)), line)
            for number, line in enumerate(self.lines.split("\n"))
        ]
        found = {"commands": [item for item in commands if item], "files": dict(self.files())}
        self.result.write_text(json.dumps({"found": found, "unforeseen": self.unforeseen}))
        shutil.rmtree(self.place)

    def command(self, number: int, words: list[str], line: str) -> dict[str, Any] | None:
        """What a line of a case has put out."""
        if words[0].startswith(":"):
            prepare(words)
            return None
        log, expected, ranks, killed, by_torchrun, kept = str(self.logs / str(number)), 0, None, False, False, None
        while (first := words[0]).isdigit() or "=" in first or first == "killed":
            words = words[1:]
            if first == "killed":
                killed = True
            elif first.isdigit():
                expected = int(first)
            else:
                ranks, by_torchrun = int(first.partition("=")[2]), first.startswith("torchrun")
        if ">" in words[:-1] and words[-2] == ">":
            words, kept = words[:-2], words[-1]
        if by_torchrun:
            codes = [torchrun(words, log, ranks or 1)]
        else:
            children = started(words, log, ranks)
            if killed:
                kill_once_begun(children[0])
            codes = [ended(child) for child in children]
        out, err = (
            "".join(file.read_text(errors="replace") for file in sorted(self.logs.glob(f"{number}-*.{end}")))
            for end in ("out", "err")
        )
        if (set(codes) != {expected} and not killed) or "Traceback" in err:
            self.unforeseen.append(f"{line}\n    exit codes {codes}, expected {expected}\n    {err[-2000:]}")
        if kept:
            Path(kept).write_text(out, encoding="utf-8")
        said: dict[str, Any] = {"line": line}
        if killed:  # which may come too late
            return said
        said["exit_codes"] = codes
        if "--json" in words or out.startswith(("{", "[")):
            said["json"] = self.document(out) if out else None
        elif {"--print-recipe", "recipe", "fit"} & set(words):
            said["stdout"] = self.text(out)
        if "--log-format" in words:
            said["events"] = [self.document(item) for item in err.splitlines() if item.startswith("{")]
        elif any(codes):
            said["stderr"] = [self.text(item) for item in err.splitlines() if re.match(r"error: |  hint: ", item)]
        return said

    def text(self, text: str) -> str:
        """A text without paths of this machine and the version."""
        for path, name in ((self.place, "<case>"), (self.root / "models", "<models>"), (ROOT, "<tree>")):
            text = text.replace(str(path), name)
        return text.replace(f"llmcompress {self.version}", "llmcompress <version>")

    def document(self, text: str) -> Any:
        """A JSON document without what is measured, paths of this machine and the version."""
        try:
            return self.normal(json.loads(text))
        except json.JSONDecodeError:
            return {"not JSON": self.text(text)}

    def normal(self, data: Any) -> Any:
        """Data without what is measured, paths of this machine and the version."""
        if isinstance(data, dict):
            if data.keys() >= {"tensors", "files", "sha256"}:  # a report: its hashes are of files recorded themselves
                data = {key: value for key, value in data.items() if key not in ("files", "sha256")}
            return {
                self.text(key): "<measured>"
                if key in MEASURED and _numbers(value)
                else "<version>"
                if key == "llmcompress" and value == self.version
                else self.normal(value)
                for key, value in data.items()
            }
        if isinstance(data, list):
            return [self.normal(item) for item in data]
        return self.text(data) if isinstance(data, str) else data

    def files(self) -> Iterator[tuple[str, Any]]:
        """All files that are there, by path, as they are recorded. Those of work directories are left out."""
        for file in sorted(Path().rglob("*")):
            if file.is_file() and not any(part.endswith(".work") for part in file.parts[:-1]):
                if file.parts[0] == "m":  # a spoilt copy of a model
                    continue
                try:
                    yield str(file), self.content(file)
                except Exception as error:
                    yield str(file), {"sha256": sha256(file.read_bytes()), "unreadable": type(error).__name__}

    def content(self, file: Path) -> Any:
        """What is recorded of a file."""
        data = file.read_bytes()
        if file.suffix == ".safetensors":
            return {"sha256": sha256(data), **safetensors_content(data)}
        if file.suffix == ".gguf":
            return {"sha256": sha256(data), **gguf_content(file)}
        if file.suffix == ".npz":
            return {"arrays": npz_content(data)}
        try:
            text = self.text(data.decode())
        except UnicodeDecodeError:
            return {"sha256": sha256(data)}
        if file.suffix == ".json" and file.name != "tokenizer.json":
            return self.document(text)
        if file.suffix == ".jsonl":
            return [self.document(line) for line in text.splitlines()]
        if file.suffix == ".xml":
            text = re.sub(r'(time|timestamp|hostname)="[^"]*"', r'\1="<measured>"', text)
        if file.name == "page.html" and Path("times.jsonl").exists():
            return "<a page with measured times>"
        return text if len(text) <= LONGEST else {"sha256": sha256(text.encode())}


def _numbers(value: Any) -> bool:
    """Whether this is a number, or are numbers by name; a schema has keys of the same names."""
    return isinstance(value, int | float) or (isinstance(value, dict) and all(map(_numbers, value.values())))


def _filled(line: str, known: dict[str, str]) -> str:
    """A line with its words written out."""
    return Template(Template(line).safe_substitute(WORDS)).safe_substitute(known)


def sha256(data: bytes | memoryview) -> str:
    """Of bytes, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def safetensors_content(data: bytes) -> dict[str, Any]:
    """Metadata and tensors of a safetensors file."""
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    metadata = header.pop("__metadata__", None)
    tensors = {}
    for name, item in header.items():
        first, last = item["data_offsets"]
        tensors[name] = f"{item['dtype']} {item['shape']} {sha256(data[end + first : end + last])}"
    return {"metadata": metadata, "tensors": tensors}


def gguf_content(file: Path) -> dict[str, Any]:
    """Metadata and tensors of a GGUF file."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    metadata = {}
    for name, field in reader.fields.items():
        value = field.contents()
        text = json.dumps(value, default=str)
        metadata[name] = value if len(text) < 200 else f"{len(text)} characters, {sha256(text.encode())}"
    tensors = {
        item.name: f"{item.tensor_type.name} {[int(size) for size in item.shape]} {sha256(item.data.tobytes())}"
        for item in reader.tensors
    }
    return {"metadata": json.loads(json.dumps(metadata, default=str)), "tensors": tensors}


def npz_content(data: bytes) -> dict[str, str]:
    """Arrays of an .npz file."""
    import numpy as np

    with np.load(io.BytesIO(data)) as arrays:
        return {name: f"{arrays[name].dtype} {arrays[name].shape} {sha256(arrays[name].tobytes())}" for name in arrays}


def make_models(folder: Path) -> None:
    """In a child: the models of all cases."""
    shutil.copytree(TINY, folder / "tiny-llama")
    shutil.copy(TEXT, folder / "eval.txt")
    for family in FAMILIES:
        make_model(family, folder / ("random" if family == "llama" else family))


def version_of_the_tree(root: Path) -> str:
    """As the command line tells it."""
    if ended(forked(entry, ["--version"], str(root / "version"), {})):
        raise SystemExit((root / "version.err").read_text())
    return (root / "version.out").read_text().split()[-1]


def record(chosen: dict[str, str], jobs: int, keep: bool) -> tuple[dict[str, Any], int]:
    """Run cases; the record of all of them, and how many failed themselves or did what was not foreseen."""
    for key, value in ENVIRONMENT.items():
        os.environ[key] = value
    root = Path(tempfile.mkdtemp(prefix="outputs-")).resolve()
    for name in ("models", "results"):
        (root / name).mkdir()
    preload(root)
    version = version_of_the_tree(root)
    print(f"llmcompress {version} at {Path(sys.modules['llmcompress'].__file__ or '').parent}", flush=True)
    if ended(forked(make_models, root / "models")):
        raise SystemExit("the models could not be made")
    waiting = [Case(name, lines, root, version) for name, lines in chosen.items()]
    slugs = {case.result for case in waiting}
    if len(slugs) != len(waiting):
        raise SystemExit("two cases have one name")
    under_way: dict[int, Case] = {}
    found, times, total, failed = {}, {}, len(waiting), 0
    try:
        while waiting or under_way:
            while waiting and len(under_way) < jobs:
                case = waiting.pop(0)
                under_way[forked(case.run)] = case
            child, _, used = os.wait4(-1, 0)
            case = under_way.pop(child)
            if not case.result.exists():
                print(f"{case.name}: the case itself failed", flush=True)
                failed += 1
                continue
            result = json.loads(case.result.read_text())
            found[case.name], times[case.name] = result["found"], used.ru_utime + used.ru_stime
            failed += bool(result["unforeseen"])
            for words in result["unforeseen"]:
                print(f"unforeseen: {case.name}: {words}", flush=True)
            if len(found) % 50 == 0:
                print(f"{len(found)} of {total} cases", flush=True)
    finally:
        for child in under_way:  # of a record that was interrupted
            os.kill(child, signal.SIGKILL)
    slowest = sorted(times.items(), key=lambda item: -item[1])[:20]
    print(f"{sum(times.values()):.0f} s of processor time, most of it for:")
    print(", ".join(f"{name} {took:.1f} s" for name, took in slowest))
    inputs = {
        str(file.relative_to(root / "models")): sha256(file.read_bytes())
        for file in sorted((root / "models").rglob("*"))
        if file.is_file()
    }
    if keep:
        print(f"kept: {root}")
    else:
        shutil.rmtree(root)
    return {"inputs": inputs, "cases": {name: found[name] for name in chosen if name in found}}, failed


def preload(root: Path) -> None:
    """Import once, for all children, what commands import, and keep what is compiled.

    Which modules those are is asked of children that run some: this process must not start threads by computing.
    """
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(root / "compiled")
    importlib.import_module("torch.distributed")
    importlib.import_module("transformers")
    words = {"out": str(root / "warm" / "out"), "llama": str(TINY)}
    for line in (
        "gptq $llama --samples 2 --length 16 --threads 1 -q -o $out",
        "eval $out --ref $llama --length 16 --windows 1 --json",
        "verify $out --source $llama --json",
        "gguf $llama --type Q8_0 --threads 1 -q -o $out.gguf",
        "plan gptq $llama --target vllm --json",
    ):
        found = root / "modules.json"
        if ended(forked(_modules, shlex.split(Template(line).substitute(words)), found)):
            raise SystemExit((root / "warm.err").read_text())
        for name in json.loads(found.read_text()):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def _modules(arguments: list[str], found: Path) -> None:
    """In a child: run a command, and write down which modules there are now."""
    before = set(sys.modules)
    try:
        entry(arguments, str(found.with_name("warm")), {})
    finally:
        new = [name for name in sys.modules if name not in before and not name.startswith("_")]
        found.write_text(json.dumps(new))


# -- comparing ------------------------------------------------------------------------------------------------------


def renamed(data: Any, names: dict[str, str]) -> Any:
    """Data with its keys renamed, at any depth."""
    if isinstance(data, dict):
        return {names.get(key, key): renamed(value, names) for key, value in data.items()}
    return [renamed(item, names) for item in data] if isinstance(data, list) else data


def differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, before, after) of whatever differs. Types count: 1 is not 1.0."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            place = f"{path} / {key}" if path else key
            if key not in after or key not in before:
                yield place, before.get(key, _NOTHING), after.get(key, _NOTHING)
            else:
                yield from differences(before[key], after[key], place)
        if list(before) != list(after) and set(before) == set(after):
            yield f"{path} (order of keys)", list(before), list(after)
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            yield f"{path} (length)", len(before), len(after)
        for number, (old, new) in enumerate(zip(before, after, strict=False)):
            yield from differences(old, new, f"{path} [{number}]")
        for number in range(min(len(before), len(after)), max(len(before), len(after))):
            old, new = (data[number] if number < len(data) else _NOTHING for data in (before, after))
            yield f"{path} [{number}]", old, new
    elif isinstance(before, str) and isinstance(after, str) and before != after and "\n" in before:
        yield from differences(before.split("\n"), after.split("\n"), f"{path} (lines)")
    elif type(before) is not type(after) or before != after:
        yield path, before, after


_NOTHING = type("Nothing", (), {"__repr__": lambda _: "nothing"})()


def shown(data: Any) -> str:
    """One line about data."""
    text = repr(data) if data is _NOTHING else json.dumps(data, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:300]}... ({len(text)} characters)"


def matching(names: Iterable[str], pattern: str | None) -> list[str]:
    """Names that fit a glob or hold it as a part."""
    return [name for name in names if pattern is None or fnmatch.fnmatchcase(name, pattern) or pattern in name]


def compare(before: Path, after: Path, names: dict[str, str], only: str | None) -> int:
    """Print what differs between two records; 1 if anything does."""
    old, new = (json.loads(file.read_text(encoding="utf-8")) for file in (before, after))
    old = renamed(old, names)
    count, cases_that_differ = 0, set()
    for path, was, now in differences(old["inputs"], new["inputs"]):
        print(f"inputs\n    {path}\n    before  {shown(was)}\n    after   {shown(now)}")
        count += 1
    names_of_cases = matching([*old["cases"], *(name for name in new["cases"] if name not in old["cases"])], only)
    for name in names_of_cases:
        for path, was, now in differences(old["cases"].get(name, _NOTHING), new["cases"].get(name, _NOTHING)):
            print(f"{name}\n    {path}\n    before  {shown(was)}\n    after   {shown(now)}")
            count += 1
            cases_that_differ.add(name)
    print(f"{len(names_of_cases)} cases, {count} differences in {len(cases_that_differ)} cases")
    return int(count > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record", help="run all cases and write down what they put out")
    one.add_argument("record", type=Path, metavar="RECORD.json")
    one.add_argument("--only", metavar="PATTERN", help="cases whose name fits this glob or holds it")
    one.add_argument("--jobs", type=int, default=2, help="cases at a time")
    one.add_argument("--keep", action="store_true", help="keep models and logs, and say where")
    two = commands.add_parser("compare", help="print what differs; 1 if anything does")
    two.add_argument("before", type=Path, metavar="BEFORE.json")
    two.add_argument("after", type=Path, metavar="AFTER.json")
    two.add_argument(
        "--renamed", action="append", default=[], metavar="OLD=NEW", help="a key that has another name now"
    )
    two.add_argument("--only", metavar="PATTERN", help="cases whose name fits this glob or holds it")
    args = parser.parse_args()
    if args.command == "compare":
        names = dict(item.split("=", 1) for item in args.renamed)
        return compare(args.before, args.after, names, args.only)
    begin, table = time.monotonic(), cases()
    target = args.record.resolve()
    made, failed = record({name: table[name] for name in matching(table, args.only)}, args.jobs, args.keep)
    target.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(made['cases'])} cases in {time.monotonic() - begin:.0f} s, {failed} not as foreseen")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
