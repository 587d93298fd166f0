"""What runtimes load: each rule of the table passes and refuses a plan, and a repair gives a plan that passes."""

import json
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from entries import AWQ, DENSE, GPTQ, PACKED, W4, matrix, model
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.options import Options
from llmcompress.engine.targets.check import engine_notes, verdicts, violations
from llmcompress.engine.targets.input_facts import Devices
from llmcompress.engine.targets.table import TARGETS
from llmcompress.errors import PlanError, RecipeError
from llmcompress.formats.base import Entry, TensorSpec
from llmcompress.grids.base import PER_ROW, GridSpec
from llmcompress.recipe import parse

# --- checkpoints that are nothing but headers: the data is a hole in the file ---

KEYS = {"hidden": "hidden_size", "inter": "intermediate_size", "heads": "num_attention_heads", "head": "head_dim"}
KEYS |= {"kv": "num_key_value_heads", "layers": "num_hidden_layers", "experts": "num_local_experts"}
SIZES = {
    "llama": {"hidden": 1024, "inter": 1536, "heads": 8, "kv": 4, "head": 128},
    "mixtral": {"hidden": 256, "inter": 512, "heads": 4, "kv": 4, "experts": 3},
    "phi3": {"hidden": 512, "inter": 1024, "heads": 4, "kv": 2},
    "gpt_neox": {"hidden": 512, "inter": 2048, "heads": 4},
    "gpt2": {"hidden": 768, "heads": 12},
}


def headers_only(folder, family="llama", **sizes):
    """A model directory as transformers would save it, with a file of the right size and no data in it."""
    from transformers import AutoConfig

    from llmcompress.arch import find
    from llmcompress.model.skeleton import skeleton

    spec = find(family)
    sizes = {KEYS[key]: size for key, size in {"layers": 2, **SIZES[family], **sizes}.items()}
    values = {**spec.tiny, "vocab_size": 64, "tie_word_embeddings": False, **sizes}
    config = AutoConfig.for_model(family, **values)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    header, end = {}, 0
    for name, tensor in skeleton(config, spec).named_parameters():
        begin, end = end, end + 2 * tensor.numel()
        header[on_disk(name, spec)] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    data = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
        file.truncate(8 + len(data) + end)
    return folder


def on_disk(name, spec):
    module, _, leaf = name.rpartition(".")
    if not module.startswith(f"{spec.layers}."):
        return f"{spec.disk_path(module)}.{leaf}"
    number, _, path = module.removeprefix(f"{spec.layers}.").partition(".")
    return f"{spec.layers}.{number}.{spec.disk_path(path)}.{leaf}"


@pytest.fixture(scope="session")
def headers_of(tmp_path_factory):
    """headers_of(family="llama", **sizes): a model directory without data. Read-only."""
    root, made = tmp_path_factory.mktemp("headers"), {}

    def make(**sizes):
        key = repr(sorted(sizes.items()))
        if key not in made:
            made[key] = headers_only(root / str(len(made)), **sizes)
        return made[key]

    return make


def recipe(format_="compressed-tensors", method="gptq", kv_cache=None, **options):
    steps = [{"method": method, "bits": 4, **options}]
    cached = None if kv_cache is None else {"code": kv_cache}
    return parse({"steps": steps, "output": {"format": format_}, "kv_cache": cached})


def matrices(plan):
    """What a plan makes of each matrix, and in which format."""
    found = {
        m.module: (m.entry.grid, m.entry.inputs, m.entry.permuted, m.method.name)
        for layer in plan.layers
        for m in layer
    }
    return plan.format.name, found


def planned(made, model, out, **options):
    return make_plan(made, model, Options(out=out, **options))


# --- plans that pass ---

