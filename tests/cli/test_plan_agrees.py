"""A plan says no exactly where the run would, and the run says it before it reads a tensor."""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest

from llmcompress.store.checkpoint import Checkpoint

WEIGHTS = "model.safetensors"
SMALL = ["--samples", "2", "--length", "16"]
GPTQ = ["gptq", "MODEL", "--bits", "4", "--group-size", "32", *SMALL]
RTN = ["rtn", "MODEL", "--bits", "4", "--group-size", "32"]
AWQ = ["awq", "MODEL", "--bits", "4", "--group-size", "32", *SMALL]
GGUF = ["gguf", "MODEL", "--type", "Q4_0"]
DEPTH = ["depth", "MODEL", "--drop", "1", "--keep-first", "0", "--keep-last", "0", *SMALL]
WIDTH = ["width", "MODEL", "--ratio", "0.25", "--multiple-of", "16", *SMALL]
ROW = '{"messages": [{"role": "user", "content": "hello"}]}\n'
SELF = [*GPTQ, "--calibration", "self"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, random_model_dir, tiny_model_dir):
    """A small model that every command takes. Read-only."""
    path = tmp_path_factory.mktemp("whole") / "model"
    shutil.copytree(random_model_dir("llama", vocab_size=1200), path)
    for file in tiny_model_dir.iterdir():
        if file.name not in ("config.json", WEIGHTS):
            shutil.copy(file, path / file.name)
    return path


@pytest.fixture
def model(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture
def agree(main, monkeypatch, capsys, tmp_path):
    """agree(command): the exit code of both `plan` and the run; a refusal reads nothing and leaves nothing."""
    read, reads = Checkpoint.read, []
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: reads.append(name) or read(self, name))

    def codes(command, *more):
        words = [tmp_path / "model" if word == "MODEL" else word for word in command]
        words += ["-o", tmp_path / "out", *more]
        before = sorted(tmp_path.rglob("*"))
        planned = main(*words, "--dry-run")
        assert sorted(tmp_path.rglob("*")) == before
        assert not reads
        capsys.readouterr()
        ran = main(*words, "-q")
        said = capsys.readouterr().err
        assert (planned, ran) in ((0, 0), (2, 2)), said
        if ran == 2:
            assert not reads, said
            assert sorted(tmp_path.rglob("*")) == before, said
            assert len([line for line in said.splitlines() if line.startswith("error: ")]) == 1, said
        return ran

    return codes


def config(**changes):
    def change(model):
        data = {**json.loads((model / "config.json").read_text()), **changes}
        (model / "config.json").write_text(json.dumps({key: item for key, item in data.items() if item is not ...}))

    return change


