"""What people see in a terminal, by screens of tmux: progress above and in a bar, narrow, without colours, and dumb."""

import re
import shutil
import subprocess
import sys
from collections import Counter

import pytest
from rich.console import Console

from llmcompress.cli import console, watching
from terminal import CLI, Terminal

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
GPTQ = ["gptq", "model", "-o", "out", "--bits", 4, "--group-size", 64, "--samples", 96, "--length", 256]
EVAL = ["eval", "out", "--ref", "model", "--length", 64, "--windows", 20]
NUMBER = r"[\d.,]+(e-\d+)?"
LAYER = {
    80: rf"layer \d/4  {NUMBER} s  loss {NUMBER}  {NUMBER} tokens/s(  about \d+ s left)?",
    40: rf"layer \d/4  {NUMBER} s  loss {NUMBER}",
}
BAR = re.compile(r"layers [━╸╺]{8,}( \d/\d)?( \w+)?( [\d,]+ tokens/s)?( about \d+ s left)?")
COLOUR = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")
HELD = """
import pathlib, sys, time
class Held:
    def find_spec(self, name, path=None, target=None):
        while name == "torch":
            time.sleep(1)
sys.meta_path.insert(0, Held())
from llmcompress.cli.app import main
main()
"""


@pytest.fixture
def folder(tmp_path, tiny_model_dir):
    (tmp_path / "model").symlink_to(tiny_model_dir)
    return tmp_path


