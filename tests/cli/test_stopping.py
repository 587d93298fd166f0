"""Deadlines, SIGTERM, bounds on memory, and the same command again: for every command that works for long."""

import os
import signal

import pytest
from every import arguments, runs

import llmcompress.engine.budget.fisher_run
import llmcompress.engine.run.measure_imatrix
import llmcompress.validate.evaluate
from llmcompress.cli.stopping import Stop

SHORT = ["--samples", 2, "--length", 16]
RUNS = [words for words in runs() if words != ("sweep",)]  # which has tests of its own


@pytest.fixture(autouse=True)
def handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def terminate(monkeypatch, module, name):
    """SIGTERM as `module.name` is called for the first time."""
    real, sent = getattr(module, name), []

    def terminated(*given, **named):
        if not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*given, **named)

    monkeypatch.setattr(module, name, terminated)


def content(folder):
    return {file.relative_to(folder): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_every_run_stops_at_a_deadline_and_goes_on(words, main, capsys, shallow_model_dir, tmp_path):
    command = arguments(words, shallow_model_dir, tmp_path)
    assert main(*command, "--deadline", 0) == 75
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "error: stopped at a safe point\n  hint: run the same command again" in shown.err
    assert len(list(tmp_path.glob("out.work/section-*.safetensors"))) == 1
    assert not (tmp_path / "out").exists()
    assert main(*command, "-q", "--junit", tmp_path / "a.xml") == 0
    assert not (tmp_path / "out.work").exists()
    stopped = content(tmp_path / "out")
    assert main(*command, "-q", "--overwrite") == 0
    assert content(tmp_path / "out") == stopped


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_every_run_is_refused_where_the_memory_is_too_little(words, main, capsys, shallow_model_dir, tmp_path):
    command = arguments(words, shallow_model_dir, tmp_path)
    assert main(*command, "--max-memory", 0.01) == 2
    assert "--max-memory allows 0.01" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_several_types_go_on_with_the_one_under_way(main, capsys, shallow_model_dir, tmp_path):
    """What is finished already is not refused for being there, and not done again."""
    command = ["gguf", shallow_model_dir, "-o", tmp_path / "out", "--type", "Q8_0", "--type", "Q4_0"]
    codes = [main(*command, "--deadline", 0) for _ in range(4)]
    assert codes == [75] * 3 + [0]  # a start for each of two layers of two files: every one gets further
    files = content(tmp_path / "out-Q8_0") | content(tmp_path / "out-Q4_0")
    assert main(*command, "-q") == 0
    assert content(tmp_path / "out-Q8_0") | content(tmp_path / "out-Q4_0") == files
    assert main("gguf", shallow_model_dir, "-o", tmp_path / "out-Q8_0", "--type", "Q8_0") == 2  # alone: refused as ever
    assert "already exists" in capsys.readouterr().err
    (tmp_path / "out-Q4_0" / "report.json").write_text("{}")
    assert main(*command) == 2
    assert "already exists" in capsys.readouterr().err


def test_several_types_are_made_anew_with_overwrite_and_a_stop_goes_on(main, shallow_model_dir, tmp_path):
    """What was made anew is told from what was there by the time it was written."""
    kinds = ["Q8_0", "Q4_0", "Q5_0"]
    outs = [tmp_path / f"out-{kind}.gguf" for kind in kinds]
    types = [word for kind in kinds for word in ("--type", kind)]
    command = ["gguf", shallow_model_dir, "-o", tmp_path / "out.gguf", *types, "-q"]

    def made():
        return [out.stat().st_mtime_ns for out in outs]

    assert main(*command) == 0
    first, content_before = made(), [out.read_bytes() for out in outs]
    assert main(*command) == 0
    assert made() == first
    assert main(*command, "--overwrite") == 0
    second = made()
    assert all(new != old for new, old in zip(second, first, strict=True))
    assert main(*command, "--overwrite", "--deadline", 0) == 75  # in the first file
    assert made() == second
    assert main(*command, "--overwrite", "--deadline", 0) == 75  # at the beginning of the second one
    third = made()
    assert [new != old for new, old in zip(third, second, strict=True)] == [True, False, False]
    assert main(*command, "--overwrite") == 0
    assert [new != old for new, old in zip(made(), third, strict=True)] == [False, True, True]
    assert [out.read_bytes() for out in outs] == content_before
    fourth = made()
    assert main(*command, "--overwrite", "--deadline", 0) == 75
    assert main(*command, "--overwrite", "--deadline", 0) == 75
    assert main(*command, "--overwrite", "--restart") == 0  # of what was stopped nothing is taken
    assert all(new != old for new, old in zip(made(), fourth, strict=True))
    assert not list(tmp_path.glob("*.work"))


def test_sigterm_leaves_nothing_of_an_importance_matrix(main, capsys, shallow_model_dir, tmp_path, monkeypatch):
    command = ["imatrix", shallow_model_dir, "-o", tmp_path / "a.gguf", *SHORT]
    with monkeypatch.context() as patched:
        terminate(patched, llmcompress.engine.run.measure_imatrix, "_fill")
        assert main(*command) == 75
    assert "1 of 2 steps done" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(*command, "--deadline", 0) == 75
    assert list(tmp_path.iterdir()) == []
    assert main(*command, "--deadline", 1000) == 0


def test_sigterm_stops_an_evaluation(main, capsys, shallow_model_dir, monkeypatch):
    command = ["eval", shallow_model_dir, "--length", 16, "--windows", 2]
    with monkeypatch.context() as patched:
        terminate(patched, llmcompress.validate.evaluate, "_advance")
        assert main(*command, "--json") == 75
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "the same command begins again" in shown.err
    assert main(*command, "--deadline", 0) == 75
    assert main(*command) == 0


def test_sigterm_stops_what_a_budget_measures_and_a_deadline_waits_for_it(
    main, capsys, shallow_model_dir, tmp_path, monkeypatch
):
    losses, out = tmp_path / "losses.json", tmp_path / "out.gguf"
    command = ["gguf", shallow_model_dir, "-o", out, "--bpw", 6, "--losses", losses, *SHORT]
    with monkeypatch.context() as patched:
        terminate(patched, llmcompress.engine.budget.fisher_run, "fisher_information")
        assert main(*command) == 75
    assert "once all are measured" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(*command, "--deadline", 0) == 75
    assert losses.exists()  # measured in full, and one layer after it
    assert len(list(tmp_path.glob("out.gguf.work/section-*.safetensors"))) == 1
    assert main(*command) == 0
    assert out.exists()


def test_the_clock_of_a_deadline_waits_for_something_to_be_finished():
    stop = Stop(0)
    assert [stop(finished) for finished in range(3)] == [False, True, True]
    stop.before = 1
    assert stop(0)
    assert not Stop(1000)(5)
    asked = Stop()
    assert not asked(5)
    os.kill(os.getpid(), signal.SIGTERM)
    assert asked(0)
