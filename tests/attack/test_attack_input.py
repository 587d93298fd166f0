"""Models, recipes and texts that are damaged or made to mislead: every command refuses them in order, or is right.

Configs, tokenizers and recipes are changed at random as trees of text, weights and GGUF files as bytes (see
`tests/fuzz`); here whole commands meet them. What a run accepts must come out as an output that passes `verify`.
"""

import json
import os
import random
import shutil
import struct

import pytest
from attempts import Attempt

from mutations import Dice, damaged, mutated
from rounds import ROUNDS

pytestmark = pytest.mark.slow

KEYS = [
    "hidden_size", "num_attention_heads", "head_dim", "rope_scaling", "rope_parameters", "rope_theta", "auto_map",
    "quantization_config", "layer_types", "tie_word_embeddings", "torch_dtype", "text_config", "num_local_experts",
]  # fmt: skip
RTN = ["rtn", "model", "-o", "out", "--bits", "4", "--group-size", "64"]
GPTQ = ["gptq", "model", "-o", "out", "--bits", "4", "--group-size", "64", "--samples", "2", "--length", "16"]
RUNS = [
    RTN,
    GPTQ,
    ["gguf", "model", "-o", "out", "--type", "Q4_0"],
    ["depth", "model", "-o", "out", "--drop", "1", "--samples", "2", "--length", "16"],
    ["eval", "model", "--ref", "model", "--windows", "1", "--length", "16"],
    ["inspect", "model"],
    ["plan", "awq", "model", "--bits", "4", "--group-size", "64"],
    ["imatrix", "model", "-o", "out", "--samples", "2", "--length", "16"],
]
EVAL, GGUF = RUNS[4], RUNS[2]
PLANS = [["plan", *RTN], ["plan", *GPTQ], ["plan", "gguf", "model", "--type", "Q4_0"], ["inspect", "model"]]


def rolls(seed):
    """Dice for one attempt."""
    return Dice(random.Random(seed).randbytes(40))


def spoilt(model, name, change):
    """A preparation: the model with one file changed; the others are hard links, since nothing may write to them."""

    def prepare(place):
        shutil.copytree(model, place / "model", copy_function=os.link)
        file = place / "model" / name
        data = change(file.read_bytes())
        file.unlink()
        file.write_bytes(data)

    return prepare


def attempts(model, name, change, commands, count):
    for seed in range(count):
        words = commands[seed % len(commands)]
        writes = words[0] in ("rtn", "gptq", "gguf", "depth")
        yield Attempt(
            f"{name} {seed} {words[0]}",
            words,
            spoilt(model, name, lambda data, seed=seed: change(data, rolls(seed))),
            source="model",
            output="out" if writes else None,
            left=("out.work",) if writes else ("out", "out.work"),
        )


def as_tree(data, dice):
    return mutated(json.loads(data), dice, KEYS).encode("utf-8", "surrogatepass")


def in_header(data, dice):
    """Weights whose header is changed as a tree."""
    end = 8 + struct.unpack("<Q", data[:8])[0]
    raw = mutated(json.loads(data[8:end]), dice, ["dtype", "shape", "data_offsets"]).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw + data[end:]


@pytest.mark.parametrize(
    ("name", "change", "commands", "count"),
    [
        ("config.json", as_tree, RUNS, 40),
        ("config.json", as_tree, PLANS, 80),
        ("tokenizer.json", as_tree, [GPTQ, EVAL, GGUF], 12),
        ("tokenizer_config.json", as_tree, [GPTQ, EVAL, GGUF], 12),
        ("generation_config.json", as_tree, [RTN, GGUF], 8),
        ("chat_template.jinja", damaged, [GPTQ, RTN], 8),
        ("model.safetensors", in_header, PLANS, 48),
        ("model.safetensors", damaged, RUNS, 16),
    ],
)
def test_models(attack, tiny_model_dir, name, change, commands, count):
    attack(f"models: {name}", list(attempts(tiny_model_dir, name, change, commands, count * ROUNDS)))


RECIPE = {
    "calibration": {"source": "text.jsonl", "samples": 2, "length": 16, "seed": 1, "field": "text"},
    "steps": [
        {"method": "awq"},
        {"method": "gptq", "bits": 4, "group_size": 64, "set": {"mlp.*": {"bits": 8}}, "symmetric": True},
    ],
    "output": {"format": "compressed-tensors", "shard_size": 1_000_000_000},
}
STEP_KEYS = [
    "method",
    "bits",
    "group_size",
    "set",
    "skip",
    "sparsity",
    "type",
    "format",
    "source",
    "percdamp",
    "descent",
]


