"""Hostile outputs before `verify`: every one is found out (exit code 3, or 2 where there is nothing to read)."""

import json
import os
import shutil

import pytest
from attempts import Attempt

from corruptions import corruptions
from resealed import reseal, seal
from rounds import thinned
from tinyruns import compress, recipe, steps_recipe

pytestmark = pytest.mark.slow

FOUND = frozenset({2, 3})
GIGABYTE = 1 << 30


@pytest.fixture(scope="module")
def made(tiny_model_dir, tmp_path_factory):
    """A directory, and a folder with a single GGUF file."""
    root = tmp_path_factory.mktemp("made")
    compress(tiny_model_dir, root / "out", recipe("rtn"))
    (root / "single").mkdir()
    kind = steps_recipe([{"method": "rtn", "gguf": {"type": "Q4_0"}}], "gguf")
    compress(tiny_model_dir, root / "single" / "m.gguf", kind)
    return root


def hostile(out):
    """Names, and what each does to the directory `out`."""

    def edited(name, change):
        def edit():
            value = json.loads((out / name).read_text())
            change(value)
            (out / name).write_text(json.dumps(value))
            reseal(out)  # a forger renews every hash

        return edit

    report = json.loads((out / "report.json").read_text())
    more = {**report["files"], "../m.gguf": {"bytes": 1, "sha256": "0"}}
    yield "traversal", lambda: seal(out / "report.json", {**report, "files": more})
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "intermediate_size"):
        for value in (0, -1, 1 << 40, 10**30, None, "x", [1], 1.5, float("nan")):
            name = f"{key} {value!r}"
            yield name, edited("config.json", lambda config, key=key, value=value: config.update({key: value}))
    for key in ("rope_parameters", "rms_norm_eps", "tie_word_embeddings", "eos_token_id", "hidden_act", "model_type"):
        yield f"another {key}", edited("config.json", lambda config, key=key: config.update({key: 7}))
        yield f"no {key}", edited("config.json", lambda config, key=key: config.pop(key))
    for name in ("config.json", "report.json", "tokenizer.json", "model.safetensors", "llmcompress.yaml"):
        yield f"{name} without end", lambda name=name: os.truncate(out / name, 1 << 41)
        yield f"{name} of lists", lambda name=name: (out / name).write_text("[" + "[]," * 1_000_000 + "[]]")
        yield f"{name} deep", lambda name=name: (out / name).write_text("[" * 1_000_000)
        yield f"{name} binary", lambda name=name: (out / name).write_bytes(bytes(range(256)) * 64)
    yield "many strays", lambda: [(out / f"{number}.py").touch() for number in range(5_000)]
    yield "a deep directory", lambda: (out / "/".join("d" * 300)).mkdir(parents=True)
    yield "bytes that are no text", lambda: os.close(os.open(os.fsencode(out) + b"/\xff\xfe", os.O_CREAT))
    yield "a terminal", lambda: (out / "\x1b[31m\a").touch()


def test_hostile_outputs(attack, made, tiny_model_dir):
    def attempt(name, place, words, plant):
        def prepare(folder):
            shutil.copytree(made / place, folder / "copy")
            plant(folder / "copy")

        return Attempt(name, ["verify", *words, "--source", tiny_model_dir], prepare, codes=FOUND, seconds=30,
                       memory=GIGABYTE)  # fmt: skip

    attempts = [
        attempt(f"{name}: {item.name}", name, [f"copy/{file}"], item.plant)
        for name, file, single in (("out", "", False), ("single", "m.gguf", True))
        for item in list(corruptions(made / name, made / name, single))[::16]
    ]
    names = [name for name, _ in hostile(made / "out")]
    attempts += [attempt(name, "out", ["copy"], lambda copy, name=name: dict(hostile(copy))[name]()) for name in names]
    attack("verify", thinned(attempts, 2))
