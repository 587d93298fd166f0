"""Evaluation under eviction against transformers' model with a real cache, of which pairs are taken out one by one."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from llmcompress.errors import CheckpointError, RecipeError
from llmcompress.validate.evaluate import lockstep
from llmcompress.validate.load import open_streamed
from llmcompress.validate.omission import omissions_of

CONTEXT, LENGTH = 80, 160
# each token once: keys of equal tokens have equal norms in the first layer
IDS = torch.randperm(192, generator=torch.Generator().manual_seed(4))[None, :LENGTH]
SHARES = {"streaming": 0.5, "knorm": 0.5, "h2o": 0.5, "snapkv": 0.15, "tova": 0.3, "expected": 0.5}


@pytest.fixture(scope="module")
def path(random_model_dir):
    return random_model_dir("llama", dtype="float32", num_attention_heads=4, num_key_value_heads=2, vocab_size=192)


def rotation(position, dim, theta):
    """The matrix that turns a query at a position."""
    matrix, half = torch.zeros(dim, dim, dtype=torch.float64), dim // 2
    for pair in range(half):
        angle = torch.tensor(position * theta ** (-2 * pair / dim), dtype=torch.float64)
        matrix[pair, pair] = matrix[pair + half, pair + half] = angle.cos()
        matrix[pair, pair + half], matrix[pair + half, pair] = -angle.sin(), angle.sin()
    return matrix


def expected(model, layer, head, keys, values, states):
    """The score of each position of one key-value head, by rotation matrices."""
    attention = model.model.layers[layer].self_attn
    dim, theta = attention.head_dim, model.config.rope_parameters["rope_theta"]
    turn = sum(rotation(CONTEXT + step, dim, theta) for step in range(512)) / 512
    parts = []
    for query_head in (2 * head, 2 * head + 1):
        normed = model.model.layers[layer].input_layernorm(states[layer])[0, 4:]
        queries = (normed @ attention.q_proj.weight[query_head * dim : (query_head + 1) * dim].T).double()
        mean, spread = queries.mean(0), queries.T.cov(correction=0)
        mean, spread = turn @ mean, turn @ spread @ turn.T
        logits = torch.stack([key @ mean / dim**0.5 + key @ spread @ key / dim / 2 for key in keys.double()[4:]])
        parts.append(logits.softmax(0))
    scores = sum(parts) / 2 * values.double()[4:].norm(dim=1)
    return [float("inf")] * 4 + scores.tolist()


def scores_of(name, model, layer, head, cache, out):
    """The score of each position of one key-value head of two query heads, in loops."""
    keys, values = cache.layers[layer].keys[0, head], cache.layers[layer].values[0, head]
    weights = out.attentions[layer][0]
    own = weights[2 * head : 2 * head + 2]
    if name == "streaming":
        return [float("inf") if place < 4 else place for place in range(CONTEXT)]
    if name == "knorm":
        return [-float(key.norm()) for key in keys]
    if name == "h2o":
        return [float(own[:, place:, place].mean()) for place in range(CONTEXT)]
    if name == "tova":
        return [*weights[:, -1, :-1].mean(0).tolist(), float("inf")]
    if name == "expected":
        return expected(model, layer, head, keys, values, out.hidden_states)
    before = own[:, -64:, :-64].mean((0, 1)).tolist()
    padded = [0, 0, *before, 0, 0]
    return [sum(padded[place : place + 5]) / 5 for place in range(CONTEXT - 64)] + [float("inf")] * 64


@torch.no_grad()
def evicted_logits(path, name, share):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    cache = DynamicCache(config=model.config)
    out = model(IDS[:, :CONTEXT], past_key_values=cache, output_attentions=True, output_hidden_states=True)
    left = int(CONTEXT * (1 - share))
    for number, layer in enumerate(cache.layers):
        pairs = []
        for head in range(layer.keys.shape[1]):
            scores = scores_of(name, model, number, head, cache, out)
            stay = sorted(sorted(range(CONTEXT), key=lambda place, of=scores: -of[place])[:left])
            pairs.append((layer.keys[:, head, stay], layer.values[:, head, stay]))
        layer.keys, layer.values = (torch.stack(side, dim=1) for side in zip(*pairs, strict=True))
    new = LENGTH - CONTEXT
    mask = torch.full((new, left + new), torch.finfo(torch.float32).min).triu(left + 1)[None, None]
    places = torch.arange(CONTEXT, LENGTH)[None]
    return model(IDS[:, CONTEXT:], past_key_values=cache, position_ids=places, attention_mask=mask).logits[0]


def streamed_logits(path, kv):
    model = open_streamed(path, dtype=torch.float32)
    [omission] = omissions_of(kv)
    layers = omission.install(model)
    [[logits]] = [rows(0, IDS.shape[1]) for rows in lockstep([model], [IDS], lambda *_: None)]
    return logits, layers


@pytest.mark.parametrize("name", SHARES)
def test_logits_are_those_behind_a_cache_without_the_evicted_pairs(path, name):
    wanted = evicted_logits(path, name, SHARES[name])
    found, layers = streamed_logits(path, f"{name}:{SHARES[name]}")
    plain, _ = streamed_logits(path, "h2o:0")
    assert layers == set(range(len(layers))) != set()
    assert (wanted - plain[CONTEXT:]).abs().max() > 1e-3
    torch.testing.assert_close(found[CONTEXT:], wanted, rtol=1e-3, atol=1e-4)


def test_layers_whose_windows_are_shorter_keep_their_cache(random_model_dir):
    _, layers = streamed_logits(random_model_dir("gemma3_text", sliding_window=16, vocab_size=192), "knorm:0.5")
    model = open_streamed(random_model_dir("gemma3_text", sliding_window=16, vocab_size=192), dtype=torch.float32)
    assert layers == {n for n, kind in enumerate(model.config.layer_types) if kind == "full_attention"}


def test_models_without_plain_attention_are_refused(random_model_dir):
    model = open_streamed(random_model_dir("mamba"), dtype=torch.float32)
    with pytest.raises(CheckpointError, match="no attention that can leave positions out"):
        omissions_of("h2o:0.5")[0].install(model)
    model = open_streamed(random_model_dir("opt"), dtype=torch.float32)
    with pytest.raises(CheckpointError, match="no rotary positions"):
        omissions_of("expected:0.5")[0].install(model)


@pytest.mark.parametrize(
    ("kv", "words"),
    [("snap:0.5", "did you mean 'snapkv'"), ("snapkv", "does not say what share"), ("h2o:1", "is not a share"),
     ("h2o:nan", "is not a share"), ("h2o:x", "is not a share"), ("h2o:0.5,", "there is no score ''")],
)  # fmt: skip
def test_what_is_no_eviction_is_refused(kv, words):
    with pytest.raises(RecipeError) as refused:
        omissions_of(kv)
    assert words in str(refused.value)


def test_windows_that_are_too_short_are_refused():
    [omission] = omissions_of("snapkv:0.5")
    omission.check(256)
    for length in (128, 250):
        with pytest.raises(RecipeError, match="always keeps 64"):
            omission.check(length)


def test_eval_shows_what_eviction_costs(main, tiny_model_dir, tiny_eval_text, capsys):
    options = ["--text", tiny_eval_text, "--length", 64, "--windows", 2]
    assert main("eval", tiny_model_dir, *options, "--kv", "h2o:0.5", "--json") == 0
    alone = json.loads(capsys.readouterr().out)
    assert (alone["tokens"], alone["omitted"]) == (2 * 31, "--kv h2o:0.5 in 4 of 4 layers")
    assert main("eval", tiny_model_dir, *options, "--kv", "h2o:0.5,h2o:0.8", "--mlp-sparsity", "0.9", "--json") == 0
    several = json.loads(capsys.readouterr().out)
    assert several[0]["kl"] == pytest.approx(alone["kl"], rel=1e-3)
    assert several[0]["kl"] < several[1]["kl"]
    assert several[2]["tokens"] == 2 * 63
    assert main("eval", tiny_model_dir, *options, "--kv", "h2o:0.5", "--fail-if", "kl > 0") == 3
    assert main("eval", tiny_model_dir, *options, "--kv", "h2o:0.5,h2o:0.8", "--fail-if", "kl > 0") == 2
    assert main("eval", tiny_model_dir, *options, "--kv", "h2o:0.5", "--generate", "a") == 2
    assert "--generate does not go with --kv h2o:0.5" in capsys.readouterr().err