@pytest.mark.parametrize("words", [["plan", "run"], ["run"], ["recipe", "check"]], ids=" ".join)
def test_recipes(attack, tiny_model_dir, words):
    def attempt(seed):
        def prepare(place):
            (place / "text.jsonl").write_text('{"text": "a text that is long enough to be some tokens"}\n' * 20)
            (place / "recipe.yaml").write_text(mutated(RECIPE, rolls(seed), STEP_KEYS), errors="backslashreplace")

        model = [] if words[0] == "recipe" else [tiny_model_dir]
        out = ["-o", "out"] if words == ["run"] else []
        return Attempt(
            f"{' '.join(words)} {seed}",
            [*words, "recipe.yaml", *model, *out],
            prepare,
            source=tiny_model_dir,
            output="out" if out else None,
            left=("out.work",),
            seconds=120,
        )

    attack("recipes", [attempt(seed) for seed in range(ROUNDS * (12 if words == ["run"] else 48))])


def test_texts(attack, tiny_model_dir):
    rows = b"".join(json.dumps({"text": f"row {n} of a text, long enough", "n": n}).encode() + b"\n" for n in range(30))
    names = [
        "text.jsonl",
        "text.json",
        "text.txt",
        "text.csv",
        "text.parquet",
        "text.npz",
        "text.safetensors",
        "text.gz",
    ]

    def attempt(seed):
        name = names[seed % len(names)]
        return Attempt(
            f"{name} {seed}",
            [
                "calib",
                "pack",
                tiny_model_dir,
                "--calibration",
                name,
                "-o",
                "ids.safetensors",
                "--samples",
                "2",
                "--length",
                "8",
            ],
            lambda place: (place / name).write_bytes(damaged(rows, rolls(seed))),
            left=("ids.safetensors",),
        )

    attack("texts", [attempt(seed) for seed in range(40 * ROUNDS)])


def test_gguf_files(attack, tiny_model_dir, servers, tmp_path):
    """A GGUF file as the model, with damage in what comes before its data."""
    assert servers.run(Attempt("made", ["gguf", tiny_model_dir, "-o", "in.gguf", "--type", "Q8_0"]), tmp_path).code == 0
    whole = (tmp_path / "in.gguf").read_bytes()
    half = len(whole) // 3

    def attempt(seed):
        words = [["inspect", "in.gguf"], ["verify", "in.gguf"], ["plan", "gguf", "in.gguf", "--type", "Q4_0"]][seed % 3]
        return Attempt(
            f"{words[0]} {seed}",
            words,
            lambda place: (place / "in.gguf").write_bytes(damaged(whole[:half], rolls(seed)) + whole[half:]),
        )

    attack("GGUF files", [attempt(seed) for seed in range(60 * ROUNDS)])


def test_outputs(attack, tiny_model_dir, servers, tmp_path):
    """Damaged outputs, and what reads them: never a traceback. What `verify` finds is tested where it is."""
    words = [*RTN, "--work", "work", "--keep-work"]
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    assert servers.run(Attempt("made", words), tmp_path).code == 0
    files = sorted(str(file.relative_to(tmp_path)) for name in ("out", "work") for file in (tmp_path / name).rglob("*"))

    def attempt(seed):
        name = files[seed % len(files)]

        def prepare(place):
            for folder in ("out", "work"):
                shutil.copytree(tmp_path / folder, place / folder)
            data = (place / name).read_bytes()
            (place / name).write_bytes(damaged(data, rolls(seed)))

        lines = [
            ["verify", "out"],
            ["export", "work", "-o", "made", "--format", "dense"],
            ["report", "out", "-o", "page.html"],
            ["eval", "out", "--ref", tmp_path / "model", "--windows", "1", "--length", "16"],
            ["inspect", "out"],
        ]
        words = lines[1] if name.startswith("work") else lines[seed // len(files) % 5]
        return Attempt(f"{words[0]} {name} {seed}", words, prepare, left=("made", "page.html"))

    attack("outputs", [attempt(seed) for seed in range(40 * ROUNDS)])


LIMITS = {"RLIMIT_FSIZE": (0, 3_000_000), "RLIMIT_NOFILE": (3, 60)}


@pytest.mark.parametrize("limit", LIMITS)
def test_resources(attack, tiny_model_dir, limit):
    """A disk that is full, a process that may open no more files: refused or failed, and nothing half-written."""
    draw, (low, high) = random.Random(limit), LIMITS[limit]
    writing = [words for words in RUNS if words[0] in ("rtn", "gptq", "gguf", "depth")]

    def attempt(seed):
        return Attempt(
            f"{limit} {seed}",
            writing[seed % len(writing)],
            lambda place: shutil.copytree(tiny_model_dir, place / "model", copy_function=os.link),
            source="model",
            output="out",
            left=("out.work", "out.partial"),  # deleting takes descriptors: the next start does it
            limits={limit: draw.randrange(low, high)},
        )

    attack(f"resources: {limit}", [attempt(seed) for seed in range(12 * ROUNDS)])