@pytest.fixture(scope="module")
def compared(tmp_path_factory, tiny_model_dir):
    """A folder with a model and what was made of it, and what a pipe gets of comparing the two."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "model").symlink_to(tiny_model_dir)
    piped(folder, ["rtn", "model", "-o", "out", "--bits", 4, "--group-size", 64])
    return folder, piped(folder, EVAL)


def piped(folder, words):
    done = subprocess.run([*CLI, *map(str, words)], cwd=folder, capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stdout + done.stderr
    return done


def masked(lines):
    return [re.sub(NUMBER, "#", line) for line in lines]


@needs_tmux
@pytest.mark.parametrize("width", [80, 40])
def test_finished_layers_stay_above_a_bar_that_moves_within_layers(folder, width):
    with Terminal(folder, width, GPTQ) as terminal:
        frames, last, whole = terminal.finish(), terminal.lines(), terminal.lines(joined=True)
        assert terminal.code == 0
    for number, line in enumerate(last[:4], 1):
        assert line.startswith(f"layer {number}/4  ")
        assert re.fullmatch(LAYER[width], line)
    assert re.fullmatch("writing 1.[0-9]+ MB", last[4])
    assert " ".join(whole[5:-1]).startswith("out: 1.")
    assert whole[5:-1] == last[5 : len(whole) - 1]  # lines end between words; the command alone is cut by the terminal
    assert whole[-1] == "next: llmcompress verify out --source model"
    marks: dict[str, set[int]] = {}
    for frame in frames:
        layers = [line for line in frame if line.startswith("layer ")]
        assert layers == last[: len(layers)]
        for line in frame[len(layers) :]:
            if line.startswith("layers "):
                found = BAR.fullmatch(line)
                assert found, line
                assert len(line) < width
                marks.setdefault(found[1], set()).update(place for place in map(line.find, "╸╺") if place > 0)
    assert {" 1/4", " 2/4", " 3/4"} <= marks.keys()
    assert max(map(len, marks.values())) > 1


@needs_tmux
@pytest.mark.slow
def test_no_color_leaves_a_bar_without_colours(folder):
    words = [*GPTQ[:-3], 8, "--length", 64]
    raw = {}
    for name, environment in (("plain", {}), ("colourless", {"NO_COLOR": "1"})):
        (folder / name).mkdir()
        (folder / name / "model").symlink_to(folder / "model")
        with Terminal(folder / name, 80, words, environment) as terminal:
            frames = terminal.finish()
            assert terminal.code == 0
        assert any(line.startswith("layers ") for frame in frames for line in frame)
        raw[name] = terminal.raw.read_bytes()
    assert COLOUR.search(raw["plain"])
    assert not COLOUR.search(raw["colourless"])


@needs_tmux
@pytest.mark.slow
def test_a_dumb_terminal_shows_what_a_pipe_shows(folder):
    words = [*GPTQ[:-3], 8, "--length", 64, "--overwrite"]
    with Terminal(folder, 80, words, {"TERM": "dumb"}) as terminal:
        terminal.finish()
        assert terminal.code == 0
        lines = terminal.lines(joined=True)
    assert b"\x1b" not in terminal.raw.read_bytes()
    assert masked(lines) == masked(piped(folder, words).stderr.splitlines())
    assert [re.match(LAYER[80], line) is not None for line in lines] == [True] * 4 + [False] * 3


@needs_tmux
@pytest.mark.parametrize("width", [80, 40])
def test_eval_loses_no_word_in_a_narrow_terminal(compared, width, tmp_path):
    folder, done = compared
    for name in ("model", "out"):
        (tmp_path / name).symlink_to(folder / name)
    with Terminal(tmp_path, width, EVAL) as terminal:
        frames, lines = terminal.finish(), terminal.lines()
        assert terminal.code == 0
    assert lines[0] == done.stderr.splitlines()[0] == "20 windows of 64 tokens"
    assert Counter(" ".join(lines).split()) == Counter((done.stdout + done.stderr).split())
    if width == 80:
        assert lines[1:-1] == [line.rstrip() for line in done.stdout.splitlines()]
    bars = [line for frame in frames for line in frame if line.startswith("layers ")]
    assert bars
    assert all(BAR.fullmatch(line) for line in bars)


def test_piped_eval_tells_its_windows_unless_quiet(main, tiny_model_dir, capsys):
    words = ["eval", tiny_model_dir, "--length", 64, "--windows", 3]
    for more, told in (([], "3 windows of 64 tokens\n"), (["-q"], ""), (["--json"], "")):
        assert main(*words, *more) == 0
        assert capsys.readouterr().err == told


@needs_tmux
@pytest.mark.parametrize(
    "words",
    [
        GPTQ,
        ["gptq", "model", "--bpw", 5],
        ["gguf", "model", "--bpw", 5],
        ["depth", "model", "--drop", 1],
        ["sweep", "gptq-w4", "model", "-o", "out"],
        ["eval", "model"],
        ["compare", "model", "--ref", "model"],
        ["verify", "model"],
    ],
    ids=lambda words: " ".join(map(str, words[:3])),
)
def test_the_first_line_is_drawn_before_libraries_are_read(folder, words):
    with Terminal(folder, 40, words, program=[sys.executable, "-c", HELD]) as terminal:
        terminal.begin()
        assert next(frame for frame in terminal.frames() if frame) == ["reading ..."]


@pytest.fixture
def clock(monkeypatch):
    """A list whose only number is the time."""
    now = [1000.0]
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(watching.time, name, lambda: now[0])
    return now


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(console, "say", lines.append)
    return lines


def test_the_time_left_goes_by_the_layers_of_this_start(clock, said):
    watch = watching.Watching(False, [1] * 8)
    watch.start(8, 5)
    clock[0] += 60
    watch.layer_done(5, 60.0)
    clock[0] += 240
    watch.layer_done(6, 240.0)
    watch.layer_done(7, 0.0)
    assert said == [
        "5 of 8 layers were finished before; going on",
        "layer 6/8  60.0 s  loss 0.00e+00  about 2 min left",
        "layer 7/8  240.0 s  loss 0.00e+00  about 2 min left",
        "layer 8/8  0.0 s  loss 0.00e+00",
    ]


def test_work_of_known_length_says_a_line_every_ten_seconds_where_there_is_no_bar(clock, said):
    with watching.Steps("layers", quiet=False) as steps, watching.Steps("layers", quiet=True) as quiet:
        for done in range(1, 9):
            clock[0] += 4
            steps.at(done, 8)
            quiet.at(done, 8)
    assert said == ["layers 3/8  about 20 s left", "layers 6/8  about 8 s left"]


@pytest.mark.parametrize("kind", ["dumb", "xterm"])
def test_a_dumb_terminal_gets_lines_of_work_of_known_length(monkeypatch, clock, said, kind):
    monkeypatch.setattr(console, "err", Console(stderr=True, force_terminal=True, _environ={"TERM": kind}))
    steps = watching.Steps("layers", quiet=False)
    clock[0] += 10
    steps.at(1, 2)
    assert said == (["layers 1/2  about 10 s left"] if kind == "dumb" else [])


def test_estimated_times_are_told_in_units_that_fit():
    assert list(map(watching.duration, (0.4, 99.4, 100, 5940, 6000))) == ["0 s", "99 s", "2 min", "99 min", "1.7 h"]
