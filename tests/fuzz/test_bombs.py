"""Texts that are small to write and large to understand: refused before they are."""

import json
import struct
from pathlib import Path

import pytest

from llmcompress.cli.options import parse_set
from llmcompress.errors import LlmcompressError
from llmcompress.formats.card import model_card
from llmcompress.recipe import load
from llmcompress.store.headers import read_file_header, read_headers, read_json
from mutations import ALLOWANCE, FACTOR, measured

MB = 1_000_000
JSON = {
    "lists": "[" + "[]," * (2 * MB // 3) + "[]]",
    "objects": '{"a":[' + "{}," * (2 * MB // 3) + "{}]}",
    "zeros": '{"a":[' + "0," * MB + "0]}",
    "nesting": "[" * 2 * MB,
    "closed nesting": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "digits": '{"a":' + "9" * 2 * MB + "}",
}
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
MERGES = "a: &a {" + ", ".join(f"k{n}: 1" for n in range(500)) + "}\nb: {<<: [" + ", ".join(["*a"] * 500) + "]}\n"
YAML = {
    "laughs": f"{LAUGHS}steps: *a9\n",
    "laughs in an option": f"{LAUGHS}steps: [{{method: gptq, bits: *a9}}]\n",
    "merges": f"{MERGES}steps: [{{method: rtn}}]\n",
    "nesting": "steps: " + "[" * 100_000,
    "closed nesting": "steps: " + "[" * 5000 + "]" * 5000,
    "nested blocks": "".join(f"{' ' * n}a:\n" for n in range(1000)),
    "nested keys": "? " * 10_000,
    "values": "steps: [" + "0, " * 300_000 + "]",
    "time of day": "steps: 1" + ":1" * 450_000,
    "length": "# " + "x" * 5 * MB,
    "itself": "steps: &a [*a]",
    "its own option": "steps: [{method: rtn, set: &a {x: *a}}]",
}


def refused(read, size):
    """The message, as cheap as a refusal has to be."""
    messages = []

    def look():
        try:
            return read()
        except LlmcompressError as error:
            messages.append(error.message)
            raise

    assert measured(look, size) is None
    return messages[0]


@pytest.mark.parametrize("name", JSON)
def test_json_bombs_are_refused(name, tmp_path):
    raw = JSON[name].encode()
    (tmp_path / "config.json").write_bytes(raw)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", len(raw)) + raw)
    assert "config.json" in refused(lambda: read_json(tmp_path / "config.json"), len(raw))
    assert "model.safetensors" in refused(lambda: read_file_header(weights), len(raw))
    weights.rename(tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_bytes(raw)
    assert "index.json" in refused(lambda: read_headers(tmp_path), len(raw))


@pytest.mark.parametrize("name", YAML)
def test_yaml_bombs_are_refused(name, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(YAML[name])
    assert "recipe.yaml" in refused(lambda: load(file), len(YAML[name]))
    assert "--set" in refused(lambda: parse_set([YAML[name]]), len(YAML[name]))
    card = measured(
        lambda: model_card(
            {"name": "x", "format": "dense", "version": "0", "source_readme": f"---\n{YAML[name]}\n---\n"}
        ),
        len(YAML[name]),
    )
    assert "license" not in card


def test_the_largest_models_are_no_bombs(tmp_path):
    """What has many experts: the header of a shard is read, in memory of some multiple of its own size."""
    header, end = {}, 0
    for number in range(20_000):
        name = f"model.layers.{number // 200}.mlp.experts.{number % 200}.down_proj.weight"
        header[name] = {"dtype": "BF16", "shape": [7168, 2048], "data_offsets": [end, end + 7168 * 2048 * 2]}
        end += 7168 * 2048 * 2
    raw = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    with file.open("wb") as handle:
        handle.write(struct.pack("<Q", len(raw)) + raw)
        handle.truncate(8 + len(raw) + end)
    assert FACTOR * (len(raw) + end) > 10 * len(raw) + ALLOWANCE
    assert len(measured(lambda: read_file_header(file), 10 * len(raw) // FACTOR)) == 20_000


def test_a_config_too_long_to_be_one_is_not_read(tmp_path: Path):
    with (tmp_path / "config.json").open("wb") as handle:
        handle.truncate(1 << 40)
    assert "bytes" in refused(lambda: read_json(tmp_path / "config.json"), 0)
