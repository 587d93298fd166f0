"""Packed ids come back as they were, and `resolve` finds the source that a word or a path means."""

import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import llmcompress.calib
from llmcompress.calib.base import Source, fingerprint
from llmcompress.calib.dataset import Dataset
from llmcompress.calib.default import Default
from llmcompress.calib.ids import Ids
from llmcompress.calib.jsonl import Jsonl
from llmcompress.calib.pack import resolve, save
from llmcompress.calib.sampled import Sampled
from llmcompress.calib.text import Text
from llmcompress.errors import CalibrationError
from llmcompress.registry import discover


@settings(max_examples=20)  # each is written through to the disk
@given(st.integers(1, 5), st.integers(2, 9), st.data())
def test_ids_come_back_as_packed(tmp_path_factory, ask, samples, length, data):
    flat = data.draw(st.lists(st.integers(0, 255), min_size=samples * length, max_size=samples * length))
    tokens = torch.tensor(flat).view(samples, length)
    path = tmp_path_factory.mktemp("ids") / "ids.safetensors"
    save(tokens, path)
    assert torch.equal(load_file(path)["input_ids"], tokens)  # the library reads what is written by hand
    back = Ids(path=path).tokens(ask(samples, length))
    assert back.dtype == torch.int64
    assert torch.equal(back, tokens)
    assert torch.equal(Ids(path=path).tokens(ask(1, 2)), tokens[:1, :2])


def test_the_file_holds_hash_and_nothing_of_time_or_place(tmp_path):
    tokens = torch.arange(12).view(3, 4)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save(tokens.to(torch.int32) if name == "b" else tokens, tmp_path / name / f"{name}.safetensors")
    first, second = (tmp_path / name / f"{name}.safetensors" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    with safe_open(first, "pt") as file:
        assert file.metadata() == {"format": "pt", "sha256": fingerprint(tokens)}
        assert list(file.keys()) == ["input_ids"]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "ids.safetensors"
    save(torch.zeros(1, 2, dtype=torch.int64), path)
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CalibrationError, match=r"cannot write .*ids\.safetensors: No space left"):
        save(torch.ones(1, 2, dtype=torch.int64), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_files_are_written_where_and_as_they_can_be_found_again(tmp_path):
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(CalibrationError, match=r"go into a \.safetensors file, not ids\.bin"):
        save(tokens, tmp_path / "ids.bin")
    with pytest.raises(CalibrationError, match=r"cannot write .*: No such file or directory"):
        save(tokens, tmp_path / "none" / "ids.safetensors")
    for wrong in (tokens[0], tokens.float()):
        with pytest.raises(TypeError):
            save(wrong, tmp_path / "ids.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((4, 4), "holds 3 rows, 4 were asked for"),
        ((3, 5), "have 4 tokens, 5 were asked for"),
        ((3, 4, 11), "holds token 11, but the model has tokens 0 to 10"),
    ],
)
def test_ids_that_do_not_suffice_are_refused(tmp_path, ask, asked, said):
    save(torch.arange(12).view(3, 4), tmp_path / "ids.safetensors")
    samples, length, *vocab_size = asked
    other = {"vocab_size": vocab_size[0]} if vocab_size else {}
    assert Ids(path=tmp_path / "ids.safetensors").tokens(ask(3, 4, vocab_size=12)).shape == (3, 4)
    with pytest.raises(CalibrationError, match=said):
        Ids(path=tmp_path / "ids.safetensors").tokens(ask(samples, length, **other))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"tokens": torch.zeros(2, 2, dtype=torch.int64)}, "has no tensor 'input_ids'; it has tokens"),
        ({"input_ids": torch.zeros(2, 2)}, r"is float32 \[2, 2\], not integers"),
        ({"input_ids": torch.zeros(2, 2, dtype=torch.bool)}, r"is bool \[2, 2\], not integers"),
        ({"input_ids": torch.zeros(4, dtype=torch.int64)}, r"is int64 \[4\], not integers \[n, length\]"),
        ({"input_ids": torch.tensor([[-1, 5]])}, "holds token -1"),
        ({"input_ids": torch.zeros(0, 2, dtype=torch.int64)}, "holds 0 rows"),
    ],
)
def test_other_files_are_refused(tmp_path, ask, tensors, said):
    save_file(tensors, tmp_path / "ids.safetensors")
    with pytest.raises(CalibrationError, match=said):
        Ids(path=tmp_path / "ids.safetensors").tokens(ask(1, 2))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.uint16])
def test_ids_of_other_tools_are_read(tmp_path, ask, dtype):
    save_file({"input_ids": torch.tensor([[7, 8], [9, 10]]).to(dtype)}, tmp_path / "ids.safetensors")
    tokens = Ids(path=tmp_path / "ids.safetensors").tokens(ask(2, 2))
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [[7, 8], [9, 10]]


