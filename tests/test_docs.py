"""The documents: every command in them is one that the program understands, every workflow is YAML."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from documents import DOCUMENTS, ROOT, code_of, ours, understood
from llmcompress.cli.app import parser
from llmcompress.grids.grid_type import spec_named
from llmcompress.grids.integer import IntegerGrid
from llmcompress.packing.bits import pack

INDEX = ROOT / "docs" / "index.md"
WORKFLOWS = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs" / "ci.md").read_text(), flags=re.MULTILINE | re.DOTALL)


def scripts(node):
    """Every script of a workflow."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("run", "script"):
                yield "\n".join(value) if isinstance(value, list) else value
            else:
                yield from scripts(value)
    elif isinstance(node, list):
        for item in node:
            yield from scripts(item)


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_every_command_in_the_documents_is_understood(file):
    for words in ours(code_of(file)):
        assert understood(words) is not None, words


def options_of(command):
    """The options of a command, or of all below it."""
    below = getattr(command, "commands", {}).values()
    own = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*map(options_of, below))


def in_words(file):
    """What a document's words call a command with options, such as `eval --tasks`: the command, the options."""
    for span in re.findall(
        r"`(?:next: )?(?:llmcompress )?([^`]+)`", re.sub(r"```.*?```", "", file.read_text(), flags=re.S)
    ):
        words, command = span.split(), parser()
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        if command is not parser():
            yield command, {word.partition("=")[0] for word in words if word.startswith("--")}


@pytest.mark.parametrize(
    "file", [*DOCUMENTS, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"], ids=lambda file: file.name
)
def test_every_option_that_words_name_is_one_of_its_command(file):
    for command, options in in_words(file):
        assert options <= {"--help"} | options_of(command), command.name


def test_options_are_found_in_words():
    found = [(command.name, option) for command, options in in_words(ROOT / "docs" / "cli.md") for option in options]
    assert {("eval", "--tasks"), ("lora", "--rank"), ("verify", "--source")} <= set(found)


def test_every_command_that_methods_md_advises_can_be_planned(main, shallow_model_dir, tmp_path):
    advised = [line.split("|")[3] for line in (ROOT / "docs" / "methods.md").read_text().split("##")[0].splitlines()
               if line.startswith("| ")][1:]  # fmt: skip
    commands = [span.split() for cell in advised for span in re.findall(r"`([^`]+)`", cell) if not span.startswith("-")]
    assert len(commands) > 10
    for name, *options in commands:
        place = 1 if name == "run" else 0
        words = [name, *options[:place], shallow_model_dir, *options[place:], "-o", tmp_path / "out"]
        assert main("plan", *words) == 0, words


def test_there_are_commands_in_the_documents():
    found = {file.name: len(ours(code_of(file))) for file in DOCUMENTS}
    assert found["README.md"] > 5
    assert found["ci.md"] > 10


@pytest.mark.parametrize("words", [["gptq", "model/", "--no-such"], ["nothing"], ["recipe", "chek", "x"], ["verify"]])
def test_a_command_that_does_not_exist_would_be_noticed(words):
    with pytest.raises(Exception, match=r"(?i)no such|missing"):
        understood(words)


@pytest.mark.parametrize("text", WORKFLOWS, ids=["github", "gitlab"])
def test_workflows_are_yaml_whose_commands_are_understood(text):
    found = [words for script in scripts(yaml.safe_load(text)) for words in ours(script)]
    assert [words[0] for words in found] == ["recipe", "run", "verify", "eval"]
    for words in found:
        understood(words)
    run = understood(found[1]).params
    assert run["deadline"] == 6000
    assert run["max_memory"] == 14
    assert run["junit"] == Path("reports/run.xml")


def test_events_in_the_documents_are_those_of_the_program():
    table = (ROOT / "docs" / "ci.md").read_text().split("## stderr: events")[1].split("## Gates")[0]
    documented = {name for row in re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE) for name in row.split(", ")}
    sources = "\n".join(file.read_text() for file in (ROOT / "src" / "llmcompress" / "cli").glob("*.py"))
    ours = set(re.findall(r"(?:log|_owner|self)\.event\(\s*\"(\w+)\"", sources)) | {"stopped", "failed"}
    assert {name.strip("`") for name in documented} == ours


def test_the_site_builds_strictly(tmp_path):
    """A link to a page or a heading that is not there, or a name that the reference lacks, ends the build."""
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert built.returncode == 0, built.stdout + built.stderr
    page = (tmp_path / "site" / "index.html").read_text()
    assert "one-weight.svg" in page
    assert (tmp_path / "site" / "one-weight.svg").is_file()


def test_the_drawing_is_that_of_the_table():
    drawing = runpy.run_path(str(ROOT / "scripts" / "draw_pareto.py"))
    table = (ROOT / "docs" / "benchmarks.md").read_text()
    assert (ROOT / "docs" / "pareto.svg").read_text() == drawing["svg"](table), "python scripts/draw_pareto.py"
    theirs, ours = drawing["points"](table).values()
    assert [kind for kind, *_ in ours] == [kind for kind, *_ in theirs]
    assert len(ours) == 10


def test_pages_fetch_nothing_while_they_are_read():
    configured = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert configured["theme"]["font"] is False
    assert "offline" in configured["plugins"]


def test_the_first_page_passes_ten_places_that_exist():
    drawn = set(re.findall(r'monospace" fill="#\w+">([a-z_/]+\.py)<', (INDEX.parent / "one-weight.svg").read_text()))
    assert len(drawn) == 10
    assert all(f"`{file}`" in INDEX.read_text() for file in drawn)
    stations = re.findall(
        r"^\d+\. \*\*\w+\.\*\* (.*?)(?=^\d+\. |^\[)", INDEX.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    assert len(stations) == 10
    for station in stations:
        files = re.findall(r"`([a-z_/]+\.py)`", station)
        assert files, station
        assert all((ROOT / "src" / "llmcompress" / file).is_file() for file in files), files


def test_the_numbers_of_the_first_page_are_those_of_the_code():
    row = torch.zeros(1, 576, dtype=torch.uint8)
    row[0, 5] = 13
    assert unpacked_word(pack(row, 4)) == 0x00D00000
    assert torch.tensor([0x3CE2], dtype=torch.int16).view(torch.bfloat16).item() == pytest.approx(0.0276, abs=5e-5)
    grid = IntegerGrid(
        spec_named("int4-g64-sym"), torch.tensor([[0.0045]]), torch.tensor([[8.0]]), torch.zeros(64, dtype=torch.int64)
    )
    codes = grid.encode(torch.full((1, 64), 0.0276 - 0.0031))
    assert codes.unique().tolist() == [13]
    assert grid.decode(codes)[0, 0].item() == pytest.approx(0.0225)


def unpacked_word(words):
    return words[0, 0].item() & 0xFFFFFFFF
