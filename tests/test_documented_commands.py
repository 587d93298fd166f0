"""The commands of the documents, carried out in their order on the tiny model, as they stand but for their sizes."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from documents import DOCUMENTS, ROOT, in_document, understood

pytestmark = pytest.mark.slow

SIZES = {
    "--samples": 32,
    "--length": 64,
    "--windows": 4,
    "--items": 4,
    "--eval-windows": 4,
    "--steps": 2,
    "--written": 16,
    "--layers": 1,
    "--pairs": 1,
}
"""What these options say here, so that a command ends soon."""
WORDS = {
    "1.5GB": "2MB",  # of a size
    "tinyllama": "small",
    "0.1": "0.0015",  # GB
    "layers.61.*: {skip: false}": "layers.2.*: {skip: false}",  # the layer after the last
    "cuda": "cpu",
    "benchmarks/recipes/*.yaml": "benchmarks/recipes/rotate.yaml",
}
"""What the tiny model has in place of a word."""
DOMAINS = ["--domain", "encyclopaedia"]  # of the six the one that needs no further text, nor reads all of a library
REFUSED = {
    "llmcompress plan gptq model/ --target vllm --tp 4",
    "llmcompress plan gptq model/ --type mxfp4 --target vllm --gpu sm_100",
}
ELSEWHERE = {
    "python -m pip": "installs what is tested here",
    "python -m onnxruntime_genai": "needs an environment with it; tests/interop/test_onnxruntime_genai.py runs it",
    "llmcompress kernels check": "runs on a GPU; tests/cli/test_kernels_command.py emulates one",
    "llmcompress eval OUT --ref MODEL --backend kernels": "runs on a GPU; tests/validate/test_backed.py emulates one",
    "python benchmarks/fidelity.py": "needs environments with GPTQModel and llm-compressor",
    "python benchmarks/small_floats.py": "needs an environment with llm-compressor",
    "python benchmarks/gptq_vs_peers.py": "needs environments with GPTQModel and llm-compressor",
    "python benchmarks/methods_vs_peers.py": "needs an environment with llm-compressor",
    "python benchmarks/gguf_encoders.py": "needs a build of llama.cpp",
    "python benchmarks/gguf_vs_llamacpp.py": "needs a build of llama.cpp",
    "python benchmarks/eval_speed.py": "needs a build of llama.cpp",
    "python benchmarks/random_experts.py": "writes 15 GB",
    "python benchmarks/files.py": "writes 10 GB; tests/benchmarks/test_files.py runs it on a small model",
    "python benchmarks/models.py": "takes hours; tests/benchmarks/test_models.py runs it on some types",
}
"""Beginnings of commands that are not run here, and why."""


def is_elsewhere(words):
    return any(" ".join(words).startswith(beginning) for beginning in ELSEWHERE)


def smaller(words):
    """The words of a command, changed to what fits the tiny model and ends soon."""
    program, *words = [WORDS.get(word, word) for word in words if word != "..."]
    sizes = {**SIZES, "--length": 256, "--windows": 2} if {"--long", "--kv"} & set(words) else SIZES
    for number, option in enumerate(words[:-1]):
        if option in sizes and words[number + 1].isdecimal():
            words[number + 1] = str(sizes[option])
    if program == "python":
        if words[0].endswith("domains.py") and "--domain" not in words:
            words += DOMAINS
        return [name for word in words for name in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]
    known = {option for parameter in understood(words).command.params for option in parameter.opts}
    unsaid = [option for option in SIZES if option in known and option not in words]
    if words[0] == "eval":
        unfit = set() if "--tasks" in words else {"--items"}
        unfit |= {"--length", "--windows"} if {"--tasks", "--draft"} & set(words) else set()
        unsaid = [option for option in unsaid if option not in unfit]
    if "gguf" in words[:2] and "--type" in words and "--calibration" not in words:
        unsaid = [option for option in unsaid if option not in ("--samples", "--length")]
    if "--evaluate" not in words:
        unsaid = [option for option in unsaid if option != "--eval-windows"]
    if "prune" not in words:
        unsaid = [option for option in unsaid if option != "--layers"]
    words += [word for option in unsaid for word in (option, str(sizes[option]))]
    writes = "--overwrite" in known and words[0] not in ("eval", "plan")  # what a command before may have written
    return [*words, "--overwrite"] if writes else words


@pytest.fixture
def place(shallow_model_dir, tiny_eval_text, tmp_path, monkeypatch):
    """The working directory, which has all that the documents name without saying how it came about."""
    for name in ("model", "MODEL", "smollm2", "ds", "vendor-as-it-was", "base"):
        shutil.copytree(shallow_model_dir, tmp_path / name)
    shutil.copytree(shallow_model_dir, tmp_path / "tests/models/tiny-llama")
    for name in ("wiki.valid.txt", "wiki.test.txt", "text.txt", "french.txt", "fr.txt"):
        shutil.copy(tiny_eval_text, tmp_path / name)
    shutil.copytree(ROOT / "benchmarks" / "recipes", tmp_path / "benchmarks" / "recipes")
    (tmp_path / "text").mkdir()
    shutil.copy(tiny_eval_text, tmp_path / "text")
    (tmp_path / "reports").mkdir()
    shutil.copy(ROOT / "configs" / "gptq-w4.yaml", tmp_path / "recipe.yaml")
    with_own_head(tmp_path / "MODEL")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_own_head(model):
    """Give a model a head that is not its embedding, which --head-bits rounds in any format."""
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))


def with_further_layers(model):
    """Give a model layers after its last: one that is numbered on, one below `mtp`."""
    tensors, last = load_file(model / "model.safetensors"), "model.layers.1."
    again = {name.removeprefix(last): value for name, value in tensors.items() if name.startswith(last)}
    for beginning in ("model.layers.2.", "mtp.layers.0."):
        tensors |= {beginning + name: value.clone() for name, value in again.items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))


PREPARED = [  # what the documents name without saying how it came about, made by commands
    "calib pack ds -o ds/ids.safetensors --samples 32 --length 64",
    "imatrix model -o one.gguf --samples 2 --length 64",
    "imatrix model -o two.gguf --samples 2 --length 64",
    "fp8 vendor-as-it-was -o vendor",
    "rtn base -o lossy --bits 3 --group-size 64",
    "lora base lossy -o lora --rank 4 --samples 4 --length 64",
    "rtn model -o out --bits 3 --group-size 64",
    "rtn MODEL -o OUT --bits 3 --group-size 64",
    "rtn MODEL -o OUT-dense --bits 3 --group-size 64 --format dense",
]


def asked(words):
    """What a script is asked for: its name and options, whatever the outputs are that it is given."""
    return words[1], frozenset(word for word in words if word.startswith("-"))


def are_there(words):
    """Whether everything is there that a script is given before its options."""
    given = words[1 : next(number for number, word in enumerate(words) if word.startswith("-"))]
    return all(Path(word).exists() for word in given)


def shown(file):
    return in_document(file, "llmcompress", "python")


def needed(commands):
    """The commands of PREPARED that make what a document names, or what one of them needs."""
    named, found = {word.rstrip("/") for words in commands for word in words}, []
    for words in map(shlex.split, reversed(PREPARED)):
        if words[words.index("-o") + 1] in named:
            named.update(words)
            found.append(words)
    return reversed(found)


def stand_in(given, out):
    """What was to be recovered, in place of what recovery would have written."""
    if Path(given).is_dir():
        shutil.copytree(given, out, dirs_exist_ok=True)
        return
    for end in ("", ".report.json"):
        shutil.copyfile(given + end, out + end)


@pytest.mark.parametrize("file", [file for file in DOCUMENTS if shown(file)], ids=lambda file: file.name)
def test_every_command_of_a_document_does_what_it_says(file, main, capsys, place):
    if file.name == "sources.md":
        with_further_layers(place / "MODEL")
    for words in needed(shown(file)):
        assert main(*words) == 0, capsys.readouterr().err
    scripts = set()
    for words in shown(file):
        if is_elsewhere(words):
            continue
        given = smaller(words)
        if words[0] == "python":
            if asked(words) in scripts:  # it starts many processes, and has done this to other outputs
                assert are_there(given), words
                continue
            scripts.add(asked(words))
            command = [sys.executable, ROOT / given[0], *given[1:]]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{' '.join(given)}: {done.returncode}\n{done.stderr[-1000:]}"
            continue
        code = main(*given)
        said = capsys.readouterr().err
        if code == 1 and words[1] == "recover" and "did not fall" in said:  # nor need few steps on short text gain
            stand_in(given[1], given[given.index("-o") + 1])
            continue
        gate = "--fail-if" in given  # how near the tiny model comes to its original is no concern here
        allowed = {2} if " ".join(words) in REFUSED else {0, 3} if gate else {0}
        assert code in allowed, f"{' '.join(given)}: {code}\n{said[-1000:]}"


def test_every_exception_stands_in_a_document():
    lines = [" ".join(words) for file in DOCUMENTS for words in shown(file)]
    assert [start for start in ELSEWHERE if not any(line.startswith(start) for line in lines)] == []
    assert set(lines) >= REFUSED
    assert {word for file in DOCUMENTS for words in shown(file) for word in words} >= WORDS.keys()
