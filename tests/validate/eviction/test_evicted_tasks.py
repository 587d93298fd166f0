"""Items of tasks under eviction: choices and written texts behind a real cache without the evicted keys and values."""

import json

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from transformers import AutoModelForCausalLM, AutoTokenizer

import llmcompress
from evicted import evicted_cache, evicted_logits
from llmcompress.errors import CalibrationError, RecipeError
from llmcompress.report.schemas import schema_text
from llmcompress.validate import tasks as module
from llmcompress.validate.task_items import Written

STORY = "The river runs down to the sea, and the boat with the red sail goes with it past the old mill and the"
ROWS = {
    "blanks": [
        {
            "sentence": "The cup fell off the shelf, as the _ was tilted.",
            "option1": "cup",
            "option2": "shelf",
            "answer": "2",
        }
    ],
    "choices": [
        {"question": f"{STORY} stones. A spoon is for", "choices": ["soup", "flying over it", "nails"], "answer": 0},
        {"question": "The river runs down to the old", "choices": ["sea", "roof of the mill"], "answer": 1},
    ],
    "ends": [{"text": "One, two, three, four, five,", "target": "six, seven"}],
}
PAIRS = [
    ("The cup fell off the shelf, as the cup", " was tilted."),
    ("The cup fell off the shelf, as the shelf", " was tilted."),
    (f"{STORY} stones. A spoon is for", " soup"),
    (f"{STORY} stones. A spoon is for", " flying over it"),
    (f"{STORY} stones. A spoon is for", " nails"),
    ("The river runs down to the old", " sea"),
    ("The river runs down to the old", " roof of the mill"),
    ("One, two, three, four, five,", " six, seven"),
]
WRITTEN = [
    {"prompt": prompt, "pattern": "([A-Za-z]+)", "answer": "unknown", "most": 9, "stops": ["@"]}
    for prompt in (STORY, "Once upon a time there was a")
]


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "items"
    folder.mkdir()
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("kv", ["h2o:0.6", "streaming:0.3", pytest.param("expected:0.3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("batch", [1, 3])
def test_choices_are_scored_behind_the_evicted_cache_of_their_prompts(
    tiny_model_dir, tmp_path, monkeypatch, place, kv, batch
):
    name, share = kv.split(":")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    wanted = []
    for prompt, choice in PAIRS:
        ids, start = tokenizer(prompt + choice)["input_ids"], len(tokenizer(prompt)["input_ids"])
        logits = evicted_logits(tiny_model_dir, torch.tensor([ids]), start - 1, name, float(share))
        logs = logits.log_softmax(-1)
        wanted.append(sum(float(logs[at, token]) for at, token in enumerate(ids[start:])))
    found = []
    real = module.figures
    monkeypatch.setattr(module, "figures", lambda items, scores: found.append(scores) or real(items, scores))
    result = llmcompress.evaluate_tasks(tiny_model_dir, tasks=place, kv=kv, batch=batch, device="cpu")
    evicted, whole = found[-1]
    assert list(result.tasks) == ["blanks", "choices", "ends"]
    np.testing.assert_allclose(evicted.loglikelihood, wanted, rtol=1e-3)
    assert np.abs(evicted.loglikelihood - whole.loglikelihood).max() > 0.05
    assert result.document["asked"]["omitted"] == f"--kv {name}:{share} in 4 of 4 layers"


@torch.no_grad()
def written_after(model, tokenizer, prompt, most, name, share):
    """What a model writes, a token at a time, behind a cache without what is evicted of all but the last token."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    context = ids.shape[1] - 1
    cache, found = evicted_cache(model, ids[:, :context], name, share), []
    last = ids[:, -1:]
    for step in range(most):
        out = model(last, past_key_values=cache, position_ids=torch.tensor([[context + step]]))
        last = out.logits[:, -1:].argmax(-1)
        found.append(int(last))
    return tokenizer.decode(found, skip_special_tokens=True)


def test_texts_are_written_behind_the_evicted_cache_of_their_prompts(tiny_model_dir, tmp_path, monkeypatch):
    name, share = "h2o", 0.8
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in WRITTEN))
    wanted = [written_after(model, tokenizer, row["prompt"], row["most"], name, share) for row in WRITTEN]
    plain = [written_after(model, tokenizer, row["prompt"], row["most"], name, 0.0) for row in WRITTEN]
    assert wanted != plain
    texts = []
    monkeypatch.setattr(Written, "right", lambda self, text: texts.append(text) or True)
    llmcompress.evaluate_tasks(tiny_model_dir, tasks=tmp_path / "own.jsonl", kv=f"{name}:{share}", device="cpu")
    assert texts == [*wanted, *plain]


def test_the_command_says_what_was_evicted(main, capsys, tiny_model_dir, place, tmp_path):
    file = tmp_path / "evicted.json"
    given = ["eval", tiny_model_dir, "--tasks", place, "--kv", "h2o:0.5"]
    assert main(*given, "--json", "-o", file) == 0
    printed, saved = json.loads(capsys.readouterr().out), json.loads(file.read_text())
    Draft202012Validator(json.loads(schema_text("tasks"))).validate(saved)
    assert printed["omitted"] == saved["asked"]["omitted"] == "--kv h2o:0.5 in 4 of 4 layers"
    assert printed["loglikelihood_drop"] != 0
    assert saved["reference"] == saved["model"]
    assert main(*given) == 0
    shown = capsys.readouterr()
    assert "share of items answered right, --kv h2o:0.5 in 4 of 4 layers" in shown.out
    assert "whole cache" in shown.out
    assert "with its whole cache" in shown.err
    (tmp_path / "original").symlink_to(tiny_model_dir)
    assert main(*given, "--ref", tmp_path / "original", "--fail-if", "loglikelihood < 0") == 3
    shown = capsys.readouterr()
    assert "original" in shown.out
    assert "than the original" in shown.err


def test_what_cannot_be_evicted_from_items_is_refused(main, capsys, tiny_model_dir, place):
    given = ["eval", tiny_model_dir, "--tasks", place]
    for more, words in (
        (["--kv", "h2o:0.5,h2o:0.8"], "measure one value at a time"),
        (["--mlp-sparsity", "0.5"], "--tasks does not go with --mlp-sparsity 0.5"),
        (["--kv", "snapkv:0.5"], "--kv snapkv:0.5 could evict from, and snapkv always keeps 64"),
    ):
        assert main(*given, *more) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(CalibrationError, match="always keeps 4"):
        llmcompress.evaluate_tasks(tiny_model_dir, tasks=place, kv="streaming:0.9")
    with pytest.raises(RecipeError, match="one eviction at a time"):
        llmcompress.evaluate_tasks(tiny_model_dir, tasks=place, kv="h2o:0.5,tova:0.5")
