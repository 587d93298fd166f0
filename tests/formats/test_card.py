"""The model card: front matter that a YAML reader understands, and nothing that is not known."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from llmcompress.formats.card import model_card

FACTS = {
    "name": "Llama gptq w4",
    "format": "gptq",
    "version": "0.1.0",
    "config": {"_name_or_path": "owner/base-1B"},
    "source_readme": "---\nlicense: apache-2.0\ntags:\n- text\n---\n# Base\n",
    "grids": {"int4-g64-sym": 28},
    "bits": [4],
    "methods": ["gptq"],
    "calibration": {"windows": "128 of 512 tokens"},
    "figures": {"bytes of weights": "1,000"},
    "notes": ["vLLM does not load this: reason", "SGLang does not load this: reason"],
    "unquantised": ["model.layers.0.mlp.gate"],
    "recipe": "steps:\n- method: gptq\n",
}


def front(card):
    _, matter, body = card.split("---\n", 2)
    return yaml.safe_load(matter), body


def test_front_matter_names_base_licence_and_tags():
    matter, body = front(model_card(FACTS))
    assert matter == {
        "base_model": "owner/base-1B",
        "base_model_relation": "quantized",
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["llmcompress", "quantized", "gptq", "4-bit", "w4a16"],
    }
    assert "```yaml\nsteps:\n- method: gptq\n```" in body
    assert "- vLLM does not load this: reason\n- SGLang" in body


def test_what_is_not_known_is_not_claimed():
    for path in (None, "/home/someone/models/base", "models/base/v1", "./base", "../base", "base"):
        facts = {"name": "m", "format": "dense", "version": "1", "bits": [4], "config": {"_name_or_path": path}}
        matter, body = front(model_card(facts))
        assert not {"base_model", "base_model_relation", "license"} & set(matter)
        assert matter["tags"] == ["llmcompress", "quantized"]
        assert body.count("##") == 1  # how to use it
        assert path is None or path not in body.split()


def test_a_damaged_readme_of_the_source_is_no_obstacle():
    odd = ("[", "!!int ''", "!!bool x", "2001-01-01", "{a: b}", '"a\\x07b"', '"a\\nb"', "3", "no", "[[mit]]", "&a [*a]")
    damaged = ["", "# no front matter", "---\n- a\n---\n", "---\nlicense: mit\n"]
    for readme in (*damaged, *(f"---\nlicense: {text}\n---\n" for text in odd)):
        matter, _ = front(model_card({**FACTS, "source_readme": readme}))
        assert "license" not in matter
    matter, _ = front(model_card({**FACTS, "source_readme": "---\r\nlicense: other\r\nlicense_name: x\r\n---\r\ntext"}))
    assert (matter["license"], matter["license_name"]) == ("other", "x")
    matter, _ = front(model_card({**FACTS, "source_readme": "---\nlicense: [mit, apache-2.0]\n---\n"}))
    assert matter["license"] == ["mit", "apache-2.0"]


def test_an_origin_that_the_source_declares_is_kept_and_what_the_user_says_goes_first():
    readme = "---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\nbase_model: org/first\n---\n"
    facts = {**FACTS, "config": {}, "source_readme": readme}
    matter, _ = front(model_card(facts))
    assert matter["base_model"] == ["org/first"]
    assert "base_model_relation" not in matter  # what lies between the two is not known
    assert (matter["license"], matter["license_name"]) == ("other", "own")
    matter, body = front(model_card({**facts, "base_model": "me/tuned", "license": "mit"}))
    assert (matter["base_model"], matter["base_model_relation"]) == ("me/tuned", "quantized")
    assert matter["license"] == "mit"
    assert not {"license_name", "license_link"} & set(matter)
    assert "`me/tuned`, compressed by" in body


def test_options_reach_the_card_and_exports_of_the_run(main, capsys, shallow_model_dir, tmp_path):
    """huggingface_hub reads the card as the hub does."""
    source = tmp_path / "my-tuned"
    shutil.copytree(shallow_model_dir, source)
    config = json.loads((source / "config.json").read_text())
    config.pop("_name_or_path", None)
    (source / "config.json").write_text(json.dumps(config))
    (source / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: org/first\n---\n")
    outs = [tmp_path / name for name in ("plain", "said", "exported", "again")]
    assert main("rtn", source, "-o", outs[0], "-q") == 0
    said = ["--base-model", "me/tuned-1B", "--license", "mit"]
    assert main("rtn", source, "-o", outs[1], *said, "--work", tmp_path / "work", "--keep-work", "-q") == 0
    assert main("export", tmp_path / "work", "--format", "gptq", "-o", outs[2]) == 0
    assert main("run", outs[0] / "llmcompress.yaml", source, *said, "-o", outs[3], "-q") == 0
    cards = [ModelCard.load(out / "README.md") for out in outs]
    assert [card.data.license for card in cards] == ["apache-2.0", "mit", "mit", "mit"]
    assert [card.data.base_model for card in cards] == [["org/first"], *["me/tuned-1B"] * 3]
    assert cards[0].text.lstrip().startswith("# my-tuned rtn")
    assert all(card.text.lstrip().startswith("# tuned-1B rtn") for card in cards[1:])
    capsys.readouterr()
    for option, value in (("--license", "Apache 2.0"), ("--base-model", "tuned")):
        assert main("rtn", source, "-o", tmp_path / "no", option, value) == 2
        assert value in capsys.readouterr().err


def test_a_folder_of_gguf_files_tells_how_llama_cpp_runs_them(main, tiny_model_dir, tmp_path):
    """Run as it stands where llama.cpp's programs are on the PATH."""
    assert main("gguf", tiny_model_dir, "--type", "Q8_0", "-o", tmp_path / "out", "-q") == 0
    matter, body = front((tmp_path / "out" / "README.md").read_text())
    assert matter["library_name"] == "gguf"
    (command,) = re.findall(r"^llama-completion .*$", body, re.MULTILINE)
    words = shlex.split(command)
    assert (tmp_path / "out" / words[words.index("-m") + 1]).is_file()
    if shutil.which(words[0]):
        done = subprocess.run(words, cwd=tmp_path / "out", capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "The river" in done.stdout


LIBRARIES = {
    "compressed-tensors": "transformers",
    "dense": "transformers",
    "codebook": "llmcompress",
    "mlx": "mlx",
    "bitsandbytes": "transformers",
}
OPTIONS = {"bitsandbytes": ["nf4"], "codebook": ["rtn", "--type", "codebook"]}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.interop) if name != "compressed-tensors" else name for name in LIBRARIES],
)
def test_the_snippet_of_a_card_runs_in_its_directory(main, tiny_model_dir, tmp_path, name):
    out = tmp_path / "out"
    method = OPTIONS.get(name, ["rtn", "--group-size", "64"])
    assert main(*method, tiny_model_dir, "--format", name, "--samples", 4, "--length", 32, "-o", out) == 0
    matter, body = front((out / "README.md").read_text())
    assert matter["library_name"] == LIBRARIES[name]
    language, snippet = re.search(r"## Use\n\nIn this directory:\n\n```(\w+)\n(.*?)```", body, re.DOTALL).groups()
    command = [sys.executable, "-c", snippet] if language == "python" else shlex.split(snippet)
    if language == "sh":
        command[0] = Path(sys.executable).with_name(command[0])
    done = subprocess.run(command, cwd=out, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "The river" in done.stdout or language == "sh"
    assert done.stdout.strip()
