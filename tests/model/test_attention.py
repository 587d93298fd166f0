"""Tiled attention against float64, for every kind of mask and grouping, and where it hands over to torch's kernel."""

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from llmcompress.model.attention import tiled_attention


class Module(nn.Module):
    is_causal = True

    def __init__(self, groups):
        super().__init__()
        self.num_key_value_groups = groups


def inputs(batch, heads, pairs, length, dim, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(length)
    shapes = ((heads, 1.5), (pairs, 1.5), (pairs, 1.0))
    # as transformers passes them: views of [batch, length, heads, dim]
    return [(torch.randn(batch, length, n, dim, generator=generator) * s).to(dtype).transpose(1, 2) for n, s in shapes]


def masks(batch, heads, length):
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    window = causal & ~torch.ones(length, length, dtype=torch.bool).tril(-5)
    least = torch.finfo(torch.bfloat16).min
    bias = torch.linspace(-1, 1, heads)[None, :, None, None].expand(1, heads, length, length)
    return {
        "none": None,
        "window": window[None, None],
        "per sample": torch.stack([causal, window])[:, None][torch.arange(batch) % 2],
        "added": torch.zeros(1, 1, length, length).masked_fill(~window, least).bfloat16(),
        "per head": (bias + torch.zeros(length, length).masked_fill(~causal, least)).bfloat16(),
    }


@pytest.mark.parametrize("kind", ["none", "window", "per sample", "added", "per head"])
@pytest.mark.parametrize(
    ("batch", "heads", "pairs", "length", "dim"),
    [(2, 9, 3, 300, 16), (3, 4, 4, 128, 32), (1, 8, 1, 129, 8), (2, 2, 2, 1, 8)],
)
@torch.no_grad()
def test_it_is_attention(kind, batch, heads, pairs, length, dim):
    query, key, value = inputs(batch, heads, pairs, length, dim)
    mask = masks(batch, heads, length)[kind]
    module = Module(heads // pairs)
    exact = mask.double() if mask is not None and mask.is_floating_point() else mask
    truth, _ = sdpa_attention_forward(module, query.double(), key.double(), value.double(), exact, scaling=0.3)
    found, weights = tiled_attention(module, query, key, value, mask, scaling=0.3, dropout=0.0)
    assert weights is None
    assert found.shape == truth.shape
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous()
    assert float((found - truth).abs().max()) < 0.03 * float(value.abs().max())
    assert float((found - truth).norm() / truth.norm()) < 0.01


@torch.no_grad()
def test_samples_do_not_depend_on_their_batch():
    query, key, value = inputs(3, 6, 2, 200, 16)
    module = Module(3)
    whole, _ = tiled_attention(module, query, key, value, None)
    for item in range(3):
        alone, _ = tiled_attention(module, *(t[item : item + 1] for t in (query, key, value)), None)
        assert torch.equal(alone[0], whole[item])


@torch.no_grad()
@pytest.mark.parametrize("change", ["float32", "cache", "bias"])
def test_the_rest_is_left_to_torch(change):
    query, key, value = inputs(1, 4, 2, 40, 16, torch.float32 if change == "float32" else torch.bfloat16)
    module, options = Module(2), {}
    if change == "cache":
        query = query[:, :, -1:]
    if change == "bias":
        options["position_bias"] = torch.randn(1, 4, 40, 40).bfloat16()
    found, _ = tiled_attention(module, query, key, value, None, **options)
    truth, _ = sdpa_attention_forward(module, query, key, value, None, **options)
    assert torch.equal(found, truth)
