"""What cannot be reported on is refused in one line that names it, and nothing is written."""

import json
import shutil

import pytest

from llmcompress.report.page_inputs import read_outputs


@pytest.fixture
def four(made, tmp_path):
    """A copy of an output's report to be damaged."""
    out = tmp_path / "four"
    out.mkdir()
    shutil.copy(made.outputs["four"] / "report.json", out)
    return out


def edit(file, change):
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda report: report.update(schema_version=2),
            "was written by another (schema version 2, not 1) llmcompress",
        ),
        (lambda report: report.pop("schema_version"), "was written by an older llmcompress, '0."),
        (lambda report: report["linears"][3].pop("grid"), "is no report, or damaged: linears.3.grid: field required"),
        (lambda report: report["linears"][0].update(relative_error="x"), "linears.0.relative_error"),
        (lambda report: report["linears"][0].update(loss=float("nan")), "linears.0.loss"),
        (lambda report: report["linears"][0].update(grid="int4-g0x"), "unknown grid 'int4-g0x'"),
        (lambda report: report.update(ledger=7), "ledger"),
    ],
)
def test_a_report_of_another_version_or_damaged_is_refused(main, capsys, four, tmp_path, change, words):
    edit(four / "report.json", change)
    page = tmp_path / "page.html"
    assert main("report", four, "-o", page) == 2
    said = capsys.readouterr()
    assert words in said.err
    error, *hint = said.err.splitlines()
    assert error.startswith("error: ")
    assert len(hint) < 2
    assert not said.out
    assert not page.exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00", '{"a": 1}'])
def test_a_report_that_is_no_report_is_refused(main, capsys, four, tmp_path, content):
    (four / "report.json").write_text(content)
    assert main("report", four, "-o", tmp_path / "page.html") == 2
    assert str(four / "report.json") in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_what_is_no_output_is_refused(main, capsys, tiny_model_dir, tmp_path):
    for path in (tiny_model_dir, tmp_path / "nothing", tiny_model_dir / "config.json", tmp_path / "no.gguf"):
        assert main("report", path, "-o", tmp_path / "page.html") == 2
        assert f"{path} is not an output" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_an_output_given_twice_is_refused(main, capsys, made, tmp_path):
    out = made.outputs["four"]
    assert main("report", out, out, "-o", tmp_path / "page.html") == 2
    assert "is given twice" in capsys.readouterr().err


def test_evaluations_belong_to_the_output_they_are_of_in_whatever_order(made):
    paths = [made.outputs[name] for name in ("small.gguf", "four", "three")]
    files = [made.evaluations[name] for name in ("three", "four", "small.gguf")]
    for output in read_outputs(paths, files, []):
        assert [found.model.name for found in output.evaluations] == [output.name]


def test_an_output_is_known_by_its_report_whatever_it_is_called(made, four):
    moved = four.rename(four.with_name("renamed"))
    (found,) = read_outputs([moved], [made.evaluations["four"]], [])
    assert found.name == "renamed"
    assert found.evaluations


def test_an_evaluation_of_another_checkpoint_is_refused(main, capsys, made, tmp_path):
    page = tmp_path / "page.html"
    assert main("report", made.outputs["four"], "--evaluation", made.evaluations["three"], "-o", page) == 2
    assert "is of another checkpoint, three" in capsys.readouterr().err
    changed = tmp_path / "four.json"
    shutil.copy(made.evaluations["four"], changed)
    edit(changed, lambda data: data.update(schema_version=9))
    assert main("report", made.outputs["four"], "--evaluation", changed, "-o", page) == 2
    assert "schema version 9, not 1" in capsys.readouterr().err
    edit(changed, lambda data: (data.update(schema_version=1), data["figures"].pop("perplexity")))
    assert main("report", made.outputs["four"], "--evaluation", changed, "-o", page) == 2
    assert "figures.perplexity: field required" in capsys.readouterr().err
    assert not page.exists()


def test_timings_of_no_output_are_refused(main, capsys, made, four, tmp_path):
    edit(four / "report.json", lambda data: data.update(compute_dtype="float64"))
    page, lines = tmp_path / "page.html", tmp_path / "lines"
    for content, words in (
        (made.timings.read_text(), "are of no output given"),
        ("what\n", "is no file of timings: line 1"),
        (made.timings.read_text() + "{}\n", "is no file of timings: line 19"),
        ("", "are of no output given"),
    ):
        lines.write_text(content)
        assert main("report", four, "--timings", lines, "-o", page) == 2
        assert words in capsys.readouterr().err
    assert main("report", four, "--timings", tmp_path / "none", "-o", page) == 2
    assert not page.exists()


def test_a_page_is_not_written_over_unasked(main, capsys, made, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("mine")
    assert main("report", made.outputs["four"], "-o", page) == 2
    assert "already exists" in capsys.readouterr().err
    assert page.read_text() == "mine"
    assert main("report", made.outputs["four"], "-o", page, "--overwrite") == 0
    assert page.read_text().startswith("<!doctype html>")
    assert main("report", made.outputs["four"], "-o", tmp_path, "--overwrite") == 2
