"""Logits behind a cache of transformers out of which keys and values are taken one by one, as scores in loops say."""

import torch
from transformers import AutoModelForCausalLM, DynamicCache


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
    turn = sum(rotation(len(keys) + step, dim, theta) for step in range(512)) / 512
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
    context = len(keys)
    weights = out.attentions[layer][0]
    own = weights[2 * head : 2 * head + 2]
    if name == "streaming":
        return [float("inf") if place < 4 else place for place in range(context)]
    if name == "knorm":
        return [-float(key.norm()) for key in keys]
    if name == "h2o":
        return [float(own[:, place:, place].mean()) for place in range(context)]
    if name == "tova":
        return [*weights[:, -1, :-1].mean(0).tolist(), float("inf")]
    if name == "expected":
        return expected(model, layer, head, keys, values, out.hidden_states)
    before = own[:, -64:, :-64].mean((0, 1)).tolist()
    padded = [0, 0, *before, 0, 0]
    return [sum(padded[place : place + 5]) / 5 for place in range(context - 64)] + [float("inf")] * 64


def evicted_cache(model, ids, name, share):
    """The cache of a context [1, length] without the share of it of the lowest scores, in each layer and head."""
    context = ids.shape[1]
    cache = DynamicCache(config=model.config)
    out = model(ids, past_key_values=cache, output_attentions=True, output_hidden_states=True)
    left = max(1, int(context * (1 - share)))
    for number, layer in enumerate(cache.layers):
        pairs = []
        for head in range(layer.keys.shape[1]):
            scores = scores_of(name, model, number, head, cache, out)
            stay = sorted(sorted(range(context), key=lambda place, of=scores: -of[place])[:left])
            pairs.append((layer.keys[:, head, stay], layer.values[:, head, stay]))
        layer.keys, layer.values = (torch.stack(side, dim=1) for side in zip(*pairs, strict=True))
    return cache


@torch.no_grad()
def evicted_logits(path, ids, context, name, share):
    """Logits [length - context, vocabulary] behind the context of ids [1, length], whose tokens keep their places."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    cache = evicted_cache(model, ids[:, :context], name, share)
    left, new = cache.layers[0].keys.shape[2], ids.shape[1] - context
    mask = torch.full((new, left + new), torch.finfo(torch.float32).min).triu(left + 1)[None, None]
    places = torch.arange(context, ids.shape[1])[None]
    return model(ids[:, context:], past_key_values=cache, position_ids=places, attention_mask=mask).logits[0]
