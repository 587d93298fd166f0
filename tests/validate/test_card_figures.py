"""Fidelity on the model card: read by huggingface_hub as the hub reads it; nothing else of the card changes."""

import json

import pytest
import yaml
from huggingface_hub import ModelCard


@pytest.fixture
def out(main, tiny_model_dir, tmp_path):
    assert main("rtn", tiny_model_dir, "--group-size", 64, "-o", tmp_path / "out", "-q") == 0
    return tmp_path / "out"


def test_the_card_gets_the_figures_and_verify_knows_what_happened(main, capsys, tiny_model_dir, out, tmp_path):
    written = (out / "README.md").read_text()
    report = (out / "report.json").read_bytes()
    command = ["eval", out, "--ref", tiny_model_dir, "--length", 32, "--windows", 4, "-q", "--update-card"]
    assert main(*command, "-o", tmp_path / "a.json") == 0
    document = json.loads((tmp_path / "a.json").read_text())
    text = (out / "README.md").read_text()
    matter = yaml.safe_load(text.split("---\n")[1])
    (index,) = matter.pop("model-index")
    assert matter == yaml.safe_load(written.split("---\n")[1])
    assert text.split("---\n", 2)[2] == written.split("---\n", 2)[2]
    assert index["name"] == written.split("\n# ")[1].splitlines()[0]
    (result,) = index["results"]
    assert result["dataset"]["args"] == {"windows": 4, "length": 32}
    found = {metric["type"]: metric for metric in result["metrics"]}
    for name in ("kl", "top1", "perplexity"):
        assert found[name]["value"] == document["figures"][name]
        assert found[name]["args"]["confidence_interval_95"] == document["figures"][f"{name}_ci"]
    assert {result.metric_type for result in ModelCard(text).data.eval_results} == set(found)
    assert (out / "report.json").read_bytes() == report
    assert sorted(path.name for path in out.iterdir() if "partial" in path.name) == []
    capsys.readouterr()
    assert main("verify", out, "--source", tiny_model_dir) == 0
    assert "README.md has got figures of an evaluation" in " ".join(capsys.readouterr().out.split())

    assert main(*command) == 0  # again on the same text: the same card
    assert (out / "README.md").read_text() == text
    assert main(*command, "--length", 16) == 0  # on other windows: beside them
    two = ModelCard((out / "README.md").read_text()).data.eval_results
    assert len(two) == 2 * len(found)
    (out / "README.md").write_text(text.replace("## Figures", "## My figures"))
    assert main("verify", out, "--source", tiny_model_dir) == 0
    assert "README.md is not what was written" in " ".join(capsys.readouterr().out.split())


def test_the_card_gets_an_entry_for_each_task(main, capsys, tiny_model_dir, out, tmp_path):
    command = ["eval", out, "--ref", tiny_model_dir, "-q", "--update-card"]
    assert main(*command, "--length", 32, "--windows", 4) == 0
    before = yaml.safe_load((out / "README.md").read_text().split("---\n")[1])["model-index"][0]["results"]
    asked = [*command, "--tasks", "default", "--items", 3]
    assert main(*asked, "-o", tmp_path / "a.json") == 0
    document, text = json.loads((tmp_path / "a.json").read_text()), (out / "README.md").read_text()
    results = yaml.safe_load(text.split("---\n")[1])["model-index"][0]["results"]
    assert [result for result in results if "windows" in result["dataset"]["args"]] == before
    found = {result["dataset"]["config"]: result for result in results if result not in before}
    assert set(found) == set(document["tasks"]) == {"cloze", "questions", "stories", "written"}
    for name, result in found.items():
        assert result["dataset"]["args"] == {"items": 3, "shots": 0, "chat": False}
        for metric in result["metrics"]:
            assert metric["value"] == document["tasks"][name][metric["type"]]
            assert metric["args"]["confidence_interval_95"] == document["tasks"][name][f"{metric['type']}_ci"]
    assert {metric["type"] for metric in found["cloze"]["metrics"]} == {"acc", "ref_acc", "acc_drop"}
    assert main(*asked) == 0  # the same items again: the same card
    assert (out / "README.md").read_text() == text
    capsys.readouterr()
    assert main("verify", out, "--source", tiny_model_dir) == 0
    assert "README.md has got figures of an evaluation" in " ".join(capsys.readouterr().out.split())


def test_what_has_no_card_is_refused_before_anything_is_measured(main, capsys, tiny_model_dir, out):
    command = ["eval", "--ref", tiny_model_dir, "--length", 32, "--windows", 4, "--update-card"]
    assert main(*command, tiny_model_dir) == 2
    assert "has no model card to update" in capsys.readouterr().err
    for cache in (["--kv-bits", 8], ["--kv-type", "fp8"]):
        assert main(*command, out, *cache) == 2
        assert f"--update-card does not go with {cache[0]}" in capsys.readouterr().err
    good = (out / "README.md").read_text()
    for text in ("# mine\n", "---\n[\n---\n", good.replace("tags:", "model-index: 3\ntags:", 1)):
        (out / "README.md").write_text(text)
        assert main(*command, out) == 2
        assert "takes no figures" in capsys.readouterr().err
        assert (out / "README.md").read_text() == text