def write(name, text):
    return lambda model: (model / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def tensors(change):
    """Rewrite the weights by a function of the header without offsets: name to (dtype, shape)."""

    def rewrite(model):
        raw = (model / WEIGHTS).read_bytes()
        header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
        header.pop("__metadata__", None)
        made, end = {}, 0
        for name, (kind, shape) in change({n: (i["dtype"], i["shape"]) for n, i in header.items()}).items():
            count = 4 if kind == "F32" else 2
            for extent in shape:
                count *= extent
            made[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + count]}
            end += count
        text = json.dumps(made).encode()
        (model / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + b"\0\x3c" * (end // 2))

    return rewrite


def renamed(old, new):
    return tensors(lambda found: {name.replace(old, new): item for name, item in found.items()})


def without(part):
    return tensors(lambda found: {name: item for name, item in found.items() if part not in name})


def reshaped(part, shape):
    return tensors(lambda found: {n: (item[0], shape) if part in n else item for n, item in found.items()})


def extra_layer(found):
    more = {n.replace("layers.1.", "layers.2."): item for n, item in found.items() if "layers.1." in n}
    return {**found, **more}


def link(name, target):
    def make(model):
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(target)

    return make


def folder(name):
    def make(model):
        path = model / name
        if path.exists():
            path.unlink()
        path.mkdir(parents=True)
        (path / "inside").touch()

    return make


def sparse(name, size=1 << 40):
    def make(model):
        (model / name).touch()
        os.truncate(model / name, size)

    return make


def beside(name, make=Path.touch):
    return lambda model: make(model.parent / name)


def foreign(path):
    path.mkdir()
    (path / "mine.txt").touch()


def several(*changes):
    return lambda model: [change(model) for change in changes]


CODE = several(
    config(auto_map={"AutoModel": "its.Model"}), write("its.py", "from . import other\n"), write("other.py", "x = 1\n")
)

OWN_HEAD = several(
    config(tie_word_embeddings=False), tensors(lambda found: {**found, "lm_head.weight": ("BF16", [1200, 64])})
)

REFUSED = {
    # side files
    "processor_config": (write("processor_config.json", "{"), GPTQ),
    "processor_config to round": (write("processor_config.json", "{"), RTN),
    "processor_config for depth": (write("processor_config.json", "{"), DEPTH),
    "processor_config for width": (write("processor_config.json", "{"), WIDTH),
    "processor_config for awq": (write("processor_config.json", "{"), AWQ),
    "preprocessor_config": (write("preprocessor_config.json", "[1]"), RTN),
    "tokenizer_config": (write("tokenizer_config.json", "{"), RTN),
    "tokenizer_config of a list": (write("tokenizer_config.json", "[]"), RTN),
    "tokenizer_config not utf-8": (write("tokenizer_config.json", b'{"a": "\xff"}'), RTN),
    "generation_config": (write("generation_config.json", "{]"), RTN),
    "generation_config without end": (write("generation_config.json", "[" * 100_000), RTN),
    "special_tokens_map": (write("special_tokens_map.json", ""), RTN),
    "added_tokens": (write("added_tokens.json", "\0"), RTN),
    "a template without end": (sparse("chat_template.jinja"), RTN),
    "a licence without end": (sparse("LICENSE"), RTN),
    "code without end": (several(CODE, sparse("other.py")), [*RTN, "--trust-remote-code"]),
    "a link out": (link("LICENSE", "/etc/hostname"), RTN),
    "a template that leads out": (link("chat_template.jinja", "/etc/hostname"), GPTQ),
    "a circle of links": (link("LICENSE", "LICENSE"), RTN),
    "an own code with a long name": (
        config(auto_map={"AutoModel": "x" * 300 + ".Model"}),
        [*RTN, "--trust-remote-code"],
    ),
    # tokenizer and text
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), GPTQ),
    "no tokenizer for awq": (lambda m: (m / "tokenizer.json").unlink(), AWQ),
    "no tokenizer for gguf": (lambda m: (m / "tokenizer.json").unlink(), GGUF),
    "no tokenizer to sample": (lambda m: (m / "tokenizer.json").unlink(), SELF),
    "no tokenizer for depth": (lambda m: (m / "tokenizer.json").unlink(), DEPTH),
    "no tokenizer for width": (lambda m: (m / "tokenizer.json").unlink(), WIDTH),
    "a cut tokenizer": (lambda m: os.truncate(m / "tokenizer.json", 1000), GPTQ),
    "a cut tokenizer for gguf": (lambda m: os.truncate(m / "tokenizer.json", 1000), GGUF),
    "windows beyond the positions": ((lambda m: None), [*GPTQ[:-1], "1000"]),
    "more text than there is": ((lambda m: None), [*GPTQ, "--samples", "1000000"]),
    "no such text": ((lambda m: None), [*GPTQ, "--calibration", "nowhere.txt"]),
    "no such field": (beside("rows.jsonl", lambda p: p.write_text("{}\n")), [*GPTQ, "--calibration", "rows.jsonl"]),
    "no usable template": (
        several(write("chat_template.jinja", "{% if"), beside("rows.jsonl", lambda p: p.write_text(ROW))),
        [*GPTQ, "--calibration", "rows.jsonl"],
    ),
    "an adapter beside": (write("adapter_config.json", "{}"), SELF),
    # config against weights
    "a layer more on disk": (tensors(extra_layer), GPTQ),
    "a layer more on disk to round": (tensors(extra_layer), RTN),
    "a layer less": (without("layers.1."), GPTQ),
    "no last norm": (without("model.norm"), RTN),
    "no norm of queries": (without("post_attention_layernorm"), GPTQ),
    "a norm of another width": (reshaped("input_layernorm", [32]), GPTQ),
    "the last norm of another width": (reshaped("model.norm", [63]), GPTQ),
    "a norm of two dimensions": (reshaped("input_layernorm", [1, 64]), GPTQ),
    "a matrix of another height": (reshaped("gate_proj", [64, 64]), GPTQ),
    "an embedding of another width": (reshaped("embed_tokens", [1200, 32]), GPTQ),
    "an embedding of three dimensions": (reshaped("embed_tokens", [1200, 64, 1]), GPTQ),
    "names of another family": (renamed("self_attn", "attention"), GPTQ),
    "biases asked for": (config(attention_bias=True), GPTQ),
    "biases asked for in awq": (config(attention_bias=True), AWQ),
    "biases asked for in depth": (config(attention_bias=True), DEPTH),
    "biases asked for in width": (config(mlp_bias=True), WIDTH),
    "an unknown activation": (config(hidden_act="gelo"), GPTQ),
    "rotary tables of no kind": (config(rope_parameters={"rope_type": "none"}), GPTQ),
    "rotary tables in words": (config(rope_parameters={"rope_type": "default", "rope_theta": "much"}), GPTQ),
    "a million numbers": (config(rope_parameters={"long_factor": [1.0] * 10**6}), GPTQ),
    "half a head": (config(head_dim=7), GPTQ),
    "an odd number of heads": (config(num_attention_heads=3), GPTQ),
    "an epsilon in words": (config(rms_norm_eps="small"), GPTQ),
    "another family": (config(model_type="opt"), GPTQ),
    "a family nobody knows": (config(model_type="lama"), GPTQ),
    "a family without text": (config(model_type="clip"), GPTQ),
    "codes of an embedding that no loader reads": (
        (lambda m: None),
        [*RTN, "--set", "model.embed_tokens: {skip: false}"],
    ),
    # places
    "foreign partial": (beside("out.partial", foreign), RTN),
    "foreign partial of depth": (beside("out.partial", foreign), DEPTH),
    "a partial that is a file": (beside("out.partial"), GPTQ),
    "a partial that is a link": (beside("out.partial", lambda p: p.symlink_to("model")), RTN),
    "foreign work": (beside("out.work", foreign), RTN),
    "foreign work to calibrate": (beside("out.work", foreign), GPTQ),
    "work that is a file": (beside("out.work"), RTN),
    "work of a damaged run": (
        beside("out.work", lambda p: (p.mkdir(), (p / "plan.json").write_text("{"))),
        GPTQ,
    ),
    "work of another run": (
        beside("out.work", lambda p: (p.mkdir(), (p / "plan.json").write_text('{"recipe": 1}'))),
        GPTQ,
    ),
    "work of another run to sample": (
        beside("out.work", lambda p: (p.mkdir(), (p / "plan.json").write_text('{"recipe": 1}'))),
        SELF,
    ),
    "an output that is there": (beside("out", foreign), GPTQ),
}

