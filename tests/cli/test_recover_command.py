"""`recover` as a job: planned, told to programs, stopped cleanly, refused with one line."""

import json

import pytest

from trainingstops import goes_on_to_the_same_bytes

SHORT = ["--samples", 32, "--length", 16, "--steps", 3]


@pytest.fixture(scope="module")
def compressed(shallow_model_dir, tmp_path_factory):
    from llmcompress.engine.execute import run
    from llmcompress.engine.plan.make_plan import make_plan
    from llmcompress.engine.plan.run_options import Options
    from llmcompress.recipe import parse

    out, steps = tmp_path_factory.mktemp("recover") / "compressed", [{"method": "rtn", "bits": 3, "group_size": 64}]
    run(make_plan(parse({"steps": steps}), shallow_model_dir, Options(out=out)))
    return out


@pytest.fixture
def command(compressed, shallow_model_dir, tmp_path):
    return ["recover", compressed, "--ref", shallow_model_dir, "-o", tmp_path / "out", *SHORT]


def test_it_tells_what_it_will_do_and_what_it_did(command, main, capsys, tmp_path):
    assert main(*command, "--dry-run", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["memory_bytes"] > 250_000_000
    assert (facts["steps"], facts["passes"]) == (3, 2.5)
    assert not list(tmp_path.iterdir())
    assert main(*command) == 0
    shown = capsys.readouterr()
    assert "KL on text held back 0." in shown.err
    assert " (calibration)" in shown.err
    assert f"next: llmcompress eval {tmp_path / 'out'} --ref" in shown.err
    assert "Recovery" in (tmp_path / "out" / "README.md").read_text()
    written = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert written >= facts["output_bytes"] > written - 20_000  # and the header


def test_programs_are_told_each_step(command, main, capsys):
    assert main(*command, "--log-format", "json", "--json") == 0
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [event["done"] for event in events if event["event"] == "progress"] == [1, 2, 3, 4, 5]


def test_a_deadline_stops_after_a_step_and_the_same_command_goes_on(command, main, capsys, tmp_path):
    goes_on_to_the_same_bytes(command, main, capsys, tmp_path)


def test_work_of_another_run_or_damaged_work_is_not_gone_on_with(command, main, capsys, tmp_path):
    assert main(*command[:-1], 2, "--deadline", 0) == 75
    assert main(*command) == 2
    assert "out.work holds another run: recover.steps was 2, now 3" in capsys.readouterr().err
    assert main(*command, "--restart", "--deadline", 0) == 75
    for _ in range(2):
        assert main(*command, "--deadline", 0) == 75
    file = tmp_path / "out.work" / "training.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert main(*command) == 1
    assert "start afresh with --restart" in capsys.readouterr().err
    assert main(*command, "--restart") == 0


def test_too_little_memory_is_refused_before_anything_is_done(command, main, capsys, tmp_path):
    assert main(*command, "--max-memory", 0.1) == 2
    assert "--max-memory allows 0.10" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_no_run_wrote_is_refused(shallow_model_dir, main, capsys, tmp_path):
    assert main("recover", shallow_model_dir, "--ref", shallow_model_dir, "-o", tmp_path / "out") == 2
    assert "has no report.json" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main("recover", tmp_path / "empty", "--ref", shallow_model_dir, "-o", tmp_path / "out") == 2
    assert "config.json" in capsys.readouterr().err
