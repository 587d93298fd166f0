"""Scores equal those of lm-evaluation-harness on the same files, to the digit."""

import json

import numpy as np
import pytest
from other_environment import told

from llmcompress.calib.default import shipped
from llmcompress.validate import tasks as module
from llmcompress.validate.request import Request
from llmcompress.validate.session import writer
from llmcompress.validate.task_files import read_tasks
from llmcompress.validate.task_prompts import asked_of
from llmcompress.validate.tasks import task_figures

pytestmark = pytest.mark.interop

TEXT = [line for line in (shipped("eval_data") / "prose_story_mezzanine.txt").read_text().split("\n") if len(line) > 60]
OWN = {
    "questions": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "cloze": """
output_type: loglikelihood
doc_to_text: "{{text}}"
doc_to_target: " {{target}}"
metric_list: [{metric: acc}]
""",
}
SHOTS = """
fewshot_split: train
fewshot_config: {sampler: first_n}
"""
GSM8K = "include: lm_eval/tasks/gsm8k/gsm8k.yaml\ntag: null\n"
THEIRS = {
    "arc": "arc/arc_easy.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "mmlu": "mmlu/default/mmlu_abstract_algebra.yaml",
}


def rows(first=0):
    """Items by task: ours, and in the columns of published data sets, cut from a story with other ends.

    first: the number of the first one of those that are not ours.
    """
    tasks = shipped("eval_data") / "tasks"
    found = {name: [json.loads(line) for line in (tasks / f"{name}.jsonl").read_text().splitlines()] for name in OWN}
    # a target that begins with a space needs none between
    found["cloze"] = [row for row in found["cloze"] if not row["text"][-1].isspace()]
    found |= {name: [] for name in THEIRS}
    found["gsm8k"] = [
        {"question": f"{number} + 4 = 7, 12 12 12 12 12 12", "answer": f"So it is.\n#### {number % 3}"}
        for number in range(first, first + 9)
    ]
    for number in range(first, first + 24):
        words = TEXT[number % len(TEXT)].split(" ")
        start, end = " ".join(words[:6]), " ".join(words[6:12])
        other = [" ".join(TEXT[(number + step) % len(TEXT)].split(" ")[4 : 8 + step]) for step in (1, 2, 3)]
        ends, label = [*other[: number % 4], end, *other[number % 4 :]], number % 4
        letters = ["A", "B", "C", "D"] if number % 2 else ["1", "2", "3", "4"]
        choices = {"text": ends, "label": letters}
        found["arc"].append({"question": start, "choices": choices, "answerKey": letters[label]})
        found["hellaswag"].append(
            {
                "activity_label": "Story",
                "ctx_a": f"{start} [header] and so.",
                "ctx_b": "then [title]  on",
                "endings": [f"{text} [step]  again" for text in ends],
                "label": str(label),
            }
        )
        found["piqa"].append({"goal": start, "sol1": ends[0], "sol2": ends[1], "label": number % 2})
        blank = {"sentence": f"{start} _ and {end}.", "option1": "door", "option2": "lamp"}
        found["winogrande"].append(blank | {"answer": str(1 + number % 2)})
        found["mmlu"].append({"question": f"{start} ", "subject": "abstract_algebra", "choices": ends, "answer": label})
    return found


@pytest.fixture(scope="module", params=[(False, 0), (False, 3), (True, 2)], ids=str)
def scored(request, tiny_model_dir, tmp_path_factory):
    """What lm-evaluation-harness finds, by task; the folder of the items, and that of its samples; chat and shots."""
    chat, shots = request.param
    place = tmp_path_factory.mktemp("lm_eval")
    items, tasks, samples = place / "items", place / "tasks", place / "samples"
    for folder in (items, tasks, samples):
        folder.mkdir()
    # the space of a target that is no choice is its own, beside that between question and answer of an example
    delimiter = 'target_delimiter: ""'
    own = dict(OWN)
    own["cloze"] = OWN["cloze"].replace('" {{target}}"', '"{{target}}"') if chat else f"{OWN['cloze']}{delimiter}\n"
    examples = rows(12)  # half of the items are among them
    for name, lines in rows().items():
        for file, written in ((f"{name}.jsonl", lines), (f"{name}.shots.jsonl", examples[name])):
            (items / file).write_text("".join(json.dumps(row) + "\n" for row in written))
        of_split = {"train": ".shots", "dev": ".shots", "validation": "", "test": ""}
        splits = ", ".join(f"{split}: {items / name}{end}.jsonl" for split, end in of_split.items())
        data = f"dataset_path: json\ndataset_name: null\ndataset_kwargs: {{data_files: {{{splits}}}}}\n"
        known = {"gsm8k": GSM8K, **{name: f"test_split: test\n{task}{SHOTS}" for name, task in own.items()}}
        task = known.get(name) or f"include: lm_eval/tasks/{THEIRS[name]}\ntag: null\n"
        (tasks / f"{name}.yaml").write_text(f"{task}task: {name}\n{data}num_fewshot: {shots}\n")
    options = json.dumps({"apply_chat_template": chat, "fewshot_as_multiturn": False})
    return told("lm_eval", place, [tiny_model_dir, tasks, samples, options]), items, samples, chat, shots


def ours(model, items, monkeypatch, chat, shots):
    """Our figures and log-likelihoods of a file of items."""
    kept = []
    monkeypatch.setattr(
        module, "figures", lambda items, scores, make=module.figures: kept.append(scores) or make(items, scores)
    )
    found = task_figures(
        Request(model, None, "default", 2, None, 3, "cpu", None),
        read_tasks(str(items), shots=shots),
        lambda *_: None,
        chat,
    )
    return found, kept[0][0].loglikelihood


@pytest.mark.parametrize("name", [*OWN, *THEIRS])
@pytest.mark.parametrize("source", ["items", "samples"])
def test_scores_are_equal(scored, tiny_model_dir, monkeypatch, name, source):
    theirs, items, samples, chat, shots = scored
    file = items / f"{name}.jsonl" if source == "items" else next(samples.rglob(f"samples_{name}_*.jsonl"))
    around = (chat, shots) if source == "items" else (False, 0)  # samples have it
    found, likely = ours(tiny_model_dir, file, monkeypatch, *around)
    wanted = [value for row in theirs[name]["loglikelihood"] for value in row]
    np.testing.assert_allclose(likely, wanted, rtol=1e-4)
    scores = theirs[name]["scores"]
    assert found["acc"] == pytest.approx(scores["acc,none"], abs=1e-6)
    if "acc_norm,none" in scores:
        assert found["acc_norm"] == pytest.approx(scores["acc_norm,none"], abs=1e-6)


def test_texts_and_the_numbers_in_them_are_equal(scored, tiny_model_dir):
    theirs, items, _, chat, shots = scored
    request = Request(tiny_model_dir, None, "default", 2, None, 3, "cpu", None)
    [task] = read_tasks(str(items / "gsm8k.jsonl"), shots=shots)
    write, (_, prompts) = writer(request, tiny_model_dir), asked_of(request, task.items, chat)
    for item, ids, wanted in zip(task.items, prompts.values(), theirs["gsm8k"]["texts"], strict=True):
        text = write(ids, item.written.most, item.written.stops)
        for stop in item.written.stops:
            text = text.partition(stop)[0]
        assert text == wanted
    found = task_figures(request, [task], lambda *_: None, chat)["acc"]
    assert found == pytest.approx(theirs["gsm8k"]["scores"]["exact_match,flexible-extract"], abs=1e-6)
    assert chat or shots or 0 < found < 1
