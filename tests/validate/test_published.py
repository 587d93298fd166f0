"""What `verify` says of the files of an output, and which files of a source it reads."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmcompress.api.verification import verify
from resealed import reseal, seal
from tinyruns import compress, recipe, steps_recipe

GGUF = steps_recipe([{"method": "rtn", "gguf": {"type": "Q8_0"}}], "gguf")


@pytest.fixture(scope="module")
def source(tiny_model_dir):
    return tiny_model_dir


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    compress(source, root / "out", recipe("rtn"))
    compress(source, root / "m.gguf", GGUF)
    return root


@pytest.fixture
def copy(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "copy"))


def said(place, source=None):
    """Name and detail of each check that is not ok; a star marks warnings."""
    checks = verify(place, source).checks
    return {f"{check.name}{'*' * check.warning}": check.detail for check in checks if not check.ok}


def test_every_file_is_recorded_and_the_digest_is_of_the_text(made):
    text = (made / "out" / "report.json").read_text()
    report = json.loads(text)
    names = {path.name for path in (made / "out").iterdir()}
    assert report["files"].keys() == names - {"report.json"}
    assert all(item["bytes"] == (made / "out" / name).stat().st_size for name, item in report["files"].items())
    assert set(report["files"]["model.safetensors"]) == {"bytes", "header_sha256"}
    assert set(json.loads((made / "m.gguf.report.json").read_text())["files"]) == {"model.gguf"}
    (made / "again.json").write_text("{}")
    seal(made / "again.json", report)
    assert (made / "again.json").read_text() == text


def test_what_people_and_hubs_do_is_told_and_no_fault(copy):
    out = copy / "out"
    (out / "README.md").write_text("mine")
    (out / ".gitattributes").write_text("x")
    (out / ".cache" / "huggingface").mkdir(parents=True)
    (out / ".cache" / "huggingface" / "CACHEDIR.TAG").write_text("x")
    assert said(out).keys() == {"additions*"}
    assert said(out)["additions*"].split("; ") == [
        ".cache/huggingface/CACHEDIR.TAG was not written by the run",
        ".gitattributes was not written by the run",
        "README.md is not what was written",
    ]
    (out / ".gitattributes.py").write_text("x")
    assert said(out)["directory"] == ".gitattributes.py was not written by the run"


def test_a_snapshot_of_a_download_cache_passes(copy, source):
    folder = copy / "models--org--name"
    (folder / "blobs").mkdir(parents=True)
    (folder / "snapshots" / "abc").mkdir(parents=True)
    for number, file in enumerate((copy / "out").iterdir()):
        file.rename(folder / "blobs" / str(number))
        (folder / "snapshots" / "abc" / file.name).symlink_to(f"../../blobs/{number}")
    assert said(folder / "snapshots" / "abc", source) == {}
    (copy / "link").symlink_to(folder / "snapshots" / "abc")
    assert said(copy / "link") == {}


@pytest.mark.parametrize("name", ["config.json", "report.json", "tokenizer.json", "model.safetensors", "m.gguf"])
def test_a_pipe_is_not_waited_for(name, copy):
    place = copy / "out" / name if name != "m.gguf" else copy / name
    place.unlink()
    os.mkfifo(place)
    assert "is not a file" in " ".join(said(copy / "out" if name != "m.gguf" else place, None).values())


def test_an_output_without_recorded_files_is_not_proved(copy):
    report = json.loads((copy / "out" / "report.json").read_text())
    for key in ("files", "sha256"):
        del report[key]
    (copy / "out" / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    found = said(copy / "out")
    assert found["directory"].startswith("report.json records no files (of an older version?)")
    assert found["report"].startswith("report.json holds no digest of itself")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"recipe"', '"recipe" '),
        lambda text: text.replace("0.1", "0.2", 1),
        lambda text: text.replace('"format"', '"format": "x", "format"', 1),
        lambda text: text + " ",
    ],
)
def test_any_edit_of_the_report_is_found(change, copy):
    for file in (copy / "out" / "report.json", copy / "m.gguf.report.json"):
        file.write_text(change(file.read_text()))
    assert "was edited" in said(copy / "out")["report"]
    assert "was edited" in said(copy / "m.gguf")["report"]


def test_hashes_that_were_renewed_do_not_hide_what_the_source_denies(copy, source):
    out = copy / "out"
    settings = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**settings, "rope_theta": 1.0}))
    (out / "chat_template.jinja").write_text("{{ evil }}")
    (out / "generation_config.json").unlink()
    (out / "tokenizer.model").write_text("x")
    reseal(out)
    assert said(out) == {}
    assert said(out, source)["source"].split("; ") == [
        "config.json has another 'rope_theta' than the source",
        "tokenizer.model does not come from the source",
        "chat_template.jinja is not that of the source",
        "generation_config.json of the source is missing",
    ]
    shutil.copy(source / "chat_template.jinja", out)
    shutil.copy(source / "generation_config.json", out)
    (out / "tokenizer.json").unlink()
    assert "tokenizer.json of the source is missing" in said(out, source)["source"]


def test_a_config_that_no_plan_would_take_is_found_behind_renewed_hashes(copy):
    out = copy / "out"
    settings = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**settings, "hidden_size": 2 * settings["hidden_size"]}))
    reseal(out)
    assert list(said(out)) == ["plan"]


def test_a_gguf_file_without_its_report_is_proved_by_its_source_alone(copy, source):
    (copy / "m.gguf.report.json").unlink()
    assert list(said(copy / "m.gguf")) == ["report"]
    assert list(said(copy / "m.gguf", source)) == ["report*"]
    (copy / "m.gguf.report.json").write_text("{")
    assert list(said(copy / "m.gguf", source)) == ["report"]


def test_a_directory_of_gguf_files_has_its_report(source, tmp_path):
    compress(source, tmp_path / "out", GGUF)
    assert said(tmp_path / "out", source) == {}
    (tmp_path / "out" / "report.json").unlink()
    assert said(tmp_path / "out", source) == {"report": "report.json is missing"}


def test_a_report_that_is_a_link_is_found(copy):
    (copy / "m.gguf.report.json").rename(copy / "elsewhere")
    (copy / "m.gguf.report.json").symlink_to("elsewhere")
    assert said(copy / "m.gguf") == {"report": "m.gguf.report.json is a link"}


def test_keys_of_a_gguf_file_are_those_of_its_source(copy, source):
    file = copy / "m.gguf"
    (copy / "m.gguf.report.json").unlink()
    whole = file.read_bytes()
    key = b"tokenizer.ggml.eos_token_id"
    at = whole.index(key) + len(key) + 4
    file.write_bytes(whole[:at] + b"\x05" + whole[at + 1 :])
    assert said(file, source)["source keys"] == "tokenizer.ggml.eos_token_id is not that of the source"


def test_a_gguf_file_may_be_renamed_with_its_report_and_is_proved_beside_a_gguf_source(made, source, tmp_path):
    compress(source, tmp_path / "f16.gguf", steps_recipe([{"method": "rtn", "gguf": {"type": "F16"}}], "gguf"))
    compress(tmp_path / "f16.gguf", tmp_path / "m.gguf", GGUF)
    for name in ("m.gguf", "m.gguf.report.json"):
        (tmp_path / name).rename(tmp_path / f"n{name[1:]}")
    assert said(tmp_path / "n.gguf", tmp_path / "f16.gguf") == {}
    (tmp_path / "n.gguf.transforms.npz").write_bytes(b"x")
    assert said(tmp_path / "n.gguf") == {"file": "n.gguf.transforms.npz was not written by the run"}


def test_the_source_is_read_as_the_run_read_it(source, made, tmp_path):
    model = Path(shutil.copytree(source, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        save_file({"x": torch.ones(1)}, model / name)
    compress(model, tmp_path / "single", recipe("rtn"))
    assert said(tmp_path / "single", model) == {}
    (model / "model.safetensors").unlink()
    names = list(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, model / file, {"format": "pt"})
    weight_map = {name: file for file, held in parts.items() for name in held}
    for total in (1, None, "x"):
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        compress(model, tmp_path / "out", recipe("rtn"), overwrite=True)
        assert said(tmp_path / "out", model) == {}
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (made / "out" / "model.safetensors").read_bytes()


def test_names_of_strays_are_printable(copy):
    (copy / "out" / "a\x1b[2J").write_text("x")
    assert said(copy / "out") == {"directory": "'a\\x1b[2J' was not written by the run"}


@pytest.mark.parametrize("name", ["config.json", "report.json", "tokenizer.json", "model.safetensors"])
def test_a_file_without_end_is_not_read(name, copy):
    (copy / "out" / name).write_bytes((1 << 40).to_bytes(8, "little"))
    os.truncate(copy / "out" / name, 1 << 41)
    assert said(copy / "out")
