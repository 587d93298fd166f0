"""What a page says of evaluations in long text."""

import json
import re

import pytest

import llmcompress
from llmcompress.validate import long_text


@pytest.fixture
def evaluated(shallow_model_dir, tiny_eval_text, tmp_path, monkeypatch):
    """Evaluates an output in long text, and gives the file and what it holds."""
    monkeypatch.setattr(long_text, "_WRITTEN", 16)

    def of(output, ref=shallow_model_dir):
        found = llmcompress.evaluate_long(output, ref, text=tiny_eval_text, length=256, windows=2, items=1, batch=8)
        file = tmp_path / f"{output.name}{'' if ref else '-alone'}.json"
        found.save(file)
        return file, found.document

    return of


def rows(page):
    return {row[0]: row[1:] for row in (re.findall(r"[^<>\n]*[^<>\s][^<>\n]*(?=<)", line) for line in
            re.findall(r"<tr[^>]*>.*?</tr>", page.read_text(), flags=re.DOTALL)) if row}  # fmt: skip


def test_divergence_by_position_facts_and_repetition_stand_in_the_table(evaluated, shallow_model_dir, main, tmp_path):
    output = llmcompress.compress(shallow_model_dir, method="rtn", group_size=64, output=tmp_path / "w4").output
    file, found = evaluated(output)
    alone, _ = evaluated(output, None)
    page = tmp_path / "page.html"
    assert main("report", output, "--evaluation", file, "-o", page) == 0
    shown = rows(page)
    assert "In long text: 2 windows of 256 tokens, 95% intervals" in page.read_text()
    for band in found["bands"]:
        value, interval = shown[f"KL, {band['first']} to {band['last']} tokens before"]
        assert float(value) == pytest.approx(band["kl"], rel=0.01)
        assert [float(end) for end in interval.split(" – ")] == pytest.approx(band["kl_ci"], rel=0.01)
    needles, written = found["needles"]["figures"], found["repetition"]
    value, interval, original, lost = shown["Planted facts that it writes"]
    assert (value, original) == (f"{needles['exact']:.1%}", f"original {needles['ref_exact']:.1%}")
    assert interval.endswith(", 5 facts")
    assert lost.startswith(f"lost {needles['exact_drop']:.1%} (")
    value, _, original, more = shown["Sequences of 4 tokens repeated"]
    assert (value, original) == (f"{written['repetition']:.1%}", f"original {written['ref_repetition']:.1%}")
    assert more.startswith(f"more {written['repetition_rise']:.1%} (")
    assert shown["Texts that end in a loop"][0] == f"{written['looping']:.1%}"
    assert main("report", output, "--evaluation", alone, "-o", page, "--overwrite") == 0
    value, interval = rows(page)["Perplexity, 1 to 127 tokens before"]
    assert float(value) == pytest.approx(found["bands"][0]["perplexity"], rel=0.01)


def test_a_page_of_a_model_that_lost_layers_says_it_in_a_line(evaluated, tiny_model_dir, main, tmp_path):
    output = tmp_path / "shallower"
    assert main("depth", tiny_model_dir, "--drop", 1, "--samples", 2, "--length", 16, "-q", "-o", output) == 0
    file, found = evaluated(output, tiny_model_dir)
    page = tmp_path / "page.html"
    assert main("report", output, "--evaluation", file, "-o", page) == 0
    [said] = re.findall("<dt>In long text</dt><dd>(.*?)</dd>", page.read_text())
    last, needles, written = found["bands"][-1], found["needles"]["figures"], found["repetition"]
    assert re.match(rf"KL divergence [\d.]+ nats after {last['first']} to {last['last']} tokens, ", said)
    assert float(said.split()[2]) == pytest.approx(last["kl"], rel=0.01)
    assert f"{needles['exact']:.1%} of planted facts written (original {needles['ref_exact']:.1%})" in said
    assert f"{written['repetition']:.1%} of sequences of 4 tokens repeated" in said


def test_a_file_of_another_version_is_refused(evaluated, shallow_model_dir, main, capsys, tmp_path):
    output = llmcompress.compress(shallow_model_dir, method="rtn", group_size=64, output=tmp_path / "w4").output
    file, found = evaluated(output)
    file.write_text(json.dumps(found | {"schema_version": 2}))
    assert main("report", output, "--evaluation", file, "-o", tmp_path / "page.html") == 2
    assert "another (schema version 2, not 1) llmcompress" in capsys.readouterr().err
