"""Small models of which only the headers are real, and the guard around every fuzzed reader."""

import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
import torch  # noqa: F401 (once, before anything is measured)
import transformers

import llmcompress.engine.run.tokens
import llmcompress.validate.session  # noqa: F401
from mutations import tracing


@pytest.fixture(autouse=True)
def guarded() -> Iterator[None]:
    with tracing():
        yield


def header_of(file: Path) -> bytes:
    """The JSON of a safetensors file."""
    with file.open("rb") as handle:
        return handle.read(struct.unpack("<Q", handle.read(8))[0])


@pytest.fixture
def hollow_model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """The first two layers of the tiny model with a hole in place of their data: all that planning looks at."""
    path = tmp_path / "model"
    shutil.copytree(tiny_model_dir, path, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    header, end = json.loads(header_of(tiny_model_dir / "model.safetensors")), 0
    for name in list(header):
        if ".layers.2." in name or ".layers.3." in name:
            del header[name]
        elif name != "__metadata__":
            begin, stop = header[name]["data_offsets"]
            header[name]["data_offsets"] = [end, end + stop - begin]
            end += stop - begin
    raw = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    os.truncate(path / "model.safetensors", 8 + len(raw) + end)
    return path


@pytest.fixture
def tiny_header(tiny_model_dir: Path) -> dict[str, object]:
    """The header of the tiny model's first tensors, with little data."""
    header = json.loads(header_of(tiny_model_dir / "model.safetensors"))
    kept = {"__metadata__": header.pop("__metadata__")}
    end = 0
    for name, item in list(header.items())[:5]:
        shape = [extent // 64 for extent in item["shape"]]
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        kept[name] = {"dtype": item["dtype"], "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return kept


@pytest.fixture(scope="session")
def tokenizer_of_bytes() -> transformers.PreTrainedTokenizerFast:
    """One token a byte, with a chat template that looks at what it is given."""
    alphabet = ["</s>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={token: at for at, token in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    template = (
        "{% for message in messages %}[{{ message.role }}]{{ message['content'] + '' }}"
        "{% if message.tool is defined %}{{ message.tool | tojson }}{% endif %}</s>\n{% endfor %}"
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=template)
