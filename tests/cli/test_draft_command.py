"""`draft` as a job: planned, stopped cleanly, gone on with to the same bytes, refused with one line."""

import json
from typing import get_args

import pytest

from llmcompress.api.settings import DraftKind
from llmcompress.model.draft_heads.head_files import head_kinds
from llmcompress.validate.draft_checks import DRAFTS
from trainingstops import goes_on_to_the_same_bytes

PRUNED = ["--kind", "prune", "--layers", 1, "--samples", 16, "--written", 16, "--length", 16, "--steps", 3]
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


def test_medusa_is_trained_and_decodes(shallow_model_dir, main, capsys, tmp_path):
    out = tmp_path / "out"
    assert main("draft", shallow_model_dir, "-o", out, "--kind", "medusa", *SHORT, "--rate", 0.003) == 0
    assert "next: llmcompress eval --draft" in capsys.readouterr().err
    card = (out / "README.md").read_text()
    assert "A head of Medusa" in card
    assert '"method": "medusa"' in card
    assert main("verify", out, "--source", shallow_model_dir) == 0
    assert main("report", out, "-o", tmp_path / "page.html") == 0


def test_kinds_are_those_that_there_are():
    assert set(get_args(DraftKind)) == {*head_kinds(), "prune"}
    assert set(DRAFTS) == set(head_kinds())


def test_a_deadline_stops_after_a_step_and_the_same_command_goes_on(command, main, capsys, tmp_path):
    goes_on_to_the_same_bytes(command, main, capsys, tmp_path)


def test_a_deadline_stops_a_pruned_draft_after_a_step_too(shallow_model_dir, main, capsys, tmp_path):
    command = ["draft", shallow_model_dir, "-o", tmp_path / "out", *PRUNED]
    goes_on_to_the_same_bytes(command, main, capsys, tmp_path)


def test_first_layers_of_a_compressed_model_draft_for_it(tiny_model_dir, main, capsys, tmp_path):
    target, out = tmp_path / "target", tmp_path / "out"
    assert main("rtn", tiny_model_dir, "-o", target, "--bits", 4, "--group-size", 64) == 0
    command = ["draft", target, "-o", out, *PRUNED, "--json"]
    capsys.readouterr()
    assert main(*command, "--dry-run") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["layers"], facts["steps"], facts["rate"], facts["passes"]) == (1, 3, 0.003, 2.5)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert main(*command) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["output_bytes"] == facts["output_bytes"]
    assert main("verify", out, "--source", target) == 0
    assert main("report", out, "-o", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert "1 of 4" in page
    assert "Trained afterwards" in page
    capsys.readouterr()
    asked = ["--generate", "The water", "--max-new-tokens", 120, "--compute-dtype", "float32", "--json"]
    assert main("eval", "--draft", out, "--ref", target, *asked) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["accepted_per_step"] == pytest.approx(found["accepted_per_step_expected"], abs=0.5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layers", 1], "--layers is of --kind prune"),
        (["--kind", "prune"], "write for example --layers 4"),
        (["--kind", "prune", "--layers", 1, "--vocab", 64], "--vocab is of heads"),
        (["--kind", "prune", "--layers", 2], "has 2 layers, and a draft cannot be the first 2 of them"),
        (["--kind", "prune", "--layers", 1, "--max-memory", 0.1], "--max-memory allows 0.10"),
    ],
)
def test_options_that_do_not_go_with_a_kind_are_refused(shallow_model_dir, main, capsys, tmp_path, options, words):
    assert main("draft", shallow_model_dir, "-o", tmp_path / "out", *options) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


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
