"""Scores of tasks against a whole model run by transformers, item by item, and statistics against definitions."""

import json
import re
from fractions import Fraction
from itertools import product
from math import comb
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmcompress.errors import CalibrationError
from llmcompress.validate import tasks as module
from llmcompress.validate.request import Request
from llmcompress.validate.task_files import Task, read_tasks
from llmcompress.validate.task_items import Item
from llmcompress.validate.tasks import (
    ChoiceScores,
    answers,
    drop_interval,
    figures,
    mcnemar,
    share_interval,
    task_figures,
)

ROWS = [
    {"question": "A spoon is for", "choices": ["soup", "flying over the sea", "nails"], "answer": 0},
    {"question": "The river runs down to the ", "choices": ["sea", "roof"], "answer": 0},
    {"text": "One, two, three,", "target": "four"},
    {
        "sentence": "The cup fell off the shelf because the _ was tilted.",
        "option1": "cup",
        "option2": "shelf",
        "answer": "2",
    },
]


def request(model, ref=None, batch=4):
    return Request(Path(model), ref and Path(ref), "default", 2, None, batch, "cpu", None)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def whole(tiny_model_dir):
    """Log-likelihood of a text after a prompt, and whether it is the greedy one, by transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)

    @torch.no_grad()
    def of(prompt, choice):
        start, ids = len(tokenizer(prompt.rstrip())["input_ids"]), tokenizer(prompt + choice)["input_ids"]
        total, greedy = 0.0, True
        for at in range(start, len(ids)):
            logs = model(torch.tensor([ids[:at]])).logits[0, -1].log_softmax(-1)
            total, greedy = total + float(logs[ids[at]]), greedy and int(logs.argmax()) == ids[at]
        return total, greedy

    return of


@pytest.mark.parametrize(("batch", "held"), [(1, 1 << 30), (3, 1 << 30), (2, 1)])
def test_likelihoods_are_those_of_the_model_run_on_each_pair_alone(
    tiny_model_dir, whole, tmp_path, monkeypatch, batch, held
):
    monkeypatch.setattr(module, "_HELD", held)
    tasks = read_tasks(str(write(tmp_path / "own.jsonl", ROWS)))
    found, steps = [], []
    monkeypatch.setattr(module, "figures", lambda items, scores: found.append(scores) or {})
    task_figures(request(tiny_model_dir, batch=batch), tasks, lambda done, of: steps.append((done, of)))
    wanted = [whole(*pair) for item in tasks[0].items for pair in item.pairs]
    for [scores] in found:
        np.testing.assert_allclose(scores.loglikelihood, [total for total, _ in wanted], rtol=1e-4)
        assert scores.greedy.astype(bool).tolist() == [greedy for _, greedy in wanted]
    done = [done for done, _ in steps]
    assert done == sorted(set(done))
    assert steps[-1][0] == steps[-1][1]


def test_rows_are_filled_up_to_few_lengths_within_what_models_read():
    rows = [(5,) * 490, (6,) * 497]
    for room, length in ((None, 512), (512, 512), (500, 497)):
        filled = module._filled(rows, room)
        assert filled.shape == (2, length)
        assert filled.count_nonzero(dim=1).tolist() == [490, 497]


def test_figures_of_two_models_are_paired(tiny_model_dir, tmp_path):
    tasks = read_tasks(str(write(tmp_path / "own.jsonl", ROWS[:2])))
    found = task_figures(request(tiny_model_dir, tiny_model_dir), tasks, lambda done, of: None)
    assert found["acc"] == found["ref_acc"]
    assert found["acc_drop"] == found["loglikelihood_drop"] == 0
    assert found["acc_p"] == found["same_answer"] == 1
    assert found["tasks"]["own"] == {name: value for name, value in found.items() if name != "tasks"}


def scores(*values):
    return ChoiceScores(np.array(values, dtype=float), np.zeros(len(values)))


def test_answers_are_the_likeliest_choices_by_tokens_and_by_characters():
    item = Item("", [("q", " long answer"), ("q", " no")], 0, [11, 2])
    of = answers([item, item], scores(-8.0, -4.0, -8.0, -0.5))
    assert of.chosen.tolist() == [1, 1]
    assert of.right.tolist() == [0, 0]
    assert of.normed.tolist() == [1, 0]  # -8/11 is more than -4/2, less than -0.5/2
    assert of.loglikelihood.tolist() == [-8, -8]


def test_a_text_to_finish_is_right_where_it_is_written_greedily():
    items = [Item("", [("q", " a")], 0, None)] * 2
    of = answers(items, ChoiceScores(np.array([-1.0, -1.0]), np.array([1.0, 0.0])))
    assert of.right.tolist() == [1, 0]
    assert of.normed is None


WRITTEN = [
    {"prompt": "Once there was", "pattern": "[a-z]+", "answer": "unknown", "stops": ["."], "most": 5},
    {"prompt": "The river runs", "pattern": "(x+)|([A-Za-z]+)", "answer": "unknown", "most": 7},
    {"question": "How many?", "answer": "First.\n#### 1,234"},
]


def test_a_text_is_written_greedily_and_judged_by_its_last_match(tiny_model_dir, tmp_path):
    """Against plain transformers: the answer is made what it wrote, and then something else."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)

    def last(row):
        ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            for _ in range(row["most"]):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        start = len(tokenizer(row["prompt"])["input_ids"])
        text = tokenizer.decode(ids[0, start:], skip_special_tokens=True)
        for stop in row.get("stops", ["\n\n"]):
            text = text.partition(stop)[0]
        return re.findall(r"[A-Za-z]+", text)[-1]

    rows = [{**row, "answer": last(row).upper()} for row in WRITTEN[:2]]
    steps = []
    place = write(tmp_path / "own.jsonl", [*rows, *WRITTEN[:2], ROWS[2]])
    found = task_figures(
        request(tiny_model_dir, tiny_model_dir), read_tasks(str(place)), lambda step, of: steps.append((step, of))
    )
    assert found["acc"] == pytest.approx(2 / 5)
    assert (found["acc_drop"], found["same_answer"]) == (0, 1)
    assert steps[-1][0] == steps[-1][1]
    assert [step for step, _ in steps[-8:]] == list(range(steps[-1][1] - 7, steps[-1][1] + 1))  # four texts each


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("5 and 6 make 11. So $1,234.", True),
        ("#### 1234", True),
        ("1234 or 12", False),
        ("1234 Question: 12", True),
        ("I do not know", False),
        ("-1234", False),
    ],
)
def test_the_last_number_is_the_answer_to_gsm8k(tmp_path, text, right):
    [task] = read_tasks(str(write(tmp_path / "gsm8k.jsonl", WRITTEN[2:])))
    [item] = task.items
    assert item.pairs == [("Question: How many?\nAnswer:", " First.\n#### 1,234")]
    assert item.written.right(text) is right


