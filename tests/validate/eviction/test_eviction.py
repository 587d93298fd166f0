"""Evaluation under eviction against transformers' model with a real cache, of which pairs are taken out one by one."""

import json

import pytest
import torch

from evicted import evicted_logits
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


def streamed_logits(path, kv):
    model = open_streamed(path, dtype=torch.float32)
    [omission] = omissions_of(kv)
    layers = omission.install(model)
    [[logits]] = [rows(0, IDS.shape[1]) for rows in lockstep([model], [IDS], lambda *_: None)]
    return logits, layers


@pytest.mark.parametrize("name", SHARES)
def test_logits_are_those_behind_a_cache_without_the_evicted_pairs(path, name):
    wanted = evicted_logits(path, IDS, CONTEXT, name, SHARES[name])
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