W8A8 = {"bits": 8, "group_size": -1, "activations": "int8-token"}
PASSING = {
    "the default": ("vllm sglang transformers llama.cpp", {}, {}, 1),
    "the default in gptq": ("vllm sglang transformers llama.cpp gptqmodel", {}, {"format_": "gptq"}, 1),
    "8 bits": ("vllm sglang transformers llama.cpp", {}, {"bits": 8}, 1),
    "2 bits": ("transformers llama.cpp", {}, {"bits": 2}, 1),
    "3 bits in gptq": ("transformers gptqmodel", {}, {"bits": 3, "format_": "gptq"}, 1),
    "5 bits decoded": ("vllm sglang transformers llama.cpp gptqmodel", {}, {"bits": 5, "format_": "dense"}, 1),
    "asymmetric": ("vllm sglang llama.cpp", {}, {"sym": False}, 1),
    "asymmetric in gptq": ("transformers gptqmodel llama.cpp", {}, {"sym": False, "format_": "gptq"}, 1),
    "rows": ("vllm sglang transformers", {}, {"group_size": -1}, 1),
    "groups of 16": ("transformers llama.cpp", {}, {"group_size": 16}, 1),
    "groups of 512": ("transformers gptqmodel llama.cpp", {}, {"group_size": 512, "format_": "gptq"}, 1),
    "activation order": ("sglang transformers gptqmodel llama.cpp", {}, {"actorder": "group", "format_": "gptq"}, 1),
    "rows have no order": ("vllm", {}, {"actorder": "group", "group_size": -1, "format_": "gptq"}, 1),
    "awq": ("vllm sglang transformers gptqmodel", {}, {"sym": False, "format_": "awq"}, 1),
    "awq by rows": ("vllm sglang transformers gptqmodel", {}, {"sym": False, "group_size": -1, "format_": "awq"}, 1),
    "awq without zero points": ("transformers gptqmodel", {}, {"format_": "awq"}, 1),
    "awq of shapes unlike Marlin's": ("sglang", {"inter": 1344}, {"sym": False, "group_size": 64, "format_": "awq"}, 1),
    "parts of their own bits": (
        "vllm sglang gptqmodel",
        {},
        {"format_": "gptq", "set": {"self_attn.[qkv]_proj": {"bits": 8}, "mlp.down_proj": {"group_size": 32}}},
        1,
    ),
    "a skipped matrix": ("vllm sglang transformers llama.cpp", {}, {"set": {"mlp.down_proj": {"skip": True}}}, 1),
    "split in two": ("vllm sglang", {}, {}, 2),
    "more devices than key-value heads": ("vllm sglang", {"kv": 2}, {}, 4),
    "the groups of 1536 inputs, split in four": ("vllm sglang", {"inter": 1536}, {"group_size": 128}, 4),
    "scales of rows are on every device": ("vllm", {"inter": 1408}, {"group_size": -1}, 4),
    "tiles of what is fused": ("sglang", {"hidden": 256, "head": 32, "kv": 1, "inter": 256}, {}, 1),
    "tiles that vllm pads": ("vllm", {"hidden": 1088, "inter": 1344}, {}, 1),
    "joined on disk": ("vllm", {"family": "phi3"}, {}, 2),
    "joined on disk, no key-value heads named": ("vllm", {"family": "gpt_neox"}, {}, 4),
    "Conv1D": ("vllm", {"family": "gpt2"}, {"format_": "gptq"}, 2),
    "experts": ("vllm sglang transformers", {"family": "mixtral"}, {}, 2),
    "integers by integers": ("vllm sglang transformers llama.cpp", {}, W8A8, 1),
    "floats by floats": (
        "vllm sglang transformers llama.cpp",
        {},
        {"type": "fp8", "bits": 8, "activations": "fp8-token"},
        1,
    ),
    "floats alone": ("vllm sglang transformers llama.cpp", {}, {"type": "fp8", "bits": 8}, 1),
    "a fixed scale of inputs": ("vllm sglang transformers", {}, {**W8A8, "activations": "int8-tensor"}, 1),
    "integers by integers, split": ("vllm sglang", {"hidden": 1088, "inter": 1344}, W8A8, 2),
}


@pytest.mark.parametrize(
    ("target", "sizes", "options", "tp"),
    [
        pytest.param(target, *rest, id=f"{name}: {target}")
        for name, (targets, *rest) in PASSING.items()
        for target in targets.split()
    ],
)
def test_what_a_target_loads_is_planned_as_asked(headers_of, tmp_path, target, sizes, options, tp):
    model, made = headers_of(**sizes), recipe(**options)
    tp = tp if TARGETS[target].tensor_parallel else 1
    plain = planned(made, model, tmp_path / "out")
    for repair in (False, True):
        held = planned(made, model, tmp_path / "out", target=target, tp=tp, repair=repair)
        assert matrices(held) == matrices(plain)
        assert held.recipe == plain.recipe
        assert held.identity == plain.identity
        decoded_again = target == "llama.cpp" and plain.format.name != "dense"
        assert [entry.subject for entry in held.ledger.of_kinds(["target"])] == [target] * decoded_again


# --- plans that do not ---