def test_what_is_not_finite_is_no_answer():
    item = Item("", [("q", " a"), ("q", " b")], 0, [1, 1])
    found = figures([item, item], [scores(0, -1, np.nan, -1), scores(0, -1, 0, -1)])
    assert np.isnan(found["acc"])
    assert np.isnan(found["acc_drop"])
    assert np.isnan(found["acc_p"])
    assert found["ref_acc"] == 1


@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (0, 5), (2, 9), (7, 7)])
def test_mcnemar_is_the_chance_of_a_split_as_uneven(counts):
    lost, won = counts
    before, after = np.array([1.0] * lost + [0.0] * won + [1.0, 0.0]), np.array([0.0] * lost + [1.0] * won + [1.0, 0.0])
    total = lost + won
    chances = [Fraction(comb(total, count), 2**total) for count in range(total + 1)]
    wanted = sum(chance for count, chance in enumerate(chances) if abs(2 * count - total) >= abs(lost - won))
    assert mcnemar(before, after) == pytest.approx(float(wanted), rel=1e-5)


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Exact coverage over all outcomes of 40 items, at shares where the normal interval fails."""
    for share in (0.02, 0.3, 0.9):
        covered = 0.0
        for right in range(41):
            low, high = share_interval(np.array([1.0] * right + [0.0] * (40 - right)))
            covered += comb(40, right) * share**right * (1 - share) ** (40 - right) * (low <= share <= high)
        assert 0.92 < covered < 0.99
    lose, win = 0.06, 0.02
    covered = 0.0
    for lost, won in product(range(15), range(15)):
        before = np.array([1.0] * lost + [0.0] * won + [1.0] * (40 - lost - won))
        low, high = drop_interval(before, np.array([0.0] * lost + [1.0] * won + [1.0] * (40 - lost - won)))
        ways = comb(40, lost) * comb(40 - lost, won)
        chance = ways * lose**lost * win**won * (1 - lose - win) ** (40 - lost - won)
        covered += chance * (low <= lose - win <= high)
    assert 0.93 < covered < 0.995
    assert drop_interval(np.ones(3), np.ones(3))[1] > 0.3  # three equal answers prove little


LAYOUTS = {
    "winogrande": (ROWS[3], "because the cup", " was tilted.", 1, None),
    "hellaswag": (
        {
            "activity_label": "Baking",
            "ctx_a": "A man  stands. [header] He [title] mixes.",
            "ctx_b": "then he",
            "endings": ["eats [step] it", "flies"],
            "label": "1",
        },
        "Baking: A man stands. He. mixes. Then he",
        " eats it",
        1,
        [7, 5],
    ),
    "piqa": (
        {"goal": "open a jar", "sol1": "twist", "sol2": "sing", "label": 0},
        "Question: open a jar\nAnswer:",
        " twist",
        0,
        [5, 4],
    ),
    "mmlu": (
        {"question": "Which? ", "subject": "human_aging", "choices": ["x", "y", "z", "w"], "answer": 2},
        "(with answers) about human aging.\n\nWhich?\nA. x\nB. y\nC. z\nD. w\nAnswer:",
        " A",
        2,
        [1, 1, 1, 1],
    ),
    "arc": (
        {"id": "1", "question": "Why?", "choices": {"text": ["so", "not"], "label": ["1", "2"]}, "answerKey": "2"},
        "Question: Why?\nAnswer:",
        " so",
        1,
        [2, 3],
    ),
    "cloze with its own space": ({"text": "a b ", "target": "c"}, "a b ", "c", 0, None),
    "logged": (
        {
            "doc_id": 3,
            "doc": {"question": "?"},
            "target": "1",
            "arguments": {
                "gen_args_0": {"arg_0": "Q:", "arg_1": " yes"},
                "gen_args_1": {"arg_0": "Q:", "arg_1": " no"},
            },
        },
        "Q:",
        " yes",
        1,
        [3, 2],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_known_by_its_columns(tmp_path, name):
    row, prompt, choice, answer, lengths = LAYOUTS[name]
    [task] = read_tasks(str(write(tmp_path / "some.jsonl", [row])))
    [item] = task.items
    assert task.name == "some"
    assert (item.about + item.pairs[0][0]).endswith(prompt)
    assert item.pairs[0][1] == choice
    assert (item.answer, item.lengths) == (answer, lengths)


def test_tables_and_folders_are_read_and_cut(tmp_path):
    from datasets import Dataset

    rows = [{"goal": f"{number}", "sol1": "a", "sol2": "b", "label": 1} for number in range(5)]
    Dataset.from_list(rows).to_parquet(tmp_path / "one.parquet")
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "two"))
    for name in ("two", "three"):
        write(tmp_path / f"{name}.jsonl", rows)
    (tmp_path / "README.md").write_text("about them")
    found = read_tasks(str(tmp_path), 3)
    assert [task.name for task in found] == ["one", "three", "two", "two.jsonl"]
    assert len({tuple(tuple(item.pairs) for item in task.items) for task in found}) == 1
    assert [len(task.items) for task in found] == [3, 3, 3, 3]


def test_what_comes_with_llmcompress_can_be_answered():
    found = read_tasks("default")
    items = [item for task in found for item in task.items]
    assert len(items) >= 100
    assert all(isinstance(task, Task) for task in found)
    assert len({item.pairs[0] for item in items}) == len(items)
    places = [item.answer / (len(item.pairs) - 1) for item in items if len(item.pairs) > 1]
    assert 0.35 < np.mean(places) < 0.65  # a model that always takes the first or the last choice gains nothing


BAD = {
    "a pattern that is none": ({**WRITTEN[0], "pattern": "("}, "line 1: its pattern cannot be used: missing )"),
    "a pattern that never ends": (
        {**WRITTEN[0], "pattern": "(a|a)*$", "answer": "a" * 40 + "b"},
        "line 1: its pattern cannot be used: regex timed out",
    ),
    "a text that ends all": ({**WRITTEN[0], "stops": [""]}, "line 1: stops.0: string should have at least 1 character"),
    "no number": ({**WRITTEN[2], "answer": "many"}, "line 1: its answer has no number after '####'"),
    "no item": ({"prompt": "a"}, "line 1 is no item of a task: it has prompt"),
    "answer beyond": ({**ROWS[0], "answer": 3}, "line 1: its answer is 3, of 3 choices counted from 0"),
    "answer of another kind": ({**ROWS[0], "answer": "soup"}, "line 1: answer: input should be a valid integer"),
    "one choice": ({**ROWS[0], "choices": ["soup"]}, "line 1: it has fewer than two choices"),
    "no blank": ({**ROWS[3], "sentence": "The cup fell."}, "line 1: its sentence has no blank '_'"),
    "empty prompt": ({"text": " ", "target": "a"}, "line 1 has an empty prompt"),
    "empty choice": ({**ROWS[0], "choices": ["a", ""]}, "line 1 has an empty choice"),
    "generation": (
        {"doc_id": 0, "doc": {}, "target": "a", "arguments": {"gen_args_0": {"arg_0": "Q", "arg_1": {"until": ["."]}}}},
        "line 1: it asks for generated text",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_item_is_refused_with_its_place(tmp_path, name):
    row, words = BAD[name]
    with pytest.raises(CalibrationError) as error:
        read_tasks(str(write(tmp_path / "bad.jsonl", [row])))
    assert words in error.value.message
    assert "\n" not in error.value.message


def test_an_item_longer_than_the_context_is_refused(tiny_model_dir, tmp_path):
    rows = [ROWS[0], {"text": "word " * 5000, "target": "word"}]
    with pytest.raises(CalibrationError, match=r"line 2 has \d+ tokens, the model reads \d+"):
        task_figures(request(tiny_model_dir), read_tasks(str(write(tmp_path / "own.jsonl", rows))), lambda *_: None)


def test_an_item_that_leaves_no_room_to_write_is_refused(tiny_model_dir, tmp_path):
    rows = [{**WRITTEN[0], "most": 60000}]
    with pytest.raises(CalibrationError, match=r"line 1 has \d+ tokens and up to 60000 to write, the model reads \d+"):
        task_figures(request(tiny_model_dir), read_tasks(str(write(tmp_path / "own.jsonl", rows))), lambda *_: None)


def test_the_command_shows_and_judges(main, capsys, tiny_model_dir, tmp_path):
    place = write(tmp_path / "own.jsonl", ROWS[:2])
    given = ["eval", tiny_model_dir, "--ref", tiny_model_dir, "--tasks", place]
    assert main(*given) == 0
    shown = capsys.readouterr()
    assert "own" in shown.out
    assert "as many items right as the original" in shown.err
    assert main(*given, "--items", 1, "--json", "--fail-if", "acc_drop > 0.01") == 0
    assert json.loads(capsys.readouterr().out)["items"] == 1
    assert main(*given, "--fail-if", "acc_drop >= 0") == 3
    assert main("eval", tiny_model_dir, "--tasks", place, "--fail-if", "acc_drop > 0") == 2
    assert "needs the original" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--generate", "a"], ["--text", "b.txt"], ["--backend", "torch"], ["--windows", 3]])
def test_tasks_stand_alone(main, capsys, tiny_model_dir, more):
    assert main("eval", tiny_model_dir, "--tasks", "default", *more) == 2
    assert "--tasks does not go with" in capsys.readouterr().err
