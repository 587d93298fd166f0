"""Which examples stand before an item, and what they look like."""

import json
from collections import Counter

import pytest

from llmcompress.errors import CalibrationError
from llmcompress.validate.task_files import read_tasks


def put(place, name, rows):
    (place / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(place / name)


def questions(count, start=0):
    return [{"question": f"Q{n}", "choices": ["x", f"a{n}"], "answer": 1} for n in range(start, start + count)]


def piqa(count):
    return [{"goal": f"g{n}", "sol1": f"s{n}", "sol2": "t", "label": 0} for n in range(count)]


def mmlu(subject, count):
    return [{"question": f"{subject}{n}", "subject": subject, "choices": ["x", "y"], "answer": 0} for n in range(count)]


def test_the_first_examples_stand_before_each_item(tmp_path):
    put(tmp_path, "own.shots.jsonl", questions(5))
    place = put(tmp_path, "own.jsonl", questions(2, start=9))
    [task] = read_tasks(place, shots=2)
    assert [item.shots for item in task.items] == ["Q0 a0\n\nQ1 a1\n\n"] * 2
    assert [item.pairs[0] for item in task.items] == [("Q9", " x"), ("Q10", " x")]
    assert {item.shots for item in read_tasks(place)[0].items} == {""}


def test_examples_are_about_the_subject_of_the_item(tmp_path):
    put(tmp_path, "all.shots.jsonl", [*mmlu("law", 3), *mmlu("art", 2)])
    [task] = read_tasks(put(tmp_path, "all.jsonl", [*mmlu("art", 1), *mmlu("law", 1)]), shots=2)
    wanted = [f"{name}{{}}\nA. x\nB. y\nAnswer: A\n\n" for name in ("art", "law")]
    assert [item.shots for item in task.items] == [text.format(0) + text.format(1) for text in wanted]


def test_drawn_examples_are_spread_and_never_the_item_itself(tmp_path):
    """Against chance: each of ten is drawn as often, but for its own item."""
    rows = piqa(10)
    put(tmp_path, "piqa.shots.jsonl", rows)
    [task] = read_tasks(put(tmp_path, "piqa.jsonl", rows * 60), shots=3)
    counts = Counter()
    for item in task.items:
        shown = item.shots.split("\n\n")[:-1]
        own = item.pairs[0][0] + item.pairs[0][1]
        assert len(set(shown)) == 3
        assert own not in shown
        counts.update(shown)
    assert len(counts) == 10
    assert all(120 < count < 240 for count in counts.values())  # 180, give or take 11


def test_rows_that_repeat_the_item_are_all_left_out(tmp_path):
    put(tmp_path, "piqa.shots.jsonl", [*piqa(1) * 4, *piqa(3)[1:]])
    [task] = read_tasks(put(tmp_path, "piqa.jsonl", piqa(1) * 50), shots=2)
    assert {frozenset(item.shots.split("\n\n")[:-1]) for item in task.items} == {
        frozenset(f"Question: g{n}\nAnswer: s{n}" for n in (1, 2))
    }


def test_examples_are_no_task_of_a_folder_and_need_not_be_of_its_kind_of_file(tmp_path):
    from datasets import Dataset

    Dataset.from_list(questions(3)).to_parquet(tmp_path / "one.shots.parquet")
    Dataset.from_list(questions(3)).save_to_disk(str(tmp_path / "two.shots"))
    put(tmp_path, "one.jsonl", questions(1, start=9))
    Dataset.from_list(questions(1, start=9)).save_to_disk(str(tmp_path / "two"))
    found = read_tasks(str(tmp_path), shots=1)
    assert [task.name for task in found] == ["one", "two"]
    assert [task.items[0].shots for task in found] == ["Q0 a0\n\n"] * 2


def test_the_shipped_tasks_have_five_examples_that_are_no_items():
    for task in read_tasks("default", shots=5):
        for item in task.items:
            assert item.pairs[0][0] not in item.shots
            assert item.shots == task.items[0].shots != ""


def test_missing_and_too_few_examples_are_refused(tmp_path):
    place = put(tmp_path, "piqa.jsonl", piqa(2))
    with pytest.raises(CalibrationError, match=r"piqa\.jsonl has no examples, which --shots takes"):
        read_tasks(place, shots=1)
    put(tmp_path, "piqa.shots.jsonl", piqa(2))
    with pytest.raises(CalibrationError, match=r"has 2 examples for .* line 1, --shots 2 takes 3"):
        read_tasks(place, shots=2)
    sample = {"doc_id": 0, "doc": {}, "target": "a", "arguments": {"gen_args_0": {"arg_0": "Q:", "arg_1": " a"}}}
    with pytest.raises(CalibrationError, match="takes no examples"):
        read_tasks(put(tmp_path, "piqa.jsonl", [sample]), shots=1)


def test_the_command_shows_examples_to_the_model(main, capsys, tiny_model_dir, tmp_path):
    put(tmp_path, "own.shots.jsonl", questions(3))
    given = ["eval", tiny_model_dir, "--tasks", put(tmp_path, "own.jsonl", questions(4, start=5)), "--json"]
    found = []
    for more in ([], ["--shots", 3], ["--shots", 3, "--chat"]):
        assert main(*given, *more) == 0
        found.append(json.loads(capsys.readouterr().out)["loglikelihood"])
    assert len(set(found)) == 3
    assert main("eval", tiny_model_dir, "--shots", 1) == 2
    assert "--shots is for the questions of --tasks" in capsys.readouterr().err