# target, sizes, options, devices, words of the refusal; what a repair makes of the format and of matrices, by a part of
# their names (None: they stay unquantised), or None where there is no repair
REFUSED = {
    "vllm bits": ("vllm", {}, {"bits": 2}, 1, "its kernels take 4 and 8 bits, not 2", None),
    "vllm gptq bits": ("vllm", {}, {"bits": 3, "format_": "gptq"}, 1, "4 and 8 bits, not 3", None),
    "vllm asym 8": ("vllm", {}, {"bits": 8, "sym": False}, 1, "not int8-g128-asym", {"": "int8-g128-sym"}),
    "vllm gptq asym": ("vllm", {}, {"sym": False, "format_": "gptq"}, 1, "takes symmetric", {"": "int4-g128-sym"}),
    "vllm large groups": ("vllm", {}, {"group_size": 256}, 1, "row, not 256", {"": "int4-g128-sym"}),
    "vllm small groups": ("vllm", {}, {"group_size": 16}, 1, "row, not 16", {"": "int4-g32-sym"}),
    "vllm order": ("vllm", {}, {"actorder": "group", "format_": "gptq"}, 1, "activation order", {"": "int4-g128-sym"}),
    "vllm order of some rows": (
        "vllm",
        {},
        {"format_": "gptq", "set": {"mlp.down_proj": {"actorder": "group", "group_size": -1}}},
        1,
        "model.layers.0.mlp.down_proj and 1 more: it refuses groups in activation order",
        {"mlp.down_proj": "int4-row-sym", "q_proj": "int4-g128-sym"},
    ),
    "vllm fused": (
        "vllm",
        {},
        {"set": {"self_attn.q_proj": {"bits": 8}}},
        1,
        "it runs qkv_proj as one, and its parts would have int8-g128-sym and int4-g128-sym",
        {"[qkv]_proj": "int8-g128-sym", "o_proj": "int4-g128-sym"},
    ),
    "vllm fused groups": (
        "vllm",
        {},
        {"set": {"layers.1.mlp.up_proj": {"group_size": 32}, "layers.0.*": {"bits": 8}}},
        1,
        "model.layers.1.mlp.gate_proj: it runs gate_up_proj as one",
        {"1.mlp.(gate|up)": "int4-g32-sym", "1.mlp.down": "int4-g128-sym", "0.mlp.": "int8-g128-sym"},
    ),
    "vllm fused, one left out": (
        "vllm",
        {},
        {"format_": "gptq", "set": {"layers.0.mlp.gate_proj": {"skip": True}}},
        1,
        "it runs gate_up_proj as one, and its parts would have 16 bits and int4-g128-sym",
        {"0.mlp.up": None, "0.mlp.down": "int4-g128-sym", "1.mlp.": "int4-g128-sym"},
    ),
    "vllm experts": (
        "vllm",
        {"family": "mixtral"},
        {"set": {"layers.1.block_sparse_moe.experts.2.w1": {"bits": 8}}},
        1,
        "it runs experts as one",
        {"1.block.*experts": "int8-g128-sym", "0.block.*experts": "int4-g128-sym"},
    ),
    "vllm groups of experts over two devices": (
        "vllm",
        {"family": "mixtral", "inter": 384},
        {},
        4,
        "groups of 128 do not divide the",
        {"experts": "int4-g32-sym", "o_proj": "int4-g64-sym", "[qkv]_proj": "int4-g128-sym"},
    ),
    "vllm words": (
        "vllm",
        {"inter": 1020},
        {"group_size": -1, "format_": "gptq"},
        1,
        "fill whole 32-bit words, not 1020 + 1020 x 1024",
        {"mlp": None, "self_attn": "int4-row-sym"},
    ),
    "vllm words of zero points": (
        "vllm",
        {"kv": 1, "head": 132, "heads": 2},
        {"group_size": -1, "sym": False},
        1,
        "fill whole 32-bit words, not 264 + 132 + 132 x 1024",
        {"[qkv]_proj": None, "o_proj": "int4-row-asym", "mlp": "int4-row-asym"},
    ),
    "vllm groups over two devices": (
        "vllm",
        {"inter": 1408},
        {"group_size": 128},
        4,
        "model.layers.0.mlp.down_proj and 1 more on 4 devices: groups of 128 do not divide the 352 inputs",
        {"down": "int4-g32-sym", "gate": "int4-g128-sym", "self_attn": "int4-g128-sym"},
    ),
    "vllm groups by default over two devices": (
        "vllm",
        {"inter": 1536},
        {},
        8,
        "groups of 128 do not divide the 192 inputs",
        {"down": "int4-g64-sym", "gate": "int4-g128-sym", "self_attn": "int4-g128-sym"},
    ),
    "vllm groups of a pattern over two devices": (
        "vllm",
        {"inter": 1536},
        {"set": {"mlp.down_proj": {"bits": 8}, "layers.0.*": {"clip": "minmax"}}},
        8,
        "groups of 128 do not divide the 192 inputs",
        {"down": "int8-g64-sym", "gate": "int4-g128-sym"},
    ),
    "vllm no groups left": (
        "vllm",
        {"inter": 1408},
        {},
        8,
        "groups of 128 do not divide the 176 inputs",
        {"down": "int4-row-sym", "gate": "int4-g128-sym"},
    ),
    "vllm heads": ("vllm", {}, {}, 3, "8 attention heads cannot be shared out to 3 devices", None),
    "vllm heads, decoded": ("vllm", {}, {"format_": "dense"}, 3, "8 attention heads cannot be shared out", None),
    "vllm key-value heads": (
        "vllm",
        {"hidden": 1536, "heads": 12},
        {},
        6,
        "4 key-value heads cannot be shared out",
        None,
    ),
    "vllm outputs": ("vllm", {"inter": 1026}, {"group_size": -1}, 4, "1026 outputs cannot be split over 4", None),
    "vllm joined outputs": ("vllm", {"family": "phi3", "inter": 1026}, {"group_size": -1}, 4, "2052 outputs", None),
    "sglang bits": ("sglang", {}, {"bits": 2}, 1, "its kernels take 4 and 8 bits, not 2", None),
    "sglang asym": ("sglang", {}, {"sym": False, "format_": "gptq"}, 1, "symmetric grids", {"": "int4-g128-sym"}),
    "sglang groups": ("sglang", {}, {"group_size": 512}, 1, "row, not 512", {"": "int4-g128-sym"}),
    "sglang fused": (
        "sglang",
        {},
        {"set": {"up_proj": {"skip": True}}},
        1,
        "it runs gate_up_proj as one",
        {"gate": None, "down": "int4-g128-sym"},
    ),
    "sglang inputs": (
        "sglang",
        {"inter": 1344},
        {},
        1,
        "model.layers.0.mlp.down_proj and 1 more: its Marlin kernels take multiples of 64 outputs and 128 inputs, "
        "not 1024 x 1344",
        {"down": None, "gate": "int4-g64-sym"},
    ),
    "sglang outputs": (
        "sglang",
        {"head": 40, "hidden": 1280, "kv": 2},
        {"group_size": 64},
        1,
        "multiples of 64 outputs and 128 inputs, not 480 x 1280",
        {"[qkov]_proj": None, "gate": "int4-g64-sym"},
    ),
    "sglang tiles of a device": (
        "sglang",
        {"inter": 1152},
        {"group_size": 64},
        2,
        "on 2 devices: its Marlin kernels take multiples of 64 outputs and 128 inputs, not 1024 x 576",
        {"down": None, "gate": "int4-g64-sym"},
    ),
    "sglang experts": (
        "sglang",
        {"family": "mixtral", "inter": 608},
        {"group_size": 32},
        1,
        "64 inputs of an expert, not 608 x 256",
        {"experts": None, "self_attn": "int4-g32-sym"},
    ),
    "sglang nothing left": ("sglang", {"hidden": 1088, "inter": 1088, "head": 136}, {}, 1, "Marlin kernels", None),
    "transformers asym": ("transformers", {}, {"sym": False}, 1, "dequantize=True", {"": "int4-g128-sym"}),
    "transformers mixed gptq": (
        "transformers",
        {},
        {"format_": "gptq", "set": {"down_proj": {"bits": 8}}},
        1,
        "one setting for all modules (it ignores `dynamic`), not both int4-g128-sym and int8-g128-sym",
        {"format": "compressed-tensors", "down": "int8-g128-sym", "gate": "int4-g128-sym"},
    ),
    "transformers mixed gptq of 3 bits": (
        "transformers",
        {},
        {"format_": "gptq", "set": {"down_proj": {"bits": 3}}},
        1,
        "one setting for all modules",
        None,
    ),
    "transformers groups": (
        "transformers",
        {},
        {"format_": "gptq", "group_size": 1024, "set": {"down_proj": {"skip": True}}},
        1,
        "or one scale per row, not 1024",
        {"self_attn": "int4-g512-sym"},
    ),
    "transformers experts": (
        "transformers",
        {"family": "mixtral"},
        {"format_": "gptq"},
        1,
        "leaves quantised experts at random values",
        {"format": "compressed-tensors", "": "int4-g128-sym"},
    ),
    "transformers experts of nf4": (
        "transformers",
        {"family": "mixtral"},
        {"format_": "bitsandbytes", "type": "nf4"},
        1,
        "no place for their codes",
        None,
    ),
    "transformers Conv1D": ("transformers", {"family": "gpt2"}, {"format_": "gptq"}, 1, "codes of a Conv1D", None),
    "transformers outputs": (
        "transformers",
        {"head": 40, "kv": 1, "hidden": 1280},
        {"format_": "gptq", "group_size": 64},
        1,
        "multiples of 32 outputs, as one kernel serves all modules, not 40 x 1280",
        {"[kv]_proj": None, "q_proj": "int4-g64-sym"},
    ),
    "vllm awq sym": ("vllm", {}, {"format_": "awq"}, 1, "take asymmetric grids of awq", {"": "int4-g128-asym"}),
    "sglang awq groups": (
        "sglang",
        {},
        {"format_": "awq", "sym": False, "group_size": 256},
        1,
        "groups of 32, 64 or 128, or one scale per row, not 256",
        {"": "int4-g128-asym"},
    ),
    "sglang awq sym": ("sglang", {}, {"format_": "awq"}, 1, "take asymmetric grids of awq", {"": "int4-g128-asym"}),
    "sglang awq words": (
        "sglang",
        {"inter": 1056},
        {"format_": "awq", "sym": False, "group_size": -1},
        8,
        "must fill whole 32-bit words",
        {"mlp": None, "self_attn": "int4-row-asym"},
    ),
    "gptqmodel awq groups": (
        "gptqmodel",
        {},
        {"format_": "awq", "sym": False, "group_size": 256},
        1,
        "groups of 32, 64 or 128, or one scale per row, not 256",
        {"": "int4-g128-asym"},
    ),
    "transformers awq groups": (
        "transformers",
        {},
        {"format_": "awq", "group_size": 16},
        1,
        "groups of 32, 64 or 128, or one scale per row, not 16",
        {"": "int4-g32-sym"},
    ),
    "vllm awq fused": (
        "vllm",
        {},
        {"format_": "awq", "sym": False, "set": {"q_proj": {"skip": True}}},
        1,
        "it runs qkv_proj as one",
        {"[kv]_proj": None, "gate": "int4-g128-asym"},
    ),
    "llama.cpp awq": (
        "llama.cpp",
        {},
        {"format_": "awq", "sym": False},
        1,
        "it does not read format awq",
        {"format": "compressed-tensors", "": "int4-g128-asym"},
    ),
    "gptqmodel awq joined": ("gptqmodel", {"family": "phi3"}, {"format_": "awq"}, 1, "splits a joined", None),
    "gptqmodel format": (
        "gptqmodel",
        {},
        {},
        1,
        "it does not read format compressed-tensors",
        {"format": "gptq", "": "int4-g128-sym"},
    ),
    "gptqmodel groups": (
        "gptqmodel",
        {"inter": 2048, "hidden": 2048, "head": 256},
        {"format_": "gptq", "group_size": 2048},
        1,
        "row, not 2048",
        {"": "int4-g1024-sym"},
    ),
    "gptqmodel joined": ("gptqmodel", {"family": "phi3"}, {"format_": "gptq"}, 1, "splits a joined gate_up_proj", None),
    "gptqmodel experts": ("gptqmodel", {"family": "mixtral"}, {"format_": "gptq"}, 1, "it renames experts", None),
    "gptqmodel head": ("gptqmodel", {"family": "gpt_neox"}, {"format_": "gptq"}, 1, "head called embed_out", None),
    "llama.cpp bits": (
        "llama.cpp",
        {},
        {"bits": 3, "format_": "gptq"},
        1,
        "it reads 2, 4 and 8 bits, not 3",
        {"format": "dense", "": "int3-g128-sym"},
    ),
    "llama.cpp rows": ("llama.cpp", {}, {"group_size": -1}, 1, "needs groups, not one scale", {"": "int4-g128-sym"}),
    "llama.cpp no groups": ("llama.cpp", {"inter": 1040}, {"group_size": -1}, 1, "needs groups", {"format": "gptq"}),
    "llama.cpp mixed": (
        "llama.cpp",
        {},
        {"set": {"down_proj": {"bits": 8}}},
        1,
        "it takes one config group, not both",
        {"format": "dense", "down": "int8-g128-sym"},
    ),
    "llama.cpp mixed orders": (
        "llama.cpp",
        {},
        {"set": {"down_proj": {"actorder": "none"}}},
        1,
        "it takes one config group",
        {"format": "gptq"},
    ),
    "vllm rounded inputs": (
        "vllm",
        {},
        {"activations": "int8-token"},
        1,
        "it multiplies rounded",
        {"": "int4-g128-sym"},
    ),
    "sglang rounded inputs": (
        "sglang",
        {},
        {"activations": "int8-token"},
        1,
        "it multiplies rounded",
        {"": "int4-g128-sym"},
    ),
    "vllm inputs of parts": (
        "vllm",
        {},
        {**W8A8, "set": {"q_proj": {"activations": "none"}}},
        1,
        "runs qkv_proj as one, and its parts would have int8-row-sym and int8-row-sym with int8-token inputs",
        {"": "int8-row-sym"},
    ),
    "llama.cpp fixed scale": (
        "llama.cpp",
        {},
        {**W8A8, "activations": "int8-tensor"},
        1,
        "it has no place for a scale of inputs",
        {"": "int8-row-sym"},
    ),
    "llama.cpp mixed inputs": (
        "llama.cpp",
        {},
        {**W8A8, "set": {"down_proj": {"activations": "none", "group_size": 128}}},
        1,
        "it takes one config group, not both",
        None,
    ),
    "vllm integers in its cache": ("vllm", {}, {"kv_cache": "int8"}, 1, "takes those of fp8", None),
    "sglang integers in its cache": ("sglang", {}, {"kv_cache": "int8"}, 1, "takes those of fp8", None),
    "llama.cpp scales of a cache": ("llama.cpp", {}, {"kv_cache": "fp8"}, 1, "tensors it has no name for", None),
    "llama.cpp mixed gptq": (
        "llama.cpp",
        {},
        {"format_": "gptq", "set": {"down_proj": {"group_size": 64}}},
        1,
        "one setting for all modules",
        {"format": "dense"},
    ),
}


