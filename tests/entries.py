"""Checkpoints as formats and runtimes judge them: entries without a file."""

import re

import torch

import llmcompress.formats
from llmcompress.formats.base import Entry, TensorSpec
from llmcompress.grids.integer import IntegerSpec
from llmcompress.registry import discover

FORMATS = discover(llmcompress.formats, "FORMAT")
GPTQ, AWQ, PACKED, DENSE = (FORMATS[name] for name in ("gptq", "awq", "compressed-tensors", "dense"))
W4 = IntegerSpec(4, 32)
LEAVES = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (64, 128),
    "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (256, 128),
    "mlp.up_proj": (256, 128),
    "mlp.down_proj": (128, 256),
}


def there_and_back(form, entry, coded):
    """A matrix encoded and decoded: tensors and config.json are as the format says beforehand, its codes as before."""
    tensors = form.encode(entry, coded)
    layout = {spec.name: spec for spec in form.layout(entry)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: spec.shape for name, spec in layout.items()
    }
    config = form.config([entry], {})["config.json"]
    assert form.recognises(config)
    assert form.shape(entry.module, layout, tensors.__getitem__, config) == (entry.out_features, entry.in_features)
    again = form.decode(entry.module, tensors.__getitem__, config)
    assert again.grid.spec == entry.grid == form.grid(entry.module, config)
    assert torch.equal(again.codes, coded.codes)
    return again


def matrix(name, grid=W4, shape=(128, 128), dtype="BF16", **about):
    """The entry of a matrix in a layer."""
    about = {"block": True, "linear": True, "options": {"damp_percent": 0.01}, **about}
    return Entry(TensorSpec(f"{name}.weight", dtype, shape), grid=grid, **about)


def model(grids=None, head=False, layers=2, **about):
    """Entries of a small Llama; grids: {pattern: grid or None} for what differs from W4."""
    entries = [Entry(TensorSpec("model.embed_tokens.weight", "BF16", (512, 128)))]
    for layer in range(layers):
        entries.append(Entry(TensorSpec(f"model.layers.{layer}.input_layernorm.weight", "BF16", (128,)), block=True))
        for leaf, shape in LEAVES.items():
            name = f"model.layers.{layer}.{leaf}"
            grid = next((g for pattern, g in (grids or {}).items() if re.search(pattern, name)), W4)
            entries.append(matrix(name, grid, shape, **about))
    entries.append(matrix("lm_head", W4 if head else None, (512, 128), block=False, linear=head))
    return entries
