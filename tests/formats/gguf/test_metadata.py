"""Keys of GGUF files are those that llama.cpp's converter writes (scripts/interop/gguf_converter.py), and some more."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from llmcompress.errors import CheckpointError
from llmcompress.formats.gguf.keys import write
from llmcompress.formats.gguf.metadata import architecture, facts, metadata, notes
from llmcompress.formats.gguf.names import gguf_tensors
from llmcompress.formats.gguf.rules import Facts
from llmcompress.formats.gguf.types import file_type

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "gguf_converter.json").read_text())
NAME = "Tiny-Model-7B-v2.0"  # the directory that the converter was given
README = """---
license: other
license_name: tiny-licence
license_link: LICENSE
language:
- en
- no
tags: [chat]
pipeline_tag: text-generation
base_model:
- some-org/Base-Model-1.5B-v0.3
- not a hub id
---
# A model
"""


def tensors_of(model):
    return gguf_tensors(GOLDEN[model]["config"], list(GOLDEN[model]["source"].items()), 90)


def keys_of(model, kind="F32", name=NAME, **more):
    return {
        key.name: key for key in metadata(GOLDEN[model]["config"], tensors_of(model), file_type(kind), name, **more)
    }


def written(path, model, **more):
    """Keys of a file as the gguf package reads them: (value, type)."""
    config = GOLDEN[model]["config"]
    writer = gguf.GGUFWriter(path, architecture(config))
    write(writer, metadata(config, tensors_of(model), file_type("F32"), NAME, **more))
    writer.add_tensor("token_embd.weight", np.zeros((1, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = gguf.GGUFReader(path)
    return {
        name: [field.contents(), "/".join(kind.name for kind in field.types)]
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }


@pytest.mark.parametrize("model", GOLDEN)
def test_keys_values_and_types_are_those_of_the_converter(model, tmp_path):
    ours, theirs = written(tmp_path / "model.gguf", model), GOLDEN[model]["keys"]
    assert {name: ours.get(name) for name in theirs} == theirs
    arch = architecture(GOLDEN[model]["config"])
    more = {name.removeprefix(f"{arch}.") for name in ours.keys() - theirs.keys()}
    assert more <= {
        "general.quantized_by",
        "general.file_type",
        "vocab_size",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "rope.freq_base",
    }


def test_the_card_says_what_the_model_is_and_came_from(tmp_path):
    found = written(tmp_path / "model.gguf", "llama", readme=README)
    assert {name: found[name][0] for name in found if name.startswith("general.")} == {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "Tiny Model 7B v2.0",
        "general.version": "v2.0",
        "general.finetune": "7b",
        "general.basename": "Tiny-Model",
        "general.quantized_by": "llmcompress",
        "general.size_label": found["general.size_label"][0],
        "general.license": "other",
        "general.license.name": "tiny-licence",
        "general.license.link": "LICENSE",
        "general.base_model.count": 1,
        "general.base_model.0.name": "Base Model 1.5B v0.3",
        "general.base_model.0.version": "v0.3",
        "general.base_model.0.organization": "Some Org",
        "general.base_model.0.repo_url": "https://huggingface.co/some-org/Base-Model-1.5B-v0.3",
        "general.tags": ["chat", "text-generation"],
        "general.languages": ["en", "no"],
        "general.file_type": 0,
        "general.quantization_version": 2,
    }


def test_the_card_is_read_as_the_gguf_package_reads_it(tmp_path):
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "README.md").write_text(README.replace("- not a hub id\n", ""))
    theirs = gguf.GGUFWriter(tmp_path / "theirs", "llama")
    total = sum(int(np.prod(tensor.shape)) for tensor in tensors_of("llama"))
    gguf.Metadata.load(None, folder, None, total).set_gguf_meta_model(theirs)
    ours = gguf.GGUFWriter(tmp_path / "ours", "llama")
    write(ours, metadata(GOLDEN["llama"]["config"], tensors_of("llama"), file_type("F32"), NAME, README))
    for name, value in theirs.kv_data[0].items():
        assert ours.kv_data[0][name].value == value.value
        assert ours.kv_data[0][name].type == value.type


def test_what_a_user_says_is_what_a_card_that_said_so_would_give():
    def told(readme, *said):
        keys = metadata(GOLDEN["llama"]["config"], tensors_of("llama"), file_type("F32"), NAME, readme, None, *said)
        return {key.name: key.value for key in keys if key.name.startswith(("general.license", "general.base_model"))}

    card = "---\nlicense: mit\nbase_model: me/Tuned-3B-v2\n---\n"
    assert told(README, "me/Tuned-3B-v2", "mit") == told("", "me/Tuned-3B-v2", "mit") == told(card)
    assert told(card)["general.base_model.0.repo_url"] == "https://huggingface.co/me/Tuned-3B-v2"
    assert told(card)["general.license"] == "mit"


def test_a_hub_id_names_the_model_and_its_owner():
    config = GOLDEN["llama"]["config"] | {"_name_or_path": "some-org/Nice-3B-Instruct"}
    keys = {key.name: key.value for key in metadata(config, tensors_of("llama"), file_type("Q4_K_M"), "elsewhere")}
    assert keys["general.name"] == "Nice 3B Instruct"
    assert keys["general.organization"] == "Some Org"
    assert keys["general.file_type"] == 15
    config["_name_or_path"] = "/home/somebody/models/secret"
    keys = {key.name: key.value for key in metadata(config, tensors_of("llama"), file_type("Q4_K_M"), "elsewhere")}
    assert keys["general.name"] == "Elsewhere"
    assert not any("secret" in str(value) for value in keys.values())


@pytest.mark.parametrize(
    "readme",
    [
        "",
        "# no front matter",
        "---\n- a list\n---\n",
        "---\nlicense: [1, {a: b}]\nbase_model: {x: y}\nlanguage: 7\ntags: null\n---\n",
        "---\na: &a [x, x]\nb: &b [*a, *a]\nlicense: *c\n---\n",
        '---\nlicense: "a\\u001bb"\n---\n',
    ],
)
def test_a_card_that_says_nothing_useful_adds_nothing(readme):
    assert keys_of("llama", readme=readme) == keys_of("llama")


def test_sampling_is_that_of_the_generation_config(tmp_path):
    generation = {"temperature": 0.5, "top_p": 0.75, "top_k": 20, "do_sample": True, "min_p": "low"}
    found = written(tmp_path / "model.gguf", "llama", generation=generation)
    assert {name: found[name] for name in found if "sampling" in name} == {
        "general.sampling.top_k": [20, "INT32"],
        "general.sampling.temp": [0.5, "FLOAT32"],
        "general.sampling.top_p": [0.75, "FLOAT32"],
    }


def test_the_keys_have_a_fixed_order():
    config = GOLDEN["mixtral"]["config"]
    backwards = dict(reversed(list(config.items())))
    keys = [metadata(item, tensors_of("mixtral"), file_type("Q8_0"), NAME, README) for item in (config, backwards)]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("stretched", [{"factor": 4.0}, {"factor": 4.0, "attention_factor": 1.5, "beta_slow": 2}])
def test_yarn_without_the_trained_length_takes_that_of_the_model(stretched):
    config = GOLDEN["qwen2"]["config"] | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **stretched}}
    keys = {key.name: key.value for key in metadata(config, tensors_of("qwen2"), file_type("F16"), NAME)}
    assert keys["qwen2.rope.scaling.type"] == "yarn"
    assert keys["qwen2.rope.scaling.original_context_length"] == 128
    assert keys.get("qwen2.rope.scaling.yarn_attn_factor") == stretched.get("attention_factor")
    assert keys.get("qwen2.rope.scaling.yarn_beta_slow") == stretched.get("beta_slow")


@pytest.mark.parametrize("scaling", [{"rope_type": "linear"}, {"rope_type": "yarn", "factor": "four"}])
def test_a_scaling_without_a_factor_is_refused(scaling):
    config = GOLDEN["qwen2"]["config"] | {"rope_parameters": scaling}
    with pytest.raises(CheckpointError, match="factor"):
        metadata(config, tensors_of("qwen2"), file_type("F16"), NAME)


def test_gemma_3_has_as_many_tokens_as_rows_are_kept():
    assert keys_of("gemma3")["gemma3.vocab_size"].value == 90


def test_what_a_mixture_has_to_know():
    assert facts(GOLDEN["mixtral"]["config"], importance=True) == Facts("llama", 2, 4, 2, 4, True)
    assert facts(GOLDEN["gpt2"]["config"], importance=False) == Facts("gpt2", 2, 4, 4, 0, False)


@pytest.mark.parametrize(
    ("model", "changes", "count"),
    [
        ("mistral", {"sliding_window": 64}, 1),
        ("mistral", {"sliding_window": 128}, 0),
        ("mistral", {"sliding_window": None}, 0),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}, 0),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True}, 1),
        ("gemma2", {"sliding_window": 8}, 0),
    ],
)
def test_a_window_that_llama_cpp_does_not_know_is_noted(model, changes, count):
    assert len(notes(GOLDEN[model]["config"] | changes)) == count