@pytest.mark.parametrize(("target", "sizes", "options", "tp", "words", "mended"), REFUSED.values(), ids=list(REFUSED))
def test_what_a_target_does_not_load_is_refused_or_repaired(
    headers_of, tmp_path, target, sizes, options, tp, words, mended
):
    model, made = headers_of(**sizes), recipe(**options)
    out = tmp_path / "out"
    plain = planned(made, model, out)
    with pytest.raises(PlanError) as refused:
        planned(made, model, out, target=target, tp=tp)
    assert refused.value.exit_code == 2
    assert words in refused.value.message
    assert refused.value.message.startswith(f"{TARGETS[target].title} does not load ")
    assert "\n" not in refused.value.message
    assert refused.value.hint
    assert ("--repair" in refused.value.hint) == (mended is not None)
    if mended is None:
        with pytest.raises(PlanError) as again:
            planned(made, model, out, target=target, tp=tp, repair=True)
        assert str(again.value) == str(refused.value)
        return

    held = planned(made, model, out, target=target, tp=tp, repair=True)
    format_, found = matrices(held)
    assert format_ == mended.get("format", plain.format.name)
    for pattern, name in mended.items():
        if pattern == "format":
            continue
        modules = [m for m in matrices(plain)[1] if re.search(pattern, m)]
        assert modules
        for module in modules:
            assert (found[module][0].name if module in found else None) == name, module
    # the ledger says what was done, the recipe does it again without a target, and the target takes it as it is
    notes = [entry for entry in held.ledger.of_kinds(["target"]) if entry.subject != target]
    assert notes
    assert all("loads it: " in note.why for note in notes)
    written = parse(held.recipe.as_data())
    assert matrices(planned(written, model, out)) == matrices(held)
    again = planned(written, model, out, target=target, tp=tp)
    assert matrices(again) == matrices(held)
    assert not [entry for entry in again.ledger.of_kinds(["target"]) if entry.subject != target]
    assert held.identity["recipe"] == planned(written, model, out).identity["recipe"]