TAKEN = {
    "whole": ((lambda m: None), GPTQ),
    "whole to round": ((lambda m: None), RTN),
    "whole for awq": ((lambda m: None), AWQ),
    "whole for gguf": ((lambda m: None), GGUF),
    "whole for depth": ((lambda m: None), DEPTH),
    "whole for width": ((lambda m: None), WIDTH),
    "no tokenizer to round": (lambda m: (m / "tokenizer.json").unlink(), RTN),
    "a tokenizer.json that is a folder": (folder("tokenizer.json"), RTN),
    "a template that fails": (write("chat_template.jinja", "{{ 1 / 0 }}"), GPTQ),
    "odd entries": (config(architectures={"a": 1}, transformers_version=None, torch_dtype=3), RTN),
    "a readme that is none": (write("README.md", b"---\n\xff: [\n---\n"), RTN),
    "a readme without end": (sparse("README.md", 1 << 33), RTN),
    "a folder for a readme": (folder("README.md"), RTN),
    "its own code": (CODE, [*RTN, "--trust-remote-code"]),
    "an own code that does not parse": (several(CODE, write("other.py", "(" * 5000)), [*RTN, "--trust-remote-code"]),
    "an empty partial": (beside("out.partial", Path.mkdir), RTN),
    "an empty work": (beside("out.work", Path.mkdir), GPTQ),
    "tensors nobody asked for": (tensors(lambda found: {**found, "extra.weight": ("BF16", [4, 4])}), GPTQ),
    "a head of its own": (OWN_HEAD, GPTQ),
    "a head of its own to round": (OWN_HEAD, [*RTN, "--set", "lm_head: {skip: false, bits: 8}"]),
    "wide types": (tensors(lambda found: {n: ("F32", item[1]) for n, item in found.items()}), GPTQ),
}

