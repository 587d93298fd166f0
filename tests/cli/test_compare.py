"""`compare` gives the figures that `eval` gives for each model alone, and runs the original once."""

import json

import pytest

from llmcompress.model.streamed_model import StreamedModel

EVAL = ["--length", 32, "--windows", 4]


@pytest.fixture
def made(main, shallow_model_dir, tmp_path):
    outs = [tmp_path / name for name in ("w3", "w8", "q4.gguf")]
    for out, bits in zip(outs[:2], (3, 8), strict=True):
        assert main("rtn", shallow_model_dir, "--bits", bits, "--group-size", 64, "-o", out, "-q") == 0
    assert main("gguf", shallow_model_dir, "--type", "Q4_0", "-o", outs[2], "-q") == 0
    return outs


def test_figures_are_those_of_each_alone_and_the_original_runs_once(main, capsys, monkeypatch, made, shallow_model_dir):
    alone = []
    for out in made:
        capsys.readouterr()
        assert main("eval", out, "--ref", shallow_model_dir, *EVAL, "--json") == 0
        alone.append(json.loads(capsys.readouterr().out))
    ran, layer = [], StreamedModel.layer

    def counted(self, number, *more):
        ran.append(number)
        return layer(self, number, *more)

    with monkeypatch.context() as patched:
        patched.setattr(StreamedModel, "layer", counted)
        assert main("compare", *made, "--ref", shallow_model_dir, *EVAL, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [item.pop("model") for item in found] == [str(out) for out in made]
    sizes = [item.pop("bytes") for item in found]
    assert found == alone
    assert sizes[0] < sizes[1]
    assert len(ran) == (len(made) + 1) * (max(ran) + 1)


def test_one_row_for_each_model_fits_eighty_columns(main, capsys, monkeypatch, made, shallow_model_dir):
    monkeypatch.chdir(made[0].parent)
    capsys.readouterr()
    assert main("compare", *(out.name for out in made), "--ref", shallow_model_dir, *EVAL, "-q") == 0
    shown = capsys.readouterr().out.splitlines()
    rows = [line for line in shown if line.startswith(("w3", "w8", "q4.gguf"))]
    assert len(rows) == 3
    assert max(map(len, rows)) <= 80


def test_what_cannot_be_compared_is_refused(main, capsys, made, shallow_model_dir, tmp_path):
    assert main("compare", made[0], made[0], "--ref", shallow_model_dir) == 2
    assert "is given twice" in capsys.readouterr().err
    assert main("compare", made[0], tmp_path / "nothing", "--ref", shallow_model_dir) == 2
    assert "nothing" in capsys.readouterr().err