def test_only_what_is_at_fault_is_changed(headers_of, tmp_path):
    model = headers_of(inter=1536)
    held = planned(recipe(), model, tmp_path / "out", target="vllm", tp=8, repair=True)
    [step] = held.recipe.steps
    assert step.set == {"mlp.down_proj": {"group_size": 64}}
    assert step.group_size == 128  # named, so that the default is not chosen anew without down_proj
    [note] = held.ledger.of_kinds(["target"])
    assert note.subject == "mlp.down_proj"
    assert note.why.startswith("group_size: 64, so that vllm (tp 8) loads it: groups of 128 do not divide the 192")


def test_the_default_group_size_of_the_others_stays(headers_of, tmp_path):
    model = headers_of(hidden=1024, inter=1344)  # 64 by default, because of down_proj alone
    held = planned(recipe(), model, tmp_path / "out", target="sglang", repair=True)
    grids = {grid.name for grid, *_ in matrices(held)[1].values()}
    assert grids == {"int4-g64-sym"}
    assert [entry.kind for entry in held.ledger.entries if entry.kind == "group_size"] == ["group_size"]


def test_a_pattern_that_is_taken_is_extended_not_overridden(headers_of, tmp_path):
    patterns = {"mlp.down_proj": {"bits": 8}, "layers.0.mlp.*": {"bits": 4}}
    held = planned(recipe(set=patterns), headers_of(inter=1536), tmp_path / "out", target="vllm", tp=8, repair=True)
    found = matrices(held)[1]
    assert found["model.layers.0.mlp.down_proj"][0] == GridSpec(4, 64)
    assert found["model.layers.1.mlp.down_proj"][0] == GridSpec(8, 64)


