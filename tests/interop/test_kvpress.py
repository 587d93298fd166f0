"""Eviction is what kvpress does: the logits behind a compressed cache are its logits."""

import pytest
import torch
from other_environment import asked

from llmcompress.validate.evaluate import lockstep
from llmcompress.validate.load import open_streamed
from llmcompress.validate.omission import omissions_of

pytestmark = pytest.mark.interop

# each token once: keys of equal tokens have equal norms in the first layer
IDS = torch.randperm(480, generator=torch.Generator().manual_seed(2)).view(2, 240)
LONG = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
SCORES = ("streaming", "knorm", "h2o", "snapkv", "tova", "expected")
RATIOS = (0.25, 0.5, 0.7)


@pytest.mark.parametrize("family", ["tiny", "qwen3", "phi3"])
def test_logits_behind_an_evicted_cache_are_equal(family, random_model_dir, tiny_model_dir, tmp_path):
    path = tiny_model_dir if family == "tiny" else random_model_dir(family, dtype="float32", **LONG)
    ratios = RATIOS if family == "tiny" else RATIOS[:2]
    context = IDS.shape[1] // 2
    _, theirs = asked("kvpress", IDS, tmp_path, [path], [str(context)])
    kept = {score: 64 if score == "snapkv" else 4 for score in SCORES}  # at the least
    names = [f"{score}:{ratio}" for score in SCORES for ratio in ratios if int(context * (1 - ratio)) >= kept[score]]
    assert {name.partition(":")[0] for name in names} == set(SCORES)
    plain, *found = logits(path, [None, *names], context)
    for name, ours in zip(names, found, strict=True):
        assert (theirs[name] - plain).abs().max() > 1e-3, name  # it does show
        torch.testing.assert_close(ours, theirs[name], rtol=1e-3, atol=1e-4, msg=name)


def logits(path, evictions, context):
    """Logits [windows, length - context, vocabulary] of the second halves, by eviction."""
    models = [open_streamed(path, dtype=torch.float32) for _ in evictions]
    for model, kv in zip(models, evictions, strict=True):
        for omission in omissions_of(kv):
            omission.install(model)
    windows = [rows(context, IDS.shape[1]) for rows in lockstep(models, [IDS], lambda *_: None)]
    return [torch.stack(of_model) for of_model in zip(*windows, strict=True)]
