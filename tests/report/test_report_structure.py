"""Pages of depth, width and lora: what was removed or added, with the figures of report.json, and no script."""

import json
import re

import pytest

SHORT = ["--samples", 2, "--length", 16, "-q"]


@pytest.fixture(scope="module")
def outputs(tiny_model_dir, tmp_path_factory):
    """outputs[name]: directories of each kind."""
    import sys

    from llmcompress.cli import app

    folder = tmp_path_factory.mktemp("structure")
    commands = {
        "rtn": ["rtn", tiny_model_dir, "--group-size", 64, "-q"],
        "depth": ["depth", tiny_model_dir, "--drop", 1, *SHORT],
        "width": ["width", tiny_model_dir, "--ratio", 0.5, *SHORT],
        "lora": ["lora", tiny_model_dir, folder / "rtn", "--rank", 2, *SHORT],
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, command in commands.items():
            patch.setattr(sys, "argv", ["llmcompress", *map(str, command), "-o", str(folder / name)])
            with pytest.raises(SystemExit) as end:
                app.main()
            assert not end.value.code
    return {name: folder / name for name in commands}


def cells(page):
    return re.findall(r"<(?:td|dd|th scope=.row.)>([^<]*)<", page)


@pytest.mark.parametrize("kind", ["depth", "width", "lora"])
def test_the_page_says_what_was_done_and_the_figures_of_each_layer(kind, outputs, main, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main("report", outputs[kind], "-o", page) == 0
    assert capsys.readouterr().err.startswith(f"{page}: about {kind}, ")
    text = page.read_text()
    assert "<script" not in text
    assert "http://" not in text
    assert "https://" not in text
    found, said = cells(text), json.loads((outputs[kind] / "report.json").read_text())[kind]
    if kind == "depth":
        assert f"{said['layers'] - 1} of {said['layers']}" in found
        assert found.count("removed") == 1
        assert all(number in found for number in said["scores"][0]["scores"])
        assert found[found.index("removed") - 2] == str(said["removed"][0])
    elif kind == "width":
        assert f"{said['after']} of {said['before']}" in found
        for item in said["layers"]:
            place = len(found) - found[::-1].index(str(item["layer"])) - 1
            assert [float(cell) for cell in found[place + 1 : place + 3]] == pytest.approx(
                [item["cut"], item["loss"]], rel=0.01
            )
    else:
        assert len(said["matrices"]) == 28
        for item in said["matrices"]:
            place = found.index(item["name"])
            assert float(found[place + 3]) == pytest.approx(item["after"], rel=0.01)


def test_several_on_one_page_with_their_evaluations(outputs, main, tiny_model_dir, tmp_path, capsys):
    figures, page = tmp_path / "eval.json", tmp_path / "page.html"
    short = ("--length", 16, "--windows", 2)
    assert main("eval", outputs["depth"], "--ref", tiny_model_dir, *short, "--output", figures) == 0
    given = ("report", outputs["depth"], outputs["width"], "--evaluation", figures, "-o", page)
    capsys.readouterr()
    assert main(*given, "--json") == 0
    assert json.loads(capsys.readouterr().out)["outputs"] == ["depth", "width"]
    text, first = page.read_text(), page.read_bytes()
    assert "KL divergence " in text
    assert text.count("<section") == 2
    assert main(*given, "--overwrite") == 0
    assert page.read_bytes() == first


def test_right_answers_are_said_of_every_task(outputs, main, tiny_model_dir, tmp_path):
    file = tmp_path / "tasks.json"
    assert main("eval", outputs["depth"], "--ref", tiny_model_dir, "--tasks", "default", "--items", 2, "-o", file) == 0
    assert main("report", outputs["depth"], "--evaluation", file, "-o", tmp_path / "page.html") == 0
    saved, text = json.loads(file.read_text()), (tmp_path / "page.html").read_text()
    [said] = re.findall("<dt>Right answers</dt><dd>(.*?)</dd>", text)
    assert said.startswith(f"{saved['figures']['acc']:.1%} of 8, original {saved['figures']['ref_acc']:.1%} (cloze ")
    assert all(f"{name} {figures['acc']:.1%}" in said for name, figures in saved["tasks"].items())


def test_what_does_not_belong_is_one_line(outputs, main, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main("report", outputs["depth"], outputs["rtn"], "-o", page) == 2
    assert "other figures than outputs of depth" in capsys.readouterr().err
    assert main("report", outputs["depth"], "--timings", tmp_path / "t", "-o", page) == 2
    assert "write no timings" in capsys.readouterr().err
    broken = tmp_path / "broken"
    broken.mkdir()
    data = json.loads((outputs["width"] / "report.json").read_text())
    data["width"]["layers"][1]["loss"] = "little"
    (broken / "report.json").write_text(json.dumps(data))
    assert main("report", broken, "-o", page) == 2
    assert "width.layers.1.loss" in capsys.readouterr().err
    assert not page.exists()
