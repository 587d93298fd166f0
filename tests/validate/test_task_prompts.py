"""What models read of items, against the tokenizer's own template and encoding."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from llmcompress.errors import CalibrationError, CheckpointError
from llmcompress.validate.request import Request
from llmcompress.validate.task_files import read_tasks
from llmcompress.validate.task_prompts import asked_of, tokenizer_of

ROWS = [
    {"question": "A spoon is for ", "choices": ["soup", " nails"], "answer": 0},
    {"question": "Which?", "subject": "human_aging", "choices": ["x", "y"], "answer": 1},
    {"sentence": "He saw _ there.", "option1": "a cup", "option2": "a shelf", "answer": "2"},
    {"prompt": "Count:", "pattern": "[a-z]+", "answer": "one", "most": 5},
]
LETTERS = "Which?\nA. x\nB. y\nAnswer:"
ABOUT = "The following are multiple choice questions (with answers) about human aging.\n\n"
READ = [
    ("", "A spoon is for ", "soup"),
    ("", "A spoon is for ", " nails"),
    (ABOUT, LETTERS, "A"),
    (ABOUT, LETTERS, "B"),
    ("", "He saw a cup", "there."),
    ("", "He saw a shelf", "there."),
    ("", "Count:", "one"),
]


def items_of(place, rows=ROWS):
    file = place / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [task] = read_tasks(str(file))
    return task.items


def request(model):
    return Request(Path(model), None, "default", 2, None, 4, "cpu", None)


@pytest.fixture
def model_with(tiny_model_dir, tmp_path):
    """A copy of the model with another chat template, or none."""

    def made(template):
        place = shutil.copytree(tiny_model_dir, tmp_path / "model")
        (place / "chat_template.jinja").unlink()
        if template is not None:
            (place / "chat_template.jinja").write_text(template)
        return place

    return made


SAYS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + SAYS


@pytest.mark.parametrize("template", [None, SAYS, "{{ bos_token }}" + NO_SYSTEM])
def test_a_chat_is_what_the_template_makes_of_it(tiny_model_dir, model_with, tmp_path, template):
    model = tiny_model_dir if template is None else model_with(template)
    tokenizer = AutoTokenizer.from_pretrained(model)
    wanted = []
    for about, prompt, choice in READ:
        messages = [{"role": "user", "content": prompt}]
        if about and template != "{{ bos_token }}" + NO_SYSTEM:
            messages.insert(0, {"role": "system", "content": about})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        opened = "" if text.startswith("<s>") else "<s>"
        ids = [tokenizer(opened + part, add_special_tokens=False)["input_ids"] for part in (text + choice, text)]
        wanted.append((tuple(ids[0]), len(tokenizer(opened + text.rstrip(), add_special_tokens=False)["input_ids"])))
    asked, written = asked_of(request(model), items_of(tmp_path), chat=True)
    assert [tuple(one) for of_item in asked for one in of_item] == wanted
    assert written == {3: ids[1]}


def test_without_chat_the_text_is_read_as_it_stands(tiny_model_dir, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    asked, written = asked_of(request(tiny_model_dir), items_of(tmp_path), chat=False)
    texts = [about + prompt + " " * bool(choice) + choice for about, prompt, choice in READ]
    assert [list(one.ids) for of_item in asked for one in of_item] == [tokenizer(text)["input_ids"] for text in texts]
    assert written == {3: tokenizer("Count:")["input_ids"]}


def test_a_model_without_a_template_is_refused_before_items_are_read(main, capsys, model_with, tmp_path):
    model = model_with(None)
    with pytest.raises(CheckpointError, match="has no chat template, which --chat takes"):
        tokenizer_of(request(model), chat=True)
    assert main("eval", model, "--tasks", tmp_path / "nowhere", "--chat") == 2
    assert "has no chat template" in capsys.readouterr().err


def test_a_template_that_never_ends_is_ended(model_with, tmp_path):
    model = model_with("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    with pytest.raises(CalibrationError, match=r"own.jsonl line 1: it takes too long"):
        asked_of(request(model), items_of(tmp_path), chat=True)


def test_what_another_program_read_takes_no_template(tiny_model_dir, tmp_path):
    arguments = {"gen_args_0": {"arg_0": "Q:", "arg_1": " yes"}}
    row = {"doc_id": 0, "doc": {}, "target": "yes", "arguments": arguments}
    with pytest.raises(CalibrationError, match=r"line 1 is what another program had models read"):
        asked_of(request(tiny_model_dir), items_of(tmp_path, [row]), chat=True)


def test_the_command_asks_in_a_chat(main, capsys, tiny_model_dir, tmp_path):
    items_of(tmp_path)
    given = ["eval", tiny_model_dir, "--tasks", tmp_path / "own.jsonl", "--json"]
    found = []
    for more in ([], ["--chat"]):
        assert main(*given, *more) == 0
        found.append(json.loads(capsys.readouterr().out)["loglikelihood"])
    assert found[0] != found[1]
    assert main("eval", tiny_model_dir, "--chat") == 2
    assert "--chat is for the questions of --tasks" in capsys.readouterr().err
