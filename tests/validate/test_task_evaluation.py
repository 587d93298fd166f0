"""What is saved of tasks: by its schema, from Python as from the command line."""

import json
from hashlib import sha256

import pytest
from jsonschema import Draft202012Validator

import llmcompress
from llmcompress.errors import GateError, PlanError, RecipeError
from llmcompress.report.schemas import schema_text

ROWS = {
    "questions": [{"question": f"The {word} is", "choices": ["one", "two"], "answer": 0} for word in ("sea", "sky")],
    "cloze": [{"text": "One, two, three,", "target": "four"}],
}


@pytest.fixture
def items(tmp_path):
    place = tmp_path / "items"
    place.mkdir()
    for name, rows in ROWS.items():
        for file in (f"{name}.jsonl", f"{name}.shots.jsonl"):
            (place / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def test_the_command_saves_what_python_finds(main, capsys, tiny_model_dir, items, tmp_path):
    file = tmp_path / "tasks.json"
    given = ["eval", tiny_model_dir, "--ref", tiny_model_dir, "--tasks", items, "-o", file, "--json"]
    assert main(*given, "--shots", 1, "--chat") == 0
    printed, saved = json.loads(capsys.readouterr().out), json.loads(file.read_text())
    Draft202012Validator(json.loads(schema_text("tasks"))).validate(saved)
    assert printed == {**saved["figures"], "tasks": saved["tasks"]}
    assert saved["asked"] | {"items_sha256": ""} == {"name": "items", "items_sha256": "", "shots": 1, "chat": True}
    result = llmcompress.evaluate_tasks(tiny_model_dir, tiny_model_dir, items, shots=1, chat=True, device="cpu")
    assert result.document == saved
    assert main(*given) == 2
    assert "exists" in capsys.readouterr().err
    assert main(*given, "--overwrite") == 0
    assert json.loads(file.read_text())["asked"]["shots"] == 0


def test_a_model_alone_has_figures_without_comparison(tiny_model_dir, items, tmp_path):
    result = llmcompress.evaluate_tasks(tiny_model_dir, tasks=items / "questions.jsonl")
    result.save(tmp_path / "a.json")
    saved = json.loads((tmp_path / "a.json").read_text())
    Draft202012Validator(json.loads(schema_text("tasks"))).validate(saved)
    assert saved["reference"] is None
    assert list(saved["tasks"]) == ["questions"]
    with pytest.raises(PlanError):
        result.save(tmp_path / "a.json")
    result.fail_if("acc < 0", "acc_norm < 0")
    with pytest.raises(GateError, match="items is 2"):
        result.fail_if("items > 1")
    with pytest.raises(RecipeError, match="needs the original"):
        result.fail_if("acc_drop > 0")


def test_items_are_known_by_what_is_asked_and_not_by_where_it_is(tiny_model_dir, items, tmp_path):
    def digest(**options):
        return llmcompress.evaluate_tasks(tiny_model_dir, tasks=items, **options).document["asked"]["items_sha256"]

    first = digest()
    assert digest(items=1) != first
    assert digest(shots=1) != first
    items.rename(tmp_path / "elsewhere")
    items = tmp_path / "elsewhere"
    assert digest() == first


def test_the_model_is_known_by_its_report(tiny_model_dir, items, tmp_path):
    model = tmp_path / "model"
    llmcompress.compress(tiny_model_dir, "rtn-w8", model)
    document = llmcompress.evaluate_tasks(model, tasks=items).document
    assert document["model"] == {
        "name": "model",
        "report_sha256": sha256((model / "report.json").read_bytes()).hexdigest(),
    }
