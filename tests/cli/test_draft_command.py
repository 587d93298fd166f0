"""`draft` as a job: planned, stopped cleanly, gone on with to the same bytes, refused with one line."""

import json

import pytest

from trainingstops import goes_on_to_the_same_bytes

SHORT = ["--samples", 16, "--written", 16, "--length", 16, "--steps", 4, "--vocab", 200]


@pytest.fixture
def command(shallow_model_dir, tmp_path):
    return ["draft", shallow_model_dir, "-o", tmp_path / "out", *SHORT]


def test_it_tells_what_it_will_do_and_what_it_did(command, main, capsys, tmp_path):
    assert main(*command, "--dry-run", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["steps"], facts["vocabulary"], facts["states"]) == (4, 200, [0, 1, 2])
    assert not list(tmp_path.iterdir())
    assert main(*command) == 0
    shown = capsys.readouterr()
    assert "accepted on text held back 0." in shown.err
    assert f"next: llmcompress eval --draft {tmp_path / 'out'} --ref" in shown.err
    assert "EAGLE-3 head" in (tmp_path / "out" / "README.md").read_text()
    written = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert written >= facts["output_bytes"] > written - 5_000  # and the header


def test_a_deadline_stops_after_a_step_and_the_same_command_goes_on(command, main, capsys, tmp_path):
    goes_on_to_the_same_bytes(command, main, capsys, tmp_path)


def test_work_of_another_run_is_not_gone_on_with(command, main, capsys):
    assert main(*command, "--deadline", 0) == 75
    assert main(*command, "--vocab", 100) == 2
    assert "out.work holds another run: draft.vocabulary was 200, now 100" in capsys.readouterr().err
    assert main(*command, "--vocab", 100, "--restart") == 0


def test_too_little_memory_or_text_is_refused_before_anything_is_done(command, main, capsys, tmp_path):
    assert main(*command, "--max-memory", 0.1) == 2
    assert "--max-memory allows 0.10" in capsys.readouterr().err
    (tmp_path / "little.txt").write_text("Too little.")
    assert main(*command, "--calibration", tmp_path / "little.txt") == 2
    assert "16 were asked for" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["little.txt"]