def test_patterns_are_few_and_change_no_others(headers_of, tmp_path):
    made = recipe(set={"layers.1.block_sparse_moe.experts.2.w1": {"bits": 8}})
    held = planned(made, headers_of(family="mixtral"), tmp_path / "out", target="vllm", repair=True)
    [step] = held.recipe.steps
    block = "model.layers.1.block_sparse_moe.experts.*"
    assert list(step.set)[1:] == [f"{block}.w1", f"{block}.w3", f"{block}.w2"]
    assert step.group_size is None  # nothing that the default depends on was changed


def test_several_faults_are_repaired_one_after_the_other(headers_of, tmp_path):
    made = recipe("gptq", sym=False, actorder="group", group_size=256)
    held = planned(made, headers_of(inter=1536), tmp_path / "out", target="vllm", tp=8, repair=True)
    kinds = [(note.subject, note.why.partition(",")[0]) for note in held.ledger.of_kinds(["target"])]
    assert kinds == [
        ("all matrices", "sym: true"),
        ("all matrices", "group_size: 128"),
        ("mlp.down_proj", "group_size: 64"),
        ("all matrices", "actorder: static"),
    ]


def test_linears_without_a_known_split_are_refused_when_split():
    entries = [
        Entry(TensorSpec("model.layers.0.mixer.in_proj.weight", "BF16", (128, 128)), W4, block=True, linear=True)
    ]
    for target in (TARGETS["vllm"], TARGETS["sglang"]):
        assert violations(target, "compressed-tensors", entries, {}) == []
        [item] = violations(target, "compressed-tensors", entries, {}, tp=2)
        assert "not known how a linear of this name is split" in item.what
        assert item.by_hand == "use --tp 1"


def test_a_router_is_never_split():
    router = Entry(TensorSpec("model.layers.0.mlp.gate.weight", "BF16", (3, 128)), None, block=True, linear=True)
    expert = Entry(
        TensorSpec("model.layers.0.mlp.experts.0.w2.weight", "BF16", (128, 256)), W4, block=True, linear=True
    )
    assert violations(TARGETS["vllm"], "compressed-tensors", [router, expert], {}, tp=2) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "vlm"}, "did you mean 'vllm'?"),
        ({"tp": 2}, "--tp 2 says nothing without --target"),
        ({"tp": 2, "target": "transformers"}, "--tp 2 is not for transformers"),
        ({"tp": 10**9, "target": "vllm"}, "cannot be shared out to 1000000000 devices"),
        ({"tp": 0, "target": "vllm"}, "--tp 0 is no number of devices"),
        ({"repair": True}, "--repair without --target"),
    ],
)
def test_targets_that_say_nothing_are_refused(headers_of, tmp_path, options, words):
    with pytest.raises((PlanError, RecipeError)) as refused:
        planned(recipe(), headers_of(), tmp_path / "out", **options)
    assert words in str(refused.value)
    assert refused.value.exit_code == 2


def test_every_fact_is_broken_by_some_case(headers_of, tmp_path):
    """The table cannot grow a fact that no case above exercises."""
    reached = set()
    for target, sizes, options, tp, *_ in REFUSED.values():
        plan = planned(recipe(**options), headers_of(**sizes), tmp_path / "out")
        found = violations(TARGETS[target], plan.format.name, plan.entries, plan.headers.config, tp)
        for fact in TARGETS[target].formats.get(plan.format.name, ()):
            if any(item.what.startswith((fact.why, fact.why.partition(" q, k, v")[0])) for item in found):
                reached.add((target, fact.why))
    known = {
        (name, fact.why)
        for name, target in TARGETS.items()
        for facts in target.formats.values()
        for fact in facts
        if not isinstance(fact, Devices)
    }
    heads = {("transformers", "it leaves a quantised head at random values, without an error")}  # below, by entries
    unreachable = {  # the formats themselves refuse other widths, so these only show in `list targets`
        ("transformers", "it takes 2, 4 and 8 bits, which all versions of compressed-tensors pack alike"),
        ("transformers", "GPTQModel's kernels take 2, 3, 4 and 8 bits"),
        ("gptqmodel", "it takes 2, 3, 4 and 8 bits"),
        *((name, "awq has 4 bits") for name in ("transformers", "gptqmodel", "vllm", "sglang")),
    }
    assert known - reached == heads | unreachable


# --- an oracle of its own: which elements each device holds ---


