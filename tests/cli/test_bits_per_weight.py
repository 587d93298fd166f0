"""Bits per weight are of all tensors, bits per quantised weight of codes and scales, wherever they stand."""

import json
import re
import shutil

import pytest
from gguf import GGUFReader
from safetensors import safe_open

QUANTISED = r"([\d.]+) bits per quantised weight"
CASES = {
    "integers": (["rtn", "--bits", 4, "--group-size", 64], "out"),
    "mlx": (["rtn", "--type", "offset", "--bits", 3, "--group-size", 64, "--format", "mlx"], "out"),
    "mixed": (["rtn", "--bits", 4, "--group-size", 64, "--set", "down_proj: {bits: 8}", "--format", "gptq"], "out"),
    "zeros": (["magnitude", "--sparsity", 0.5], "out"),
    "Q4_K_M": (["gguf", "--type", "Q4_K_M"], "out.gguf"),
    "F16": (["gguf", "--type", "F16"], "out.gguf"),
}


def counted(out, model):
    """Bits of all tensors over the number of weights, by other readers: safetensors' and gguf's own."""
    if out.is_file():
        tensors = GGUFReader(out).tensors
        return 8 * sum(int(item.n_bytes) for item in tensors) / sum(int(item.n_elements) for item in tensors)
    with safe_open(out / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    with safe_open(model / "model.safetensors", "pt") as file:
        return 8 * stored / sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118


def rows(text):
    """The rows of a card or of a page by their title."""
    card = re.findall(r"^\| (bits per [a-z ]*weight) \| (.*?) \|$", text, flags=re.MULTILINE)
    page = re.findall(r">(Bits per [a-z ]*weight)</th><td[^>]*>([\d.]*)", text)
    return {title.lower(): value for title, value in [*card, *page]}


@pytest.mark.parametrize("name", CASES)
def test_all_places_agree(name, main, capsys, shallow_model_dir, tmp_path):
    (command, *options), place = CASES[name]
    out = tmp_path / place
    words = [command, shallow_model_dir, "-o", out, *options]

    def printed(*arguments):
        assert main(*arguments) == 0
        return capsys.readouterr()

    planned = json.loads(printed("plan", *words, "--json").out)
    shown = [printed("plan", *words).out, printed(*words).err]
    documents = [planned, json.loads(printed(*words, "--overwrite", "--json").out)]
    documents += [json.loads((tmp_path / f"{place}.report.json" if out.is_file() else out / "report.json").read_text())]
    inspected = json.loads(printed("inspect", out, "--json").out)
    printed("report", out, "-o", tmp_path / "page.html")

    assert planned["bits_per_weight"] == pytest.approx(counted(out, shallow_model_dir), abs=6e-5)
    assert {found["bits_per_weight"] for found in [*documents, inspected]} == {planned["bits_per_weight"]}
    quantised = planned["bits_per_quantised_weight"]
    assert {found["bits_per_quantised_weight"] for found in documents} == {quantised}
    told = [[float(bits) for bits in re.findall(QUANTISED, text)] for text in shown]
    assert told == [[] if quantised is None else [pytest.approx(quantised, abs=6e-4)]] * 2
    assert (quantised is None) == (name in ("zeros", "F16"))

    page = rows((tmp_path / "page.html").read_text())
    known = {"bits per weight": planned["bits_per_weight"]}
    known |= {} if quantised is None else {"bits per quantised weight": quantised}
    assert {title: float(value) for title, value in page.items() if value} == pytest.approx(known, abs=6e-4)
    if out.is_dir():
        card = rows((out / "README.md").read_text())
        assert card == {title: value for title, value in page.items() if value}


def test_inspect_knows_settings_that_stand_in_a_file_of_their_own(main, capsys, shallow_model_dir, tmp_path):
    out = tmp_path / "out"
    assert main("rtn", shallow_model_dir, "--type", "nvfp4", "--format", "modelopt", "-o", out) == 0
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    (out / "report.json").unlink()
    capsys.readouterr()
    assert main("inspect", out, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["quantization"]["quant_algo"], found["bits_per_weight"]) == ("W4A16_NVFP4", None)


def test_inspect_takes_no_list_for_a_fact(main, capsys, shallow_model_dir, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(shallow_model_dir, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "architectures": [[[]]]}))
    assert main("inspect", out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["architecture"] is None


def test_inspect_names_blocks_of_floats(main, capsys, shallow_model_dir, tmp_path):
    words = ["--type", "fp8-block", "--activations", "fp8-group", "--format", "fp8"]
    assert main("rtn", shallow_model_dir, *words, "-o", tmp_path / "out") == 0
    capsys.readouterr()
    assert main("inspect", tmp_path / "out") == 0
    assert "fp8: blocks of 128 x 128, inputs dynamic" in " ".join(capsys.readouterr().out.split())
