"""The text part of MiniMax-M3: names that transformers saves, and what llama.cpp would compute otherwise."""

import json
from pathlib import Path

import pytest
import torch

from llmcompress.errors import PlanError
from llmcompress.formats.gguf.mixture import is_quantised
from llmcompress.formats.gguf.names import gguf_tensors
from llmcompress.formats.gguf.tensors import convert

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "gguf_families.json").read_text())["minimax_m3_vl_text"]
CONFIG, SOURCE = GOLDEN["config"], GOLDEN["source"]
RENAMED = {".block_sparse_moe.e_score": ".mlp.gate.e_score", ".block_sparse_moe.": ".mlp.", ".index_": ".indexer."}


def saved(stored):
    """Tensors of a published checkpoint as transformers' classes hold and save them."""
    found = {}
    for name, value in stored.items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        found[name] = value
    for layer in range(3):
        block = f"model.layers.{layer}.mlp."
        for end in ("", "shared_experts."):
            both = [found.pop(f"{block}{end}{leaf}_proj.weight", None) for leaf in ("gate", "up")]
            if both[0] is not None:
                found[f"{block}{end}gate_up_proj.weight"] = torch.cat(both)
        if layer:
            w1, w2, w3 = (
                torch.stack([found.pop(f"{block}experts.{expert}.{leaf}.weight") for expert in range(4)])
                for leaf in ("w1", "w2", "w3")
            )
            found |= {f"{block}experts.gate_up_proj": torch.cat((w1, w3), 1), f"{block}experts.down_proj": w2}
    return found


def converted(stored):
    made = gguf_tensors(CONFIG, [(name, tuple(value.shape)) for name, value in stored.items()])
    return {tensor.name: convert(tensor, stored.__getitem__) for tensor in made}


def test_tensors_that_transformers_saves_are_those_of_published_checkpoints():
    generator = torch.Generator().manual_seed(0)
    stored = {name: torch.randn(shape, generator=generator) for name, shape in SOURCE.items()}
    published, again = converted(stored), converted(saved(stored))
    assert published.keys() == again.keys() == GOLDEN["tensors"].keys()
    assert all(torch.equal(value, again[name]) for name, value in published.items())


def test_the_index_is_not_rounded_by_a_mixture_as_llama_quantize_leaves_it():
    kept = {tensor.name for tensor in gguf_tensors(CONFIG, list(SOURCE.items())) if ".indexer." in tensor.name}
    assert len(kept) == 8
    assert not [name for name in kept if is_quantised(name, (32, 64))]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["full_attention"] * 3}, "an index in all layers with experts alone"),
        ({"layer_types": None}, "an index in all layers with experts alone"),
        ({"mlp_layer_types": ["dense", "sparse", "dense"]}, "a dense layer after one with experts"),
        ({"index_n_heads": 4}, "index_n_heads is 4, llama.cpp takes one for each of the 2 heads"),
        ({"shared_intermediate_size": 48}, "no multiple of the experts' width"),
        ({"rotary_dim": 16}, "rotary_dim is 16, partial_rotary_factor speaks of 8"),
        ({"swiglu_limit": 10.0}, "swiglu_limit is 10.0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(changes, words):
    with pytest.raises(PlanError, match=words):
        gguf_tensors(CONFIG | changes, list(SOURCE.items()))