def whole_on_devices(target, tp, heads, kv, head, hidden, inter, bits, group, symmetric):
    """Whether every device gets whole heads, whole groups, whole words and whole tiles; by listing what it holds."""
    if heads % tp or inter % tp:
        return False
    if kv >= tp and kv % tp:
        return False
    if kv < tp and tp % kv:
        return False
    for device in range(tp):
        queries = [h for h in range(heads) if h * tp // heads == device]
        keys = [h for h in range(kv) if (h * tp // kv == device if kv >= tp else device * kv // tp == h)]
        hidden_of_mlp = [i for i in range(inter) if i * tp // inter == device]
        linears = [  # (rows of each part, columns held)
            ([len(queries) * head, len(keys) * head, len(keys) * head], list(range(hidden))),
            ([hidden], [h * head + i for h in queries for i in range(head)]),
            ([len(hidden_of_mlp)] * 2, list(range(hidden))),
            ([hidden], hidden_of_mlp),
        ]
        for parts, columns in linears:
            if group != PER_ROW:
                held: dict[int, int] = {}
                for column in columns:
                    held[column // group] = held.get(column // group, 0) + 1
                if any(count != group for count in held.values()):
                    return False
            if target == "sglang" and (sum(parts) % 64 or len(columns) % 128):
                return False
            if target == "vllm":
                if len(columns) * bits % 32:
                    return False
                if not symmetric and any(rows * bits % 32 for rows in parts):
                    return False
    return True


def entries_of(hidden, inter, heads, kv, head, grid):
    shapes = {
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (kv * head, hidden),
        "self_attn.v_proj": (kv * head, hidden),
        "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (inter, hidden),
        "mlp.up_proj": (inter, hidden),
        "mlp.down_proj": (hidden, inter),
    }
    return [
        Entry(TensorSpec(f"model.layers.0.{name}.weight", "BF16", shape), grid, block=True, linear=True)
        for name, shape in shapes.items()
    ]


@settings(max_examples=400, deadline=None)
@given(
    target=st.sampled_from(["vllm", "sglang"]),
    tp=st.sampled_from([1, 2, 3, 4, 6, 8]),
    kv=st.integers(1, 8),
    share=st.integers(1, 4),
    head=st.sampled_from([12, 16, 32, 64, 96, 128]),
    hidden=st.integers(1, 24).map(lambda n: 32 * n),
    inter=st.one_of(st.integers(1, 24).map(lambda n: 64 * n), st.integers(1, 400).map(lambda n: 4 * n)),
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([PER_ROW, 32, 64, 128]),
    symmetric=st.booleans(),
)
def test_what_is_accepted_lies_whole_on_every_device(
    target, tp, kv, share, head, hidden, inter, bits, group, symmetric
):
    heads = kv * share
    if not symmetric:
        bits = 4
    entries = entries_of(hidden, inter, heads, kv, head, GridSpec(bits, group, symmetric))
    if any(entry.in_features % (1 if group == PER_ROW else group) for entry in entries):
        return  # no plan has such groups
    config = {"num_attention_heads": heads, "num_key_value_heads": kv}
    found = violations(TARGETS[target], "compressed-tensors", entries, config, tp)
    whole = whole_on_devices(target, tp, heads, kv, head, hidden, inter, bits, group, symmetric)
    assert (not found) == whole, found


@settings(max_examples=40, deadline=None)
@given(
    target=st.sampled_from(sorted(TARGETS)),
    tp=st.sampled_from([1, 2, 4]),
    inter=st.integers(1, 40).map(lambda n: 32 * n),
    format_=st.sampled_from(["gptq", "awq", "compressed-tensors", "dense"]),
    bits=st.sampled_from([2, 4, 8]),
    group=st.sampled_from([None, PER_ROW, 16, 32, 128]),
    sym=st.booleans(),
    leaf=st.sampled_from(["q_proj", "mlp.*", "layers.0.*", "o_proj", "layers.1.mlp.up_proj"]),
    change=st.sampled_from([{"bits": 8}, {"group_size": 32}, {"skip": True}, {"group_size": -1}, {"clip": "minmax"}]),
)
def test_a_repair_ends_in_a_plan_that_its_recipe_repeats_or_in_a_refusal(
    target, tp, inter, format_, bits, group, sym, leaf, change
):
    tp = tp if TARGETS[target].tensor_parallel else 1
    made = recipe(format_, "rtn", bits=bits, group_size=group, sym=sym, set={leaf: change})
    with tempfile.TemporaryDirectory() as folder:
        model = headers_only(Path(folder) / "model", hidden=256, inter=inter, heads=4, kv=2, head=64)
        out = Path(folder) / "out"
        try:
            held = planned(made, model, out, target=target, tp=tp, repair=True)
        except PlanError:
            return
        assert violations(TARGETS[target], held.format.name, held.entries, held.headers.config, tp) == []
        assert matrices(planned(parse(held.recipe.as_data()), model, out)) == matrices(held)


# --- what the ledger says of engines when no target is named ---


@pytest.mark.parametrize("format_", [GPTQ, PACKED, DENSE])
def test_the_default_is_read_by_every_engine(format_):
    assert format_.refuses(model(), {}) is None
    assert engine_notes(format_.name, model(), {}) == []


@pytest.mark.parametrize(
    ("format_", "entries", "engines"),
    [
        (GPTQ, model({"": GridSpec(2, 32)}), ["vLLM", "SGLang"]),
        (GPTQ, model({"": GridSpec(3, 32)}), ["vLLM", "SGLang", "llama.cpp's converter"]),
        (GPTQ, model({"": GridSpec(4, 32, symmetric=False)}), ["vLLM", "SGLang"]),
        (GPTQ, model({"": GridSpec(4, 16)}), ["vLLM", "SGLang"]),
        (GPTQ, [matrix("m", GridSpec(4, 48), (128, 384))], ["transformers", "GPTQModel", "vLLM", "SGLang"]),
        (GPTQ, model({"down": GridSpec(8, 32)}), ["transformers", "llama.cpp's converter"]),
        (GPTQ, model({"q_proj": GridSpec(8, 32)}), ["transformers", "vLLM", "SGLang", "llama.cpp's converter"]),
        (GPTQ, model({"q_proj": None}), ["vLLM", "SGLang"]),
        (GPTQ, model(permuted=True), ["vLLM"]),
        (GPTQ, model({"": GridSpec(4, PER_ROW)}, permuted=True), []),
        (GPTQ, model(head=True), ["transformers"]),
        (GPTQ, [matrix("m", W4, (36, 128))], ["transformers", "vLLM", "SGLang"]),
        (GPTQ, [matrix("m", W4, (64, 160))], ["SGLang"]),
        (GPTQ, [matrix("model.layers.0.mlp.experts.0.up_proj")], ["transformers"]),
        (AWQ, model({"": GridSpec(4, 32, symmetric=False)}), []),
        (AWQ, model(dtype="F16"), []),
        (AWQ, model(), ["vLLM", "SGLang"]),  # bfloat16 without zero points
        (AWQ, model({"": GridSpec(4, PER_ROW)}, dtype="F16"), ["vLLM", "SGLang"]),
        (AWQ, model({"": GridSpec(4, 16, symmetric=False)}), ["transformers", "GPTQModel", "vLLM", "SGLang"]),
        (AWQ, [matrix("model.layers.0.mlp.experts.0.up_proj", GridSpec(4, 32, symmetric=False))], ["transformers"]),
        (PACKED, model({"": GridSpec(4, 32, symmetric=False)}), ["transformers"]),
        (PACKED, model({"": GridSpec(8, 32, symmetric=False)}), ["transformers", "vLLM"]),
        (PACKED, model({"": GridSpec(2, 32)}), ["vLLM", "SGLang"]),
        (PACKED, model({"": GridSpec(8, PER_ROW)}), ["llama.cpp's converter"]),
        (PACKED, model({"": GridSpec(4, 16)}), ["vLLM", "SGLang"]),
        (PACKED, model({"down": GridSpec(8, 32)}), ["llama.cpp's converter"]),
        (PACKED, model({"gate": None}), ["vLLM", "SGLang"]),
        (PACKED, [matrix("model.layers.0.mlp.experts.0.up_proj")], []),
        (GPTQ, [matrix("h.0.attn.c_attn", transposed=True)], ["transformers"]),
        (GPTQ, [matrix("model.layers.0.block_sparse_moe.experts.0.w1")], ["transformers", "GPTQModel"]),
        (GPTQ, [matrix("model.layers.0.mlp.gate_up_proj")], ["GPTQModel"]),
        (GPTQ, [matrix("gpt_neox.layers.0.mlp.dense_h_to_4h"), matrix("embed_out", None)], ["GPTQModel"]),
    ],
)
def test_engines_that_read_the_format_but_not_this_are_named_once_each(format_, entries, engines):
    assert format_.refuses(entries, {}) is None
    notes = engine_notes(format_.name, entries, {})
    assert [note.partition(" does not load this: ")[0] for note in notes] == engines
    verdict = verdicts(format_.name, entries, {})
    reading = [target for target in TARGETS.values() if format_.name in target.formats]
    assert [target.title for target in reading if verdict[target.name] != "ok"] == engines


# --- the command line ---


def call(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "llmcompress", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_a_target_on_the_command_line(headers_of, tmp_path):
    model, out = headers_of(inter=1536), tmp_path / "out"
    refused = call("plan", "rtn", model, "-o", out, "--target", "vllm", "--tp", "8")
    assert refused.returncode == 2
    [error, hint] = refused.stderr.splitlines()
    assert error.startswith("error: vLLM does not load model.layers.0.mlp.down_proj and 1 more on 8 devices: groups of")
    assert "pass --repair to use groups of 64" in hint

    done = call("plan", "rtn", model, "-o", out, "--target", "vllm", "--tp", "8", "--repair", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["targets"]["vllm"] == "ok"
    assert set(plan["targets"]) == set(TARGETS)
    assert "down_proj" in plan["targets"]["llama.cpp"][0]
    assert [entry["subject"] for entry in plan["ledger"] if entry["kind"] == "target"] == ["mlp.down_proj"]
    printed = call("rtn", model, "-o", out, "--target", "vllm", "--tp", "8", "--repair", "--print-recipe")
    assert parse(yaml.safe_load(printed.stdout)).as_data() == plan["recipe"]
    people = call("plan", "rtn", model, "-o", out, "--target", "vllm", "--tp", "2")
    assert any(line.split() == ["loads", "in", "vllm", "(tp", "2)"] for line in people.stdout.splitlines())
    assert list(tmp_path.iterdir()) == []


def test_a_repaired_run_carries_the_recipe_that_repeats_it(tiny_model_dir, tmp_path):
    whole = call("rtn", tiny_model_dir, "-o", tmp_path / "a", "--target", "sglang", "--tp", "4", "--repair", "--json")
    assert whole.returncode == 0, whole.stderr
    report = json.loads(whole.stdout)
    assert {e["subject"] for e in report["ledger"] if e["kind"] == "target"} == {"self_attn.o_proj"}
    again = call("run", tmp_path / "a" / "llmcompress.yaml", tiny_model_dir, "-o", tmp_path / "b", "--json")
    assert json.loads(again.stdout)["tensors"] == report["tensors"]
    assert (tmp_path / "a" / "llmcompress.yaml").read_text() == (tmp_path / "b" / "llmcompress.yaml").read_text()


def test_list_targets_shows_the_table():
    rows = json.loads(call("list", "targets", "--json").stdout)
    assert {row["target"] for row in rows} == set(TARGETS)
    [row] = [row for row in rows if (row["target"], row["format"]) == ("vllm", "gptq")]
    assert (row["as of"], row["bits"], row["asymmetric"]) == ("0.33", "4, 8", "none")
    assert row["groups"] == "32, 64, 128, per row"
    assert "it refuses groups in activation order (desc_act)" in row["facts"]
