"""Model directories as they should not be: everything that can be wrong with one is said before a tensor is read."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmcompress.errors import CheckpointError
from llmcompress.store.checkpoint import DTYPES, Checkpoint
from llmcompress.store.headers import ITEM_SIZE, read_file_header, read_headers

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.linspace(-1, 1, 10).to(torch.bfloat16).reshape(2, 5),
    "b.bias": torch.ones(0, dtype=torch.float16),
    "c.scalar": torch.tensor(7, dtype=torch.int64),
}


@pytest.fixture
def model(tmp_path):
    """A model directory with one file of weights."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    save_file(TENSORS, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture
def sharded(model):
    """The same in two shards."""
    (model / "model.safetensors").unlink()
    weight_map = {}
    for number, names in enumerate((["a.weight"], ["b.weight", "b.bias", "c.scalar"]), start=1):
        shard = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: TENSORS[name] for name in names}, model / shard)
        weight_map |= dict.fromkeys(names, shard)
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return model


def write(file, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def tensor(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def refused(path, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        read_headers(path)
    assert caught.value.exit_code == 2
    str(caught.value).encode()  # printable


# -- what is right --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["model", "sharded"])
def test_headers_say_what_the_safetensors_library_reads(kind, request):
    path = request.getfixturevalue(kind)
    headers, checkpoint = read_headers(path), Checkpoint(path)
    truth = {name: value for file in headers.files for name, value in load_file(file).items()}
    assert set(headers.tensors) == set(truth) == set(checkpoint.names()) == set(TENSORS)
    assert headers.nbytes == sum(value.nbytes for value in truth.values())
    for name, value in truth.items():
        stored = headers.tensors[name]
        assert stored.spec.shape == tuple(value.shape)
        assert stored.spec.nbytes == value.nbytes == stored.end - stored.begin
        read = checkpoint.read(name)
        assert read.dtype == value.dtype
        assert torch.equal(read, value)
        assert torch.equal(read, TENSORS[name])
        assert name in checkpoint


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_known_type_is_read_bit_for_bit(dtype, tmp_path):
    torch_type = DTYPES[dtype]
    bits = torch.arange(6 * ITEM_SIZE[dtype], dtype=torch.uint8) % (2 if dtype == "BOOL" else 251)
    value = bits.view(torch_type).reshape(2, 3)
    save_file({"x": value}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.headers.tensors["x"].spec.dtype == dtype
    read = checkpoint.read("x")
    assert read.dtype == torch_type
    assert torch.equal(read.flatten().view(torch.uint8), bits)


def test_a_tensor_read_is_its_own(model):
    checkpoint = Checkpoint(model)
    checkpoint.read("a.weight").zero_()
    assert torch.equal(checkpoint.read("a.weight"), TENSORS["a.weight"])
    (model / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be read at tensor a"):
        checkpoint.read("a.weight")


def test_a_file_cut_while_it_is_in_use_is_refused(model):
    checkpoint = Checkpoint(model)
    file = model / "model.safetensors"
    for size in (file.stat().st_size - 1, 40, 3):
        os.truncate(file, size)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            [checkpoint.read(name) for name in TENSORS]


def test_an_absent_tensor_is_refused_by_name(model):
    with pytest.raises(CheckpointError, match=r"tensor d\.weight is missing"):
        Checkpoint(model).read("d.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_weights_that_are_not_finite_are_refused_by_name(value, dtype, tmp_path):
    weight = torch.zeros(5, 7).to(dtype)
    weight[3, 6] = value  # float8_e4m3fn has no inf: it becomes nan or the largest number
    good = torch.full((5, 7), float(torch.finfo(dtype).max)).to(dtype)
    save_file({"bad": weight, "good": good, "none": weight[:0].contiguous()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint.read_finite("good").float(), good.float())
    assert checkpoint.read_finite("none").numel() == 0
    if not torch.isfinite(weight.float()).all():
        with pytest.raises(CheckpointError, match="tensor bad holds values that are not finite"):
            checkpoint.read_finite("bad")


def test_fingerprints_tell_models_apart(model, tmp_path):
    def changed(change):
        other = tmp_path / "other"
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(model, other)
        change(other)
        return read_headers(other)

    def reshape(path):
        save_file(TENSORS | {"a.weight": TENSORS["a.weight"].reshape(4, 3)}, path / "model.safetensors")

    def finetune(path):
        save_file(TENSORS | {"a.weight": TENSORS["a.weight"] + 1}, path / "model.safetensors", {"format": "pt"})

    before = read_headers(model)
    same = changed(lambda path: None)
    assert (same.fingerprint, same.contents) == (before.fingerprint, before.contents)
    assert changed(reshape).fingerprint != before.fingerprint
    assert changed(lambda path: (path / "config.json").write_text("{}")).fingerprint != before.fingerprint
    tuned = changed(finetune)
    assert tuned.fingerprint == before.fingerprint
    assert tuned.contents != before.contents


def test_headers_are_read_without_torch(model):
    code = (
        "import sys, pathlib; from llmcompress.store.headers import read_headers\n"
        f"assert read_headers(pathlib.Path({str(model)!r})).nbytes\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- directories ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.2-1B", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_a_hub_id_is_refused_politely(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(Path(name), f"{name} is not a directory; llmcompress is offline and takes no hub ids")


def test_a_path_that_does_not_exist_is_refused_as_one(tmp_path):
    refused(tmp_path / "nowhere", "nowhere does not exist")


def test_a_file_is_not_a_model(model):
    refused(model / "model.safetensors", "is a file, not a model directory")


def test_pickles_are_refused_with_the_way_out(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickled weights \(pytorch_model.bin\)") as caught:
        read_headers(model)
    assert "save_pretrained" in caught.value.hint


def test_pickles_beside_safetensors_are_left_alone(model):
    (model / "training_args.bin").write_bytes(b"\x80\x04.")
    assert read_headers(model).files == (model / "model.safetensors",)


def test_an_empty_directory_is_refused(tmp_path):
    refused(tmp_path, "config.json is missing")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "has no model.safetensors")


def test_one_file_of_another_name_is_taken_but_not_one_of_several(model):
    (model / "model.safetensors").rename(model / "weights.safetensors")
    assert "a.weight" in read_headers(model).tensors
    shutil.copy(model / "weights.safetensors", model / "more.safetensors")
    refused(model, "2 safetensors files but no model.safetensors.index.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "a JSON list, not an object"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_damaged_config_is_refused(text, words, model):
    (model / "config.json").write_bytes(text)
    refused(model, f"config.json.*{words}")


# -- shards ---------------------------------------------------------------------------------------------------------


def test_a_missing_shard_is_named(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    refused(sharded, "names model-00002-of-00002.safetensors, which is missing")


def test_an_index_beside_a_single_file_is_ambiguous(sharded):
    save_file(TENSORS, sharded / "model.safetensors")
    refused(sharded, "both model.safetensors and model.safetensors.index.json")


def test_an_index_may_name_the_single_file_alone(model):
    """As mlx-lm writes it."""
    save_file(TENSORS, model / "model.safetensors")
    weight_map = dict.fromkeys(TENSORS, "model.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert read_headers(model).tensors.keys() == TENSORS.keys()


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors", "x.bin", "", "..", 3, None,
     "x\0.safetensors", ["x.safetensors"]],
)  # fmt: skip
def test_an_index_names_only_safetensors_files_of_its_directory(name, sharded):
    save_file(TENSORS, sharded.parent / "model.safetensors")
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": name}}))
    refused(sharded, "which is not a safetensors file of this directory")


@pytest.mark.parametrize("weight_map", [{}, [], None, "x.safetensors"])
def test_an_index_without_names_is_refused(weight_map, sharded):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(sharded, "no weight_map")


@pytest.mark.parametrize("name", ["x" * 300 + ".safetensors", "\ud800.safetensors", "\x1b[2J.safetensors"])
def test_an_odd_file_name_is_missing_and_printed_safely(name, sharded):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": name}}))
    with pytest.raises(CheckpointError, match="which is missing") as caught:
        read_headers(sharded)
    assert str(caught.value).replace("\n", "").isprintable()


def test_an_index_that_misplaces_a_tensor_is_refused(sharded):
    index = sharded / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["a.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(data))
    refused(sharded, "says tensor a.weight is in model-00002-of-00002.safetensors, but it is not")


def test_a_tensor_in_two_shards_is_refused(sharded):
    save_file(TENSORS, sharded / "model-00002-of-00002.safetensors")
    refused(sharded, "tensor a.weight stands in both")


# -- links ----------------------------------------------------------------------------------------------------------


def test_a_link_that_leaves_the_directory_is_refused(model):
    outside = model.parent / "secret.safetensors"
    (model / "model.safetensors").rename(outside)
    (model / "model.safetensors").symlink_to(outside)
    refused(model, "is a link that leaves the model directory")


def test_a_shard_that_links_outside_is_refused(sharded):
    shard = sharded / "model-00001-of-00002.safetensors"
    shard.rename(sharded.parent / "outside.safetensors")
    shard.symlink_to("../outside.safetensors")
    refused(sharded, "is a link that leaves the model directory")


def test_links_into_a_hub_cache_are_what_downloads_look_like(model, tmp_path):
    cache = tmp_path / "models--org--name"
    snapshot, blobs = cache / "snapshots" / "0123abcd", cache / "blobs"
    blobs.mkdir(parents=True)
    snapshot.parent.mkdir()
    shutil.copytree(model, snapshot)
    (snapshot / "model.safetensors").rename(blobs / "cafe")
    (snapshot / "model.safetensors").symlink_to("../../blobs/cafe")
    assert "a.weight" in Checkpoint(snapshot).headers.tensors
    (snapshot / "model.safetensors").unlink()
    shutil.copy(blobs / "cafe", tmp_path / "cafe")
    (snapshot / "model.safetensors").symlink_to("../../../cafe")
    refused(snapshot, "is a link that leaves the model directory")


def test_links_within_and_to_the_directory_are_followed(model):
    (model / "model.safetensors").rename(model / "real.bin")
    (model / "model.safetensors").symlink_to("real.bin")
    link = model.parent / "link"
    link.symlink_to(model)
    assert "a.weight" in read_headers(link).tensors


def test_links_that_lead_nowhere_are_refused(model):
    (model / "model.safetensors").unlink()
    for target in ("gone.safetensors", "model.safetensors"):
        (model / "model.safetensors").symlink_to(target)
        refused(model, "model.safetensors")
        (model / "model.safetensors").unlink()


def test_what_is_not_a_file_is_not_waited_for(model):
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    refused(model, "is not a file")


# -- headers --------------------------------------------------------------------------------------------------------


def test_truncation_anywhere_is_noticed(model):
    file = model / "model.safetensors"
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        refused(model, "model.safetensors")
    file.write_bytes(whole + b"\0")
    refused(model, "has 1 bytes that belong to no tensor")


def test_a_flipped_bit_never_gives_another_layout(model):
    """A bit of every byte of prefix and header: refused, or no place of any tensor has changed."""
    file = model / "model.safetensors"
    whole = file.read_bytes()
    before = read_file_header(file)
    size = 8 + struct.unpack("<Q", whole[:8])[0]
    layout = [(s.spec.dtype, s.spec.nbytes, s.begin, s.end) for s in before.values()]
    refusals = 0
    for place in range(size):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        try:
            after = read_file_header(file)
        except CheckpointError:
            refusals += 1
        else:
            kept = [(s.spec.dtype, s.spec.nbytes, s.begin, s.end) for s in after.values()]
            assert sorted(nbytes for _, nbytes, _, _ in kept) == sorted(nbytes for _, nbytes, _, _ in layout)
            assert [begin for *_, begin, _ in kept] == [begin for *_, begin, _ in layout]
    assert refusals > size * 0.6


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"", b"", "damaged safetensors header"),
        (b"[]", b"", "not an object"),
        (b"null", b"", "not an object"),
        (b"\xff\xfe", b"", "damaged safetensors header"),
        (b"[" * 100_000, b"", "damaged safetensors header"),
        ({"x": 1}, b"", "at tensor x"),
        ({"x": {}}, b"", "at tensor x"),
        ({"x": tensor(dtype=["F32"])}, b"\0" * 8, "at tensor x"),
        ({"x": tensor(dtype={})}, b"\0" * 8, "at tensor x"),
        ({"x": tensor(dtype="F31")}, b"\0" * 8, "type 'F31', which is not supported"),
        ({"x": tensor(shape=[True, 2])}, b"\0" * 8, "at tensor x"),
        ({"x": tensor(shape=[2.0])}, b"\0" * 8, "at tensor x"),
        ({"x": tensor(shape=[-2])}, b"\0" * 8, "at tensor x"),
        ({"x": tensor(offsets=[False, 8])}, b"\0" * 8, "at tensor x"),
        ({"x": tensor(offsets=[0])}, b"\0" * 8, "at tensor x"),
        ({"x": tensor(offsets=[8, 0])}, b"\0" * 8, "at tensor x"),
        ({"x": tensor(offsets=[0, 4])}, b"\0" * 8, "at tensor x"),
        ({"x": tensor(offsets=[4, 12])}, b"\0" * 12, "at tensor x"),
        ({"x": tensor(), "y": tensor(offsets=[4, 12])}, b"\0" * 12, "at tensor y"),
        ({"x": tensor(), "y": tensor()}, b"\0" * 8, "at tensor y"),
        ({"x": tensor(), "y": tensor(offsets=[16, 24])}, b"\0" * 24, "at tensor y"),
        ({"x": tensor()}, b"\0" * 7, "is truncated"),
        ({"x": tensor(shape=[1 << 40, 1 << 40], offsets=[0, 8])}, b"\0" * 8, "at tensor x"),
        ({"x": tensor(shape=[1 << 61], offsets=[0, 1 << 63])}, b"\0" * 8, "is truncated"),
        ({"x": tensor(shape=[1 << 70], offsets=[0, 1 << 72])}, b"\0" * 8, "at tensor x"),
        ({"x\x1b[2J": tensor()}, b"\0" * 8, r"at tensor 'x\\x1b\[2J'"),
        ({"\ud800": tensor()}, b"\0" * 8, r"at tensor '\\ud800'"),
        ({"__metadata__": [], "x": tensor()}, b"\0" * 8, "__metadata__"),
        ({"__metadata__": {"a": 1}, "x": tensor()}, b"\0" * 8, "__metadata__"),
        (b'{"x": %s, "x": %s}' % ((json.dumps(tensor()).encode(),) * 2), b"\0" * 8, "stands twice"),
    ],
)
def test_a_damaged_header_is_refused(header, data, words, model):
    write(model / "model.safetensors", header, data)
    refused(model, words)


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 100_000_001, 1 << 32])
def test_a_header_longer_than_the_file_is_not_allocated(length, model):
    (model / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
    refused(model, "not a whole safetensors file")
