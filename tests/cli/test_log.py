"""`--log-format json`: every line on stderr is an event, the first is `started`, the last says how it ended."""

import json
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from llmcompress.cli.log import log

CI = Path(__file__).parents[2] / "docs" / "ci.md"
SHORT = ["--bits", 4, "--group-size", 64, "--samples", 2, "--length", 16]


@pytest.fixture
def events(main, capsys):
    """events(*arguments): the exit code and all events of a command."""

    def run(*arguments):
        capsys.readouterr()  # what making a model printed
        code = main(*arguments, "--log-format", "json")
        return code, [json.loads(line) for line in capsys.readouterr().err.splitlines()]

    return run


def test_a_run_as_events(events, tiny_model_dir, tmp_path):
    code, found = events("gptq", tiny_model_dir, "-o", tmp_path / "out", *SHORT, "--strict", "damping")
    assert code == 0
    counts = Counter(event["event"] for event in found)
    assert counts["layer"] == 4
    assert counts["matrix"] == 28
    assert counts["stage"] == 16  # of a layer: q, k, v; o; gate, up; down
    for once in ("started", "planned", "running", "writing", "written", "gate", "done"):
        assert counts[once] == 1, once
    assert (found[0]["event"], found[0]["command"]) == ("started", "gptq")
    assert found[-1] == {"event": "done", "elapsed": found[-1]["elapsed"], "exit_code": 0}
    elapsed = [event["elapsed"] for event in found]
    assert elapsed == sorted(elapsed)
    planned = next(event for event in found if event["event"] == "planned")
    assert (planned["layers"], planned["matrices"]) == (4, 28)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    told = [event for event in found if event["event"] == "matrix"]
    assert [event["name"] for event in told] == [record["name"] for record in report["linears"]]
    assert [event["loss"] for event in told] == [record["loss"] for record in report["linears"]]
    assert [event["layer"] for event in found if event["event"] == "layer"] == [0, 1, 2, 3]
    for event in found:
        assert event["event"] == "matrix" or event.keys() - {"event", "elapsed"} <= documented()[event["event"]]


def documented():
    """The fields of each event, and what else its row of the table in docs/ci.md names."""
    table = CI.read_text().split("## stderr: events")[1].split("\n\n`-q`")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {name: set(re.findall(r"`(\w+)`", fields)) for names, _, fields in rows
            for name in re.findall(r"`(\w+)`", names)}  # fmt: skip


def test_decisions_gates_and_failures_are_events(events, random_model_dir, tmp_path):
    command = ["rtn", random_model_dir("llama"), "-o", tmp_path / "out"]
    code, found = events(*command, "--format", "dense", "--strict", "group_size")
    assert code == 3
    ledger = [event for event in found if event["event"] == "ledger"]
    assert "group_size" in {event["kind"] for event in ledger}
    gate = next(event for event in found if event["event"] == "gate")
    assert (gate["passed"], gate["bound"]) == (False, 0)
    assert (found[-1]["event"], found[-1]["exit_code"]) == ("failed", 3)
    assert events(*command, "--format", "dense")[0] == 0
    code, found = events(*command, "--format", "dense")
    assert code == 2
    assert [event["event"] for event in found] == ["started", "failed"]
    assert "already exists" in found[-1]["message"]


def test_a_run_that_stops_and_goes_on(events, random_model_dir, tmp_path):
    command = ["rtn", random_model_dir("llama"), "-o", tmp_path / "out", "--bits", 8, "--group-size", 32]
    code, found = events(*command, "--deadline", 0)
    assert code == 75
    assert (found[-1]["event"], found[-1]["exit_code"]) == ("stopped", 75)
    assert "run the same command again" in found[-1]["hint"]
    code, found = events(*command)
    assert code == 0
    assert next(event for event in found if event["event"] == "running")["finished_layers"] == 1


def test_eval_tells_its_progress_and_figures(events, tiny_model_dir):
    code, found = events("eval", tiny_model_dir, "--length", 16, "--windows", 2, "--fail-if", "perplexity < 1")
    assert code == 0
    steps = [event for event in found if event["event"] == "progress"]
    assert [event["done"] for event in steps] == [1, 2, 3, 4, 5]
    figures = next(event for event in found if event["event"] == "figures")
    gate = next(event for event in found if event["event"] == "gate")
    assert gate["measured"] == figures["perplexity"]


def test_quiet_leaves_progress_out(events, tiny_model_dir, tmp_path):
    _, found = events("rtn", tiny_model_dir, "-o", tmp_path / "out", "--group-size", 64, "-q")
    assert [event["event"] for event in found] == ["started", "planned", "written", "done"]
    _, whole = events("rtn", tiny_model_dir, "-o", tmp_path / "loud", "--group-size", 64,
                      "--set", "o_proj: {skip: true}")  # fmt: skip
    left_out = {event["event"] for event in whole} - {"started", "planned", "written", "done"}
    said = re.search(r"^`-q` leaves out (.*)\.$", CI.read_text(), flags=re.MULTILINE)[1]
    assert {*left_out, "progress"} == set(re.findall(r"`(\w+)`", said))


@pytest.mark.parametrize("option", [["--log-format", "json"], ["--log-format=json"]])
def test_a_command_line_that_is_not_understood_is_an_event(main, capsys, option):
    assert main("gptq", "model", "--no-such-option", *option) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert json.loads(line)["event"] == "failed"


def test_an_environment_variable_asks_for_events_once_for_all(tiny_model_dir, tmp_path):
    command = [sys.executable, "-m", "llmcompress", "rtn", tiny_model_dir, "-o", tmp_path / "out", "--group-size", "64"]
    environment = {**os.environ, "LLMCOMPRESS_LOG_FORMAT": "json"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found = [json.loads(line) for line in done.stderr.splitlines()]
    assert (found[0]["event"], found[-1]["event"]) == ("started", "done")
    assert done.stdout == ""


def test_whatever_is_printed_is_an_event(capsys):
    log.open()
    try:
        print("half a ", end="", file=sys.stderr)
        print("line\nand another", file=sys.stderr)
        logging.StreamHandler().handle(logging.makeLogRecord({"msg": "take care"}))
        log.event("figures", value=float("inf"))
        print("the rest", end="", file=sys.stderr)
    finally:
        log.close()
    print("as ever", file=sys.stderr)
    *lines, last = capsys.readouterr().err.splitlines()
    assert last == "as ever"
    found = [json.loads(line) for line in lines]
    assert [event["text"] for event in found if event["event"] == "message"][:2] == ["half a line", "and another"]
    assert any("take care" in event.get("text", "") for event in found)
    assert found[-1]["text"] == "the rest"
    assert next(event for event in found if event["event"] == "figures")["value"] is None


def test_a_bug_is_an_event_and_on_request_a_traceback(main, capsys, monkeypatch, tiny_model_dir):
    def broken(*_):
        raise ZeroDivisionError("by a bug")

    monkeypatch.setattr("llmcompress.engine.plan.make_plan.make_plan", broken)
    assert main("rtn", tiny_model_dir, "--log-format", "json") == 1
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    last = json.loads(shown.splitlines()[-1])
    assert (last["event"], last["exit_code"], last["message"]) == ("failed", 1, "ZeroDivisionError: by a bug")
    monkeypatch.setenv("LLMCOMPRESS_TRACEBACK", "1")
    assert main("rtn", tiny_model_dir, "--log-format", "json") == 1
    assert "Traceback" in capsys.readouterr().err
