"""The exit codes of docs/ci.md, each of them met in a process of its own."""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forkserver import call
from llmcompress import errors
from llmcompress.cli.app import parser

DOCS = Path(__file__).parents[2] / "docs" / "ci.md"
COMMAND = [sys.executable, "-m", "llmcompress"]
SHORT = ["--bits", "4", "--group-size", "64", "--samples", "2", "--length", "16"]


def test_the_documented_codes_are_those_of_the_program():
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", DOCS.read_text(), flags=re.MULTILINE)}
    ours = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert documented == ours | {130}


def test_0_done():
    assert call("list", "methods").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gptq", "missing/"], "missing"),
        (["gptq", "missing/", "--bits", "seven"], "invalid value for '--bits'"),
        (["gptq", "--no-such-option"], "no such option: --no-such-option"),
        (["compress"], "no such command 'compress'"),
        (["gptq"], "missing argument 'model'"),
    ],
)
def test_2_refused_in_one_line(arguments, words):
    done = call(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    first, *rest = done.stderr.splitlines()
    assert first.startswith("error: ")
    assert words in first
    assert all(line.startswith("  hint: ") for line in rest)


def test_2_for_a_name_alone_shows_its_help():
    done = call("plan")
    assert done.returncode == 2
    assert "Usage" in done.stdout
    assert done.stderr == ""


def test_1_failed_then_75_stopped_then_0(random_model_dir, tmp_path):
    """A disk that is full in the middle, a deadline, then enough of both: the same command each time."""
    command = ["rtn", random_model_dir("llama"), "-o", tmp_path / "out", "--bits", "8", "--group-size", "32"]
    limits = (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    done = subprocess.run(
        [*COMMAND, *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits),
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot be written" in done.stderr
    assert "File too large" in done.stderr
    assert call(*command, "--deadline", "0").returncode == 75
    assert call(*command).returncode == 0


def test_3_a_gate_failed(random_model_dir, tmp_path):
    out = tmp_path / "out"
    arguments = ["--bits", "8", "--group-size", "32", "--set", "o_proj: {skip: true}", "--strict", "unquantised"]
    done = call("rtn", random_model_dir("llama"), "-o", out, *arguments)
    assert done.returncode == 3
    assert not out.exists()


def test_130_interrupted_and_the_same_command_goes_on(tiny_model_dir, tmp_path):
    command = ["gptq", tiny_model_dir, "-o", tmp_path / "out", *SHORT]
    process = subprocess.Popen([*COMMAND, *map(str, command)], stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("out.work/section-*.safetensors")):
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode in (0, 130), said  # 0 only if all was done by then
    if process.returncode == 130:
        assert "error: interrupted" in said
        assert "Traceback" not in said
        assert call(*command).returncode == 0


def test_a_terminal_without_letters_gets_escapes(random_model_dir, tmp_path):
    model = tmp_path / "t\xebst"
    shutil.copytree(random_model_dir("llama"), model)
    plain = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [*COMMAND, "inspect", model]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=plain)
    assert done.returncode == 0, done.stderr
    assert "t\\xebst" in done.stdout


def test_a_reader_that_has_gone_ends_a_command_quietly():
    script = f"{' '.join(COMMAND)} list types --json | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


NUMBERS_CHECKED_LATER = {"--bpw", "--kl", "--shard-size", "--split-max-size"}  # by what reads sizes and budgets


def numeric_options():
    """Every numeric option of a command that no recipe holds: (command, option, lowest, highest)."""
    from every import all_commands

    from test_recipe import options_of_recipes

    recipes = {name for _, name, _ in options_of_recipes()} | {"bits", "kv_bits"}  # these two are one of some numbers
    commands = all_commands()
    whole = parser()
    for words in commands:
        command = whole
        for word in words:
            command = command.commands[word]
        for option in command.params:
            kind = getattr(getattr(option, "type_descriptor", None), "annotation", None)
            bounded = getattr(option, "max", None) is not None and option.min is not None
            if kind in (int, float) and not bounded and option.name not in recipes:
                yield " ".join(words), option.opts[0]


def test_every_number_of_a_command_is_bounded_on_both_sides():
    assert {option for _, option in numeric_options()} <= NUMBERS_CHECKED_LATER


@pytest.mark.parametrize("value", ["1e300", "nan", "inf", "-1"])
@pytest.mark.parametrize(
    "words", [["fit", "M", "-o", "x", "--bpw"], ["fit", "M", "-o", "x", "--kl"], ["rtn", "M", "--shard-size"],
              ["gguf", "M", "--split-max-size"], ["rtn", "M", "--tp"], ["rtn", "M", "--deadline"]],
)  # fmt: skip
def test_absurd_numbers_are_refused(words, value, main, tiny_model_dir, capsys):
    assert main(*(tiny_model_dir if word == "M" else word for word in words), value) == 2
    assert capsys.readouterr().err.count("error: ") == 1


class PanicException(BaseException):
    pass


@pytest.mark.parametrize(
    "error", [PanicException("index out of bounds"), ValueError("a\nb"), KeyError("x"), AssertionError()]
)
def test_what_nobody_foresaw_is_one_line(error, main, monkeypatch, capsys):
    monkeypatch.setattr("llmcompress.cli.app._refuse_no_place", lambda: (_ for _ in ()).throw(error))
    assert main("list", "methods") == 1
    said = capsys.readouterr().err
    assert [line[:7] for line in said.splitlines()] == ["error: ", "  hint:"]
    assert type(error).__name__ in said
    monkeypatch.setenv("LLMCOMPRESS_TRACEBACK", "1")
    assert main("list", "methods") == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize("error", [SystemExit(7), GeneratorExit()])
def test_what_ends_a_process_on_purpose_does(error, main, monkeypatch):
    monkeypatch.setattr("llmcompress.cli.app._refuse_no_place", lambda: (_ for _ in ()).throw(error))
    if isinstance(error, SystemExit):
        assert main("list", "methods") == 7
    else:
        with pytest.raises(GeneratorExit):
            main("list", "methods")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-", "> /dev/full"])
@pytest.mark.parametrize(("words", "code"), [("list methods", 0), ("rtn nowhere", 2)])
def test_streams_that_are_closed_or_full(closed, words, code):
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m llmcompress {words} {closed}"], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == (1 if "full" in closed and code == 0 else code)


def test_a_place_that_is_gone(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); from llmcompress.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "list"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "the current directory cannot be used" in done.stderr
