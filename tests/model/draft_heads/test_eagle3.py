"""The forward of a draft head, against one that is written row by row in float64."""

import math

import pytest
import torch

from llmcompress.model.draft_heads.eagle3 import EagleHead, EagleShape, states_of

SHAPE = EagleShape(8, 10, 20, (0, 1, 2), 12, 4, 2, 4, 64, 1e-5, 100.0)
ROWS = 7


@pytest.fixture(scope="module")
def weights():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPE.matrices.items()}


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 8, generator=generator), torch.randn(ROWS, 24, generator=generator)


class Naive:
    """The head as section 3 of the paper and vLLM's model have it, a row at a time, lists of float64 for a cache."""

    def __init__(self, weights):
        self.weights = {name: value.double() for name, value in weights.items()}

    def normed(self, vector, name):
        return vector / math.sqrt(float((vector**2).mean()) + SHAPE.eps) * self.weights[f"{name}.weight"]

    def turned(self, vector, position):
        out, half = vector.clone(), SHAPE.head_dim // 2
        for pair in range(half):
            angle = position * SHAPE.theta ** (-pair / half)
            a, b = float(vector[pair]), float(vector[pair + half])
            out[pair] = a * math.cos(angle) - b * math.sin(angle)
            out[pair + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def row(self, embedded, feature, position, cache):
        """The output of a row upon a cache of (keys, values) by head, and the cache with the row."""
        layer = "layers.0."
        feature = self.normed(feature, f"{layer}hidden_norm")
        both = torch.cat([self.normed(embedded, f"{layer}input_layernorm"), feature])

        def heads(name):
            return (self.weights[f"{layer}self_attn.{name}_proj.weight"] @ both).reshape(-1, SHAPE.head_dim)

        keys, values = [self.turned(key, position) for key in heads("k")], list(heads("v"))
        cache = [*cache, (keys, values)]
        mixed = []
        for number, query in enumerate(self.turned(query, position) for query in heads("q")):
            group = number // (SHAPE.heads // SHAPE.kv_heads)
            scores = [math.exp(float(query @ seen[group]) / math.sqrt(SHAPE.head_dim)) for seen, _ in cache]
            mixed.append(sum(score * seen[group] for score, (_, seen) in zip(scores, cache, strict=True)) / sum(scores))
        hidden = feature + self.weights[f"{layer}self_attn.o_proj.weight"] @ torch.cat(mixed)
        inner = self.normed(hidden, f"{layer}post_attention_layernorm")
        gate, up = (self.weights[f"{layer}mlp.{name}_proj.weight"] @ inner for name in ("gate", "up"))
        return hidden + self.weights[f"{layer}mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up), cache


def test_rows_are_what_the_paper_says(weights, rows):
    """At once, and in two parts."""
    embedded, states = rows
    naive, head = Naive(weights), EagleHead(SHAPE, weights)
    cache, wanted = [], []
    for number in range(ROWS):
        feature = naive.weights["fc.weight"] @ states[number].double()
        out, cache = naive.row(embedded[number].double(), feature, number, cache)
        wanted.append(out)
    features = head.fused(states)
    found, _ = head.advance(embedded, features, 0, None)
    torch.testing.assert_close(found.double(), torch.stack(wanted), rtol=1e-4, atol=1e-4)
    first, seen = head.advance(embedded[:4], features[:4], 0, None)
    second, _ = head.advance(embedded[4:], features[4:], 4, seen)
    torch.testing.assert_close(torch.cat([first, second]), found)
    logits = torch.stack([naive.weights["lm_head.weight"] @ naive.normed(out, "norm") for out in wanted])
    torch.testing.assert_close(head.logits(found).double(), logits, rtol=1e-4, atol=1e-4)


def test_unrolled_rows_are_those_of_real_drafting(weights, rows):
    """Row r at depth d is what is drafted last if drafting begins d rows before: the same rows, one upon the other."""
    embedded, states = rows
    naive, head = Naive(weights), EagleHead(SHAPE, weights)
    found = head.unrolled(embedded, states, 4)
    for start in range(ROWS):
        cache = []
        for number in range(start + 1):
            feature = naive.weights["fc.weight"] @ states[number].double()
            out, cache = naive.row(embedded[number].double(), feature, number, cache)
        torch.testing.assert_close(found[0][start].double(), out, rtol=1e-4, atol=1e-4)
        for depth in range(1, min(4, ROWS - start)):
            out, cache = naive.row(embedded[start + depth].double(), out, start + depth, cache)
            torch.testing.assert_close(found[depth][start + depth].double(), out, rtol=1e-3, atol=1e-3)


def test_states_are_those_of_vllm_or_the_last_ones():
    assert states_of(30) == (2, 15, 27)
    assert states_of(7) == (2, 3, 4)
    assert all(len(set(states_of(layers))) == 3 and max(states_of(layers)) <= layers for layers in range(2, 99))
