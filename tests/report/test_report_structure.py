"""Pages of depth, width and lora: what was removed or added, with the figures of report.json, and no script."""

import json
import re

import pytest


def cells(page):
    return re.findall(r"<(?:td|dd|th scope=.row.)>([^<]*)<", page)


@pytest.mark.parametrize("kind", ["depth", "width", "lora"])
def test_the_page_says_what_was_done_and_the_figures_of_each_layer(kind, structural, main, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main("report", structural[kind], "-o", page) == 0
    assert capsys.readouterr().err.startswith(f"{page}: about {kind}, ")
    text = page.read_text()
    assert "<script" not in text
    assert "http://" not in text
    assert "https://" not in text
    found, said = cells(text), json.loads((structural[kind] / "report.json").read_text())[kind]
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


def test_what_training_came_to_afterwards_is_said(structural, main, tiny_model_dir, tmp_path):
    out, page = tmp_path / "trained", tmp_path / "page.html"
    text = ["--samples", 32, "--length", 64, "--steps", 16]
    assert main("recover", structural["depth"], "--ref", tiny_model_dir, "-o", out, *text, "-q") == 0
    assert main("report", out, "-o", page) == 0
    held = json.loads((out / "report.json").read_text())["recovery"]["held_back"]["calibration"]
    said = next(cell for cell in cells(page.read_text()) if "KL on text held back" in cell)
    before, after = re.fullmatch(r"\d+ steps, KL on text held back (\S+) to (\S+) \(calibration\)", said).groups()
    assert [float(before), float(after)] == pytest.approx([held["kl_before"], held["kl"]], rel=0.01)


def test_several_on_one_page_with_their_evaluations(structural, main, tiny_model_dir, tmp_path, capsys):
    figures, page = tmp_path / "eval.json", tmp_path / "page.html"
    short = ("--length", 16, "--windows", 2)
    assert main("eval", structural["depth"], "--ref", tiny_model_dir, *short, "--output", figures) == 0
    given = ("report", structural["depth"], structural["width"], "--evaluation", figures, "-o", page)
    capsys.readouterr()
    assert main(*given, "--json") == 0
    assert json.loads(capsys.readouterr().out)["outputs"] == ["depth", "width"]
    text, first = page.read_text(), page.read_bytes()
    assert "KL divergence " in text
    assert text.count("<section") == 2
    assert main(*given, "--overwrite") == 0
    assert page.read_bytes() == first


def test_right_answers_are_said_of_every_task(structural, main, tiny_model_dir, tmp_path):
    file = tmp_path / "tasks.json"
    assert (
        main("eval", structural["depth"], "--ref", tiny_model_dir, "--tasks", "default", "--items", 2, "-o", file) == 0
    )
    assert main("report", structural["depth"], "--evaluation", file, "-o", tmp_path / "page.html") == 0
    saved, text = json.loads(file.read_text()), (tmp_path / "page.html").read_text()
    [said] = re.findall("<dt>Right answers</dt><dd>(.*?)</dd>", text)
    assert said.startswith(f"{saved['figures']['acc']:.1%} of 8, original {saved['figures']['ref_acc']:.1%} (cloze ")
    assert all(f"{name} {figures['acc']:.1%}" in said for name, figures in saved["tasks"].items())


def test_what_does_not_belong_is_one_line(structural, main, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main("report", structural["depth"], structural["rtn"], "-o", page) == 2
    assert "other figures than outputs of depth" in capsys.readouterr().err
    assert main("report", structural["depth"], "--timings", tmp_path / "t", "-o", page) == 2
    assert "write no timings" in capsys.readouterr().err
    broken = tmp_path / "broken"
    broken.mkdir()
    data = json.loads((structural["width"] / "report.json").read_text())
    data["width"]["layers"][1]["loss"] = "little"
    (broken / "report.json").write_text(json.dumps(data))
    assert main("report", broken, "-o", page) == 2
    assert "width.layers.1.loss" in capsys.readouterr().err
    assert not page.exists()
