"""depth, width and lora as jobs: stopped cleanly, told to programs, in JUnit, bounded in memory."""

import json
import os
import signal
import xml.etree.ElementTree as ET

import pytest
from every import all_commands

from llmcompress.cli import watching

SHORT = ["--samples", 2, "--length", 16]
NAMES = ("depth", "width", "lora")


@pytest.fixture(scope="module")
def compressed(tiny_model_dir, tmp_path_factory):
    from llmcompress.engine.execute import run
    from llmcompress.engine.plan.make_plan import make_plan
    from llmcompress.engine.plan.run_options import Options
    from llmcompress.recipe import parse

    out = tmp_path_factory.mktemp("structured") / "compressed"
    run(make_plan(parse({"steps": [{"method": "rtn", "bits": 4, "group_size": 64}]}), tiny_model_dir, Options(out=out)))
    return out


@pytest.fixture(params=NAMES)
def command(request, compressed, tiny_model_dir, tmp_path):
    """A command line that writes `tmp_path`/out."""
    more = {
        "depth": [tiny_model_dir, "--drop", 1, "--keep-first", 1],  # one of two: text says which
        "width": [tiny_model_dir, "--ratio", 0.5],
        "lora": [tiny_model_dir, compressed, "--rank", 2],
    }
    return [request.param, *more[request.param], "-o", tmp_path / "out", *SHORT]


def suite(file):
    [case] = ET.parse(file).getroot().iter("testcase")
    return case


def test_they_take_the_options_of_runs():
    wanted = {"--junit", "--log-format", "--deadline", "--max-memory", "--json", "--dry-run", "--calibration"}
    assert all(wanted <= all_commands()[(name,)] for name in NAMES)
    assert wanted - {"--dry-run"} <= all_commands()[("fit",)]


def test_too_little_memory_is_refused_before_anything_is_done(command, main, capsys, tmp_path):
    assert main(*command, "--max-memory", 0.1) == 2
    assert "--max-memory allows 0.10" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(*command, "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["memory_bytes"] > 250_000_000


def test_a_deadline_stops_after_a_step_and_leaves_nothing(command, main, capsys, tmp_path):
    assert main(*command, "--deadline", 0, "--junit", tmp_path / "a.xml") == 75
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "error: stopped at a safe point, 1 of 4 steps done" in shown.err
    assert "the same command begins again" in shown.err
    assert [path.name for path in tmp_path.iterdir()] == ["a.xml"]
    assert suite(tmp_path / "a.xml").find("skipped") is not None
    assert main(*command, "--deadline", 1000, "--junit", tmp_path / "a.xml") == 0
    assert len(suite(tmp_path / "a.xml")) == 0
    assert (tmp_path / "out" / "report.json").is_file()


def test_sigterm_stops_at_the_next_step(command, main, capsys, tmp_path, monkeypatch):
    at = watching.Steps.at

    def terminated(steps, done, of):
        if done == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        at(steps, done, of)

    monkeypatch.setattr(watching.Steps, "at", terminated)
    assert main(*command) == 75
    assert "2 of 4 steps done" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_programs_are_told_each_step(command, main, capsys, tmp_path):
    assert main(*command, "--log-format", "json", "--json") == 0
    shown = capsys.readouterr()
    events = [json.loads(line) for line in shown.err.splitlines()]
    kinds = [event["event"] for event in events]
    assert (kinds[0], kinds[1], kinds[-2], kinds[-1]) == ("started", "planned", "written", "done")
    assert [event["done"] for event in events if event["event"] == "progress"] == [1, 2, 3, 4]
    result = json.loads(shown.out)
    assert result["output"] == str(tmp_path / "out") == events[1]["output"]
    assert events[-2]["bytes"] == result["output_bytes"]


def test_what_is_refused_is_an_error_in_junit(command, main, capsys, tmp_path):
    (tmp_path / "out").mkdir()
    assert main(*command, "--junit", tmp_path / "a.xml") == 2
    assert "already exists" in capsys.readouterr().err
    assert suite(tmp_path / "a.xml").find("error") is not None