ODD = [
    "bloom", "granitemoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "gpt_neo",
    "falcon", "hunyuan_v1_moe", "jamba", "lfm2_moe", "mamba", "minimax", "olmoe", "phimoe", "qwen2_moe", "zamba2",
]  # fmt: skip
FEWER = {
    "cohere2_moe": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96},
}


@pytest.mark.parametrize("name", REFUSED)
def test_both_refuse(name, agree, model, monkeypatch, tmp_path):
    spoil, command = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    spoil(model)
    assert agree(command) == 2


@pytest.mark.parametrize("name", TAKEN)
def test_both_take(name, agree, model):
    spoil, command = TAKEN[name]
    spoil(model)
    assert agree(command) == 0


@pytest.mark.parametrize("family", [*ODD[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in ODD[2:])])
def test_both_agree_on_families_without_a_declaration(family, agree, whole, random_model_dir, tmp_path):
    try:
        made = random_model_dir(family, vocab_size=1200, **FEWER.get(family, {}))
    except Exception as error:  # what transformers raises is not ours to foresee
        pytest.skip(f"transformers makes no small one: {error}")
    shutil.copytree(made, tmp_path / "model")
    for file in whole.iterdir():
        if file.name not in ("config.json", WEIGHTS):
            shutil.copy(file, tmp_path / "model")
    agree(GPTQ, "--format", "dense")


def test_a_budget_is_planned_beside_an_output_that_exists(main, capsys, shallow_model_dir, tmp_path):
    out, losses = tmp_path / "model.gguf", tmp_path / "losses.json"
    command = ["gguf", shallow_model_dir, "-o", out, "--bpw", 9, "--losses", losses, "--samples", 2, "--length", 16]
    assert main(*command) == 0
    capsys.readouterr()
    assert main("plan", *command) == 0
    assert "it exists already; to run this, give another file, or --overwrite" in capsys.readouterr().err
    before = out.read_bytes()
    assert main(*command) == 2
    assert out.read_bytes() == before


def test_a_plan_is_made_beside_an_output_and_says_so(main, capsys, tiny_model_dir, tmp_path):
    out = tmp_path / "out"
    command = ["rtn", tiny_model_dir, "--group-size", "64", "-o", out]
    assert main(*command) == 0
    assert f"next: llmcompress verify {out} --source {tiny_model_dir}" in capsys.readouterr().err
    assert main("plan", *command) == 0
    assert "it exists already; to run this, give another directory, or --overwrite" in capsys.readouterr().err
    assert main(*command) == 2
    assert main("plan", *command, "--overwrite", "--json") == 0
    assert "it exists already" not in capsys.readouterr().out
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "letter.txt").write_text("mine")
    assert main("plan", *command[:-1], tmp_path / "papers") == 2  # which no run would replace
