"""Damaged safetensors headers and indexes: refused in one line by every reader of them, or read as what they are."""

import json
import struct

import pytest

from llmcompress.calib.ids import _read as read_ids
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.recipe import parse
from llmcompress.store.headers import read_file_header, read_headers
from llmcompress.validate.stored import DamageError, read_tensors
from mutations import INPUTS, SCALARS, damaged, fuzz, measured, mutated, spoilt, text, tree

KEYS = ["dtype", "shape", "data_offsets", "__metadata__", "format", "model.embed_tokens.weight", "input_ids"]


@INPUTS
def test_damaged_headers(inputs, tiny_header, tmp_path):
    file = tmp_path / "model.safetensors"
    raw = text(tree(tiny_header)).encode()
    data = b"\0" * max(item["data_offsets"][1] for name, item in tiny_header.items() if name != "__metadata__")
    whole = struct.pack("<Q", len(raw)) + raw + data

    def check(dice):
        kind = dice.below(4)
        if kind < 2:
            header = mutated(tiny_header, dice, KEYS).encode("utf-8", "surrogatepass")
            shift = (-8, -1, 1, 8)[dice.below(4)] if dice.below(8) == 1 else 0
            file.write_bytes(struct.pack("<Q", max(len(header) + shift, 0)) + header + data)
        else:  # half of the damage to bytes within prefix and header, where it matters
            end = 8 + len(raw) if kind == 2 else len(whole)
            file.write_bytes(damaged(whole[:end], dice) + whole[end:])
        size = file.stat().st_size
        found = measured(lambda: read_file_header(file), size)
        if found is not None:  # within the file, without gap or overlap
            begin = 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]
            assert sum(stored.spec.nbytes for stored in found.values()) == size - begin
        measured(lambda: read_tensors(tmp_path), size, DamageError)
        measured(lambda: read_ids(file), size)

    fuzz(inputs, check)


@INPUTS
def test_damaged_indexes(inputs, tmp_path):
    weight_map = {}
    for shard in ("a.safetensors", "b.safetensors"):
        header = {f"{shard[0]}.weight": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}
        raw = json.dumps(header).encode()
        (tmp_path / shard).write_bytes(struct.pack("<Q", len(raw)) + raw + b"\0\0")
        weight_map[f"{shard[0]}.weight"] = shard
    (tmp_path / "config.json").write_text("{}")
    whole = {"metadata": {"total_size": 4}, "weight_map": weight_map}
    index = tmp_path / "model.safetensors.index.json"
    keys = ["weight_map", "metadata", "total_size", "a.weight"]
    names = ["a.safetensors", "../a.safetensors", "/a.safetensors", "c.safetensors", "\0.safetensors", "..", "a"]

    def check(dice):
        index.write_bytes(spoilt(whole, dice, keys, [*map(json.dumps, names), *SCALARS]))
        size = index.stat().st_size
        found = measured(lambda: read_headers(tmp_path), size)
        assert found is None or {file.parent for file in found.files} == {tmp_path}
        measured(lambda: read_tensors(tmp_path), size, DamageError)

    fuzz(inputs, check)


@pytest.mark.parametrize("inputs", [100, pytest.param(400, marks=pytest.mark.slow)])
def test_damaged_names(inputs, hollow_model, tmp_path):
    """Names that a header may hold, under which nothing, or the wrong thing, is found."""
    file, options = hollow_model / "model.safetensors", Options(out=tmp_path / "out")
    data = file.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    whole = json.loads(data[8:end])
    made = parse({"steps": [{"method": "rtn", "bits": 4, "group_size": 64}]})
    make_plan(made, hollow_model, options)  # what is built once
    parts = [
        "model",
        "layers",
        "weight",
        "bias",
        "self_attn",
        "q_proj",
        "lm_head",
        "experts",
        "{e}",
        "0",
        "1",
        "2",
        "99",
    ]
    parts += ["-1", "1e3", "٣", "²", "007", "é", "*", "[", "", " ", "9" * 20, "9" * 5000, "x" * 300]

    def check(dice):
        header = dict(whole)
        for _ in range(dice.below(3) + 1):
            name = dice.choose([*header])
            words = name.split(".")
            words[dice.below(len(words))] = dice.choose(parts)
            if dice.below(2):
                words.insert(dice.below(len(words) + 1), dice.choose(parts))
            header[".".join(words)] = header.pop(name)
        raw = json.dumps(header, ensure_ascii=bool(dice.below(2))).encode()
        with file.open("wb") as handle:
            handle.write(struct.pack("<Q", len(raw)) + raw)
            handle.truncate(8 + len(raw) + len(data) - end)
        measured(lambda: make_plan(made, hollow_model, options), file.stat().st_size)

    fuzz(inputs, check)