def test_damaged_and_missing_files_are_refused(tmp_path, ask):
    path = tmp_path / "ids.safetensors"
    save(torch.arange(12).view(3, 4), path)
    whole = path.read_bytes()
    for data, said in [
        (whole[:-8] + b"\x01" + bytes(7), "is damaged: its ids do not match the hash"),
        (whole[:-8], "is not a whole safetensors file"),
        (b"", "is not a whole safetensors file"),
    ]:
        path.write_bytes(data)
        with pytest.raises(CalibrationError, match=said):
            Ids(path=path).tokens(ask(3, 4))
    path.unlink()
    with pytest.raises(CalibrationError, match=r"cannot read .*: No such file"):
        Ids(path=path).tokens(ask(3, 4))


@pytest.fixture
def places(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.md", "UPPER.TXT", "c.jsonl", "d.parquet", "e.safetensors", "f.csv"):
        Path(name).touch()
    Path("folder").mkdir()
    Path("folder", "x.txt").touch()
    datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk("saved")
    datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": ["x"]})).save_to_disk("splits")
    return tmp_path


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("a.txt", Text),
        ("b.md", Text),
        ("UPPER.TXT", Text),
        ("folder", Text),
        ("folder/", Text),
        ("c.jsonl", Jsonl),
        ("d.parquet", Dataset),
        ("saved", Dataset),
        ("splits", Dataset),
        ("e.safetensors", Ids),
    ],
)
def test_a_path_is_read_by_its_kind_and_by_one_alone(places, spec, kind):
    assert resolve(spec) == kind(path=Path(spec))
    assert [source for source in discover(llmcompress.calib, "SOURCE").values() if source.detects(Path(spec))] == [kind]


def test_words_name_sources_and_options_reach_them(places):
    assert resolve("default") == Default()
    assert resolve("self") == Sampled()
    assert resolve("self", temperature=1.5).temperature == 1.5
    assert resolve("c.jsonl", field="body") == Jsonl(path=Path("c.jsonl"), field="body")
    assert resolve("text", path="folder") == Text(path=Path("folder"))
    Path("text").mkdir()
    assert resolve("text") == Text(path=Path("text"))
    Path("default").mkdir()
    assert resolve("default") == Default()
    assert resolve("./default") == Text(path=Path("default"))


@pytest.mark.parametrize(
    ("spec", "message", "hint"),
    [
        ("f.csv", "f.csv is of no kind that is read", "accepted: "),
        ("defualt", "no calibration source or file 'defualt'", "did you mean 'default'? accepted: "),
        ("missing.txt", "no calibration source or file 'missing.txt'", "accepted: "),
        ("folder/missing.txt", "no calibration source or file 'folder/missing.txt'", "accepted: "),
        ("", "no calibration source or file ''", "accepted: "),
        ("jsonl", "calibration source jsonl needs a path", "it reads a .jsonl file"),
        (
            "Salesforce/wikitext",
            "there is no file or folder Salesforce/wikitext, and llmcompress works offline",
            "save_to_disk",
        ),
        ("org/set-3.1", "works offline", "save_to_disk"),
        ("https://example.org/a.txt", "works offline", "save_to_disk"),
        ("x" * 5000, "cannot read xxx", "check the path"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_way_out(places, spec, message, hint):
    with pytest.raises(CalibrationError) as refusal:
        resolve(spec)
    assert message in refusal.value.message
    assert hint in refusal.value.hint


def test_a_hint_names_all_that_is_accepted(places):
    with pytest.raises(CalibrationError) as refusal:
        resolve("nonsense")
    for source in discover(llmcompress.calib, "SOURCE").values():
        assert source.accepts in refusal.value.hint


@pytest.mark.parametrize(
    ("spec", "options", "message", "hint"),
    [
        ("c.jsonl", {"feild": "x"}, "calibration source jsonl has no option 'feild'", "did you mean 'field'?"),
        ("default", {"field": "x"}, "calibration source default has no option 'field'", "default takes no options"),
        ("self", {"temperature": 0}, "option temperature of calibration source self: input should be", None),
        ("self", {"batch_size": "many"}, "option batch_size of calibration source self: input should be", None),
    ],
)
def test_wrong_options_are_refused_by_name(places, spec, options, message, hint):
    with pytest.raises(CalibrationError) as refusal:
        resolve(spec, **options)
    assert message in refusal.value.message
    assert refusal.value.hint is None if hint is None else hint in refusal.value.hint


def test_every_source_says_what_it_is():
    sources = discover(llmcompress.calib, "SOURCE")
    assert sorted(sources) == ["dataset", "default", "ids", "jsonl", "self", "text"]
    for name, source in sources.items():
        assert issubclass(source, Source)
        assert source.name == name
        assert source.__doc__ != Source.__doc__
        assert all(field.description for field in source.model_fields.values())


def test_finding_sources_loads_no_heavy_library(places):
    """The command line asks for them at every start."""
    code = (
        "import sys; from llmcompress.calib.pack import resolve; resolve('a.txt'); resolve('self');"
        "heavy = {'torch', 'transformers', 'datasets', 'safetensors', 'numpy', 'jinja2', 'pyarrow'} & set(sys.modules);"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
