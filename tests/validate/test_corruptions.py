"""A matrix of planted corruptions over all formats: `verify` finds them, and accuses no output that was left alone.

Every cell is an output copied, damaged in one way, and read again. What is told only as a warning counts as missed.
"""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from corruptions import corruptions
from llmcompress.api.structure import prune_depth, prune_width, repair_lora
from llmcompress.api.verification import verify
from llmcompress.errors import LlmcompressError
from rounds import ROUNDS
from tinyruns import compress, steps_recipe

RTN = {"method": "rtn", "bits": 4, "group_size": 32}
SCALED = {"method": "rtn", "bits": 8, "group_size": -1, "activations": "int8-tensor"}
SINGLE = "model.gguf"
OF_SOURCE = ("source", "bound")  # beginnings of the names of checks that need the source
SHORT = {"samples": 4, "length": 32}
EVERY = 1 if ROUNDS > 1 else 6  # of which corruption is planted


def made(steps, format_="compressed-tensors", **output):
    """Makes an output of a recipe."""

    def make(source, out):
        recipe = steps_recipe(steps, format_)
        recipe = recipe.model_copy(update={"output": recipe.output.model_copy(update=output)})
        compress(source, out, recipe)

    return make


def beside(steps):
    """Makes a single GGUF file with its papers, alone in a directory."""

    def make(source, out):
        out.mkdir()
        made(steps, "gguf", modelfile=True)(source, out / SINGLE)

    return make


def adapter(source, out):
    made([RTN])(source, out.with_name(f"{out.name}-base"))
    repair_lora(source, out.with_name(f"{out.name}-base"), out, rank=2, by="weights")


OUTPUTS = {
    "int4": made([RTN]),
    "shards": made([RTN], shard_size=100_000),
    "gptq": made([{**RTN, "method": "gptq", "actorder": "group"}], "gptq"),
    "awq": made([{**RTN, "sym": False}], "awq"),
    "dense": made([RTN], "dense"),
    "fp8": made([{"method": "rtn", "type": "fp8", "bits": 8, "activations": "fp8-token"}]),
    "mxfp4": made([{"method": "rtn", "type": "mxfp4"}]),
    "mlx": made([{"method": "rtn", "type": "offset", "bits": 4, "group_size": 32}], "mlx"),
    "w8a8": made([{"method": "smoothquant"}, SCALED]),
    "nf4": made([{"method": "rtn", "type": "nf4"}], "bitsandbytes"),
    "int8": made([{"method": "rtn", "type": "int8", "bits": 8}], "bitsandbytes"),
    "outliers": made([{"method": "rtn", "type": "int8", "bits": 8, "outliers": "topk", "outlier_count": 4}],
                     "int8-outliers"),
    "codebook": made([{"method": "rtn", "type": "codebook", "bits": 3}], "codebook"),
    "qoq": made([{"method": "rtn", "type": "progressive", "group_size": 32}], "qoq"),
    "sparse": made([{"method": "magnitude", "pattern": "2:4"}], "dense"),
    "sparse gptq": made([{"method": "wanda", "pattern": "2:4"}, {**RTN, "method": "gptq"}]),
    "rotated": made([{"method": "rotate"}, RTN]),
    "gguf": made([{"method": "rtn", "gguf": {"type": "Q4_0"}}], "gguf"),
    "gguf shards": made([{"method": "rtn", "gguf": {"type": "Q8_0"}}], "gguf", shard_size=100_000),
    "single gguf": beside([{"method": "awq"}, {"method": "rtn", "gguf": {"type": "Q8_0"}}]),
    "depth": lambda source, out: prune_depth(source, out, drop=1, keep_first=0, **SHORT),
    "width": lambda source, out: prune_width(source, out, ffn=64, **SHORT),
    "lora": adapter,
}  # fmt: skip


def model(random_model_dir, tiny_model_dir, path, seed):
    """A small model with all side files of the tiny one; two seeds give two models."""
    shutil.copytree(random_model_dir("llama", vocab_size=1216, intermediate_size=128 + 64 * seed), path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE"):
        text = (tiny_model_dir / name).read_text()
        (path / name).write_text(text + "\n" * seed)
    return path


@pytest.fixture(scope="module")
def sources(random_model_dir, tiny_model_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    return [model(random_model_dir, tiny_model_dir, root / str(seed), seed) for seed in range(2)]


@pytest.fixture(scope="module")
def outputs(sources, tmp_path_factory):
    """outputs(name): the directories of an output of both models."""
    root = tmp_path_factory.mktemp("outputs")

    def of(name):
        made = [root / f"{name}-{number}".replace(" ", "-") for number in range(2)]
        for source, out in zip(sources, made, strict=True):
            if not out.exists():
                OUTPUTS[name](source, out)
        return made

    return of


def found(place, source):
    """Whether `verify` finds damage without the source, and with it."""
    try:
        result = verify(place, source)
    except LlmcompressError:
        return True, True
    alone = [check for check in result.failed if not check.name.startswith(OF_SOURCE)]
    if not alone and any(check.name == "report" and not check.ok for check in result.checks):
        alone = verify(place).failed  # a GGUF file without its report is good only beside its source
    return bool(alone), bool(result.failed)


def matrix(name, outputs, source, folder, every=1, first=0):
    """Plant every so many of the corruptions; the counts by kind, and what was missed without and with the source."""
    (out, other), counts, missed = outputs(name), Counter(), ([], [])
    for corruption in list(corruptions(out, other, single=name.startswith("single")))[first::every]:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        copy = Path(shutil.copytree(out, folder / "copy"))
        corruption.plant(copy)
        counts[corruption.kind] += 1
        place = copy / SINGLE if name.startswith("single") else copy
        for misses, caught in zip(missed, found(place, source), strict=True):
            misses.extend([] if caught else [f"{name}: {corruption.name}"])
    return counts, *missed


def judged(counts, alone, both):
    total = counts.total()
    print(
        f"\n{total} planted, {total - len(alone)} found, {total - len(both)} with the source; by kind: {dict(counts)}"
    )
    print(f"missed without the source: {alone}; with it: {both}")
    assert len(alone) <= 0.1 * total
    assert len(both) <= 0.02 * total


def accused(place, source):
    """What `verify` says against an output, as far as it is more than the linears that engines fuse."""
    checks = [check for original in (None, source) for check in verify(place, original).checks]
    return [check for check in checks if not check.ok and check.name != "fused"]


def test_a_sample_of_the_matrix(outputs, sources, tmp_path):
    counts, alone, both = Counter(), [], []
    for number, name in enumerate(OUTPUTS):
        out, _ = outputs(name)
        assert accused(out / SINGLE if name.startswith("single") else out, sources[0]) == []
        more = matrix(name, outputs, sources[0], tmp_path / "planted", every=50, first=number)
        counts, alone, both = counts + more[0], alone + more[1], both + more[2]
    assert counts.total() >= 200
    judged(counts, alone, both)


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTPUTS)
def test_the_matrix(name, outputs, sources, tmp_path):
    """A third of its cells, and all of them in further rounds of attacks."""
    for out, source in zip(outputs(name), sources, strict=True):
        assert accused(out / SINGLE if name.startswith("single") else out, source) == []
    judged(*matrix(name, outputs, sources[0], tmp_path / "planted", every=EVERY))
