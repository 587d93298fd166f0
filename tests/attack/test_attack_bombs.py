"""Small inputs that ask for much time or memory: tokenizers, templates, configs, texts, and files without end."""

import json
import os
import shutil
import zipfile

import pytest
from attempts import LONG, Attempt

from rounds import in_turn

pytestmark = pytest.mark.slow

SHORT = ["--samples", "2", "--length", "16"]
GPTQ = ["gptq", "model", "-o", "out", "--bits", "4", "--group-size", "64", *SHORT]
PLAN, RTN = ["plan", *GPTQ], ["rtn", "model", "-o", "out", "--bits", "4", "--group-size", "64"]
GGUF = ["gguf", "model", "-o", "out", "--type", "Q4_0", "--modelfile"]
EVAL = ["eval", "model", "--length", "16", "--windows", "1"]
PACK = ["calib", "pack", "model", "-o", "ids.safetensors", *SHORT]
MODELFILE = ["plan", *GGUF]
READING = ["plan", "pack", "gguf", "eval"]
COMMANDS = {"plan": PLAN, "gptq": GPTQ, "rtn": RTN, "gguf": GGUF, "eval": EVAL, "pack": PACK}


def replace(content, count, pattern=None):
    item = {"type": "Replace", "pattern": pattern or {"String": "a"}, "content": content}
    return {"normalizer": {"type": "Sequence", "normalizers": [item] * count}}


def split(regex):
    return {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}}


TOKENIZERS = {
    **{f"times {width} to the {depth}": replace("a" * width, depth) for width, depth in
       ((2, 40), (10, 12), (50, 6), (1000, 4), (10**6, 2))},
    "of every letter": replace("e" * 1000, 3, {"Regex": "[a-z]"}),
    "of every place": replace("e" * 1000, 3, {"Regex": ""}),
    "a prefix": {"normalizer": {"type": "Prepend", "prepend": "a" * 5_000_000}},
    "a broken charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}},
    "a cut charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
    **{f"backtracking {regex}": split(regex) for regex in
       (r"(a|aa|[a-z]|[a-z ]+)+(?=\x01)", r"(\w+\s?)*\x01", r"([\s\S]*)*\x01", r"(.*)(.*)(.*)(.*)\x01",
        r"(?:(?:a?){50})a{50}\x01")},
    "no regex": split("(("),
    "many specials": {"post_processor": {"type": "TemplateProcessing", "pair": [], "special_tokens": {},
                      "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 100_000}},
    "deep": {"normalizer": json.loads('{"type":"Sequence","normalizers":[' * 60 + "]}" * 60)},
    "negative ids": {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
    "large ids": {"model": {"type": "BPE", "vocab": {"a": 2**31}, "merges": []}},
    "a merge of nothing": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}},
    "a unigram of nothing": {"model": {"type": "Unigram", "unk_id": 7, "vocab": []}},
    "truncation": {"truncation": {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9}},
    "padding": {"padding": {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": 10**9,
                "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}},
}  # fmt: skip
CONFIGS = {
    **{f"{key} {value:.0e}": {key: value} for value in (10**5, 10**8, 10**12, 10**18) for key in
       ("num_labels", "vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size", "max_position_embeddings",
        "num_attention_heads", "num_key_value_heads", "head_dim", "pretraining_tp")},
    "labels": {"num_labels": 10**9, "id2label": None},
    "layer types": {"layer_types": ["full_attention"] * 1_000_000},
    "rotary": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0] * 1_000_000,
               "short_factor": [1.0] * 32, "original_max_position_embeddings": 64}},
    "text": {"model_type": "gemma3", "text_config": {"num_labels": 10**9}},
    **{f"{kind} {key}": {"model_type": kind, key: 10**9} for kind, key in
       (("gpt2", "n_positions"), ("gpt_neox", "max_position_embeddings"), ("bloom", "n_layer"), ("mamba", "state_size"),
        ("mixtral", "num_local_experts"), ("qwen3_moe", "num_experts"), ("deepseek_v3", "n_routed_experts"),
        ("falcon", "num_kv_heads"), ("opt", "ffn_dim"), ("gpt_neo", "window_size"), ("gpt_neo", "num_layers"),
        ("deepseek_v3", "first_k_dense_replace"), ("jamba", "mamba_expand"), ("zamba2", "num_mem_blocks"))},
}  # fmt: skip
TEMPLATES = {
    "indent": "{{ messages | tojson(indent=10**9) }}",
    "repeated": "{{ 'a' * 10**10 }}",
    "list": "{{ [0] * 10**10 }}",
    "centred": "{{ 'a'.center(10**10) }}",
    "filled": "{{ '%10000000000d' % 1 }}",
    "formatted": "{{ '{:>9999999999}'.format(1) }}",
    "replaced": "{{ ('a' * 10**6).replace('a', 'a' * 10**5) }}",
    "joined": "{{ ('a' * 10**5) | join('b' * 10**6) }}",
    "power": "{{ 7 ** 10 ** 9 }}",
    "shown": "{{ 7 ** 10 ** 6 }}",
    "doubled": "{% set n = namespace(x='ab') %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "long": "{% for i in range(99999) %}{{ 'a' * 10**6 }}{% endfor %}",
    "itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "fans": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "wraps": "{{ ('a' * 10**7) | wordwrap(1) | indent(10**5) }}",
    "nested": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "brackets": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "slices": "{{ ('a' * 10**8) | batch(1) | list }}",
}
ROWS = '{"messages": [{"role": "user", "content": "hello"}]}\n' * 20
ENDLESS = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json",
           "special_tokens_map.json", "added_tokens.json", "LICENSE", "README.md", "vocab.json", "merges.txt",
           "model.safetensors.index.json", "processor_config.json", "additional_chat_templates/x.jinja"]  # fmt: skip


def endless(place, name, begin=b""):
    file = place / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(begin)
    os.truncate(file, 40 << 30)


def attempts(model, name, change, commands):
    """change: called with the folder, in which the model lies."""

    def prepare(place):
        shutil.copytree(model, place / "model")
        change(place)

    for label in commands:
        words = [*COMMANDS[label], "--calibration", "rows.jsonl"] if name.startswith("template") else COMMANDS[label]
        words = GGUF if label == "gguf" else words
        yield Attempt(
            f"{name} {label}",
            words,
            prepare,
            source="model",
            output="out" if label in ("gptq", "rtn", "gguf") else None,
            left=("out.work", "ids.safetensors"),
            seconds=45,
            verifies=False,
        )


def entries(name, changes):
    def change(place):
        file = place / "model" / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def test_tokenizers(attack, tiny_model_dir):
    attack("bombs in tokenizers", [
        attempt for number, (name, changes) in enumerate(TOKENIZERS.items())
        for attempt in attempts(tiny_model_dir, name, entries("tokenizer.json", changes), in_turn(READING, number, 2))
    ])  # fmt: skip


def test_configs(attack, tiny_model_dir):
    attack("bombs in configs", [
        attempt for number, (name, changes) in enumerate(CONFIGS.items())
        for attempt in attempts(tiny_model_dir, name, entries("config.json", changes),
                                in_turn(["plan", "eval", "rtn"], number))
    ])  # fmt: skip


@LONG
def test_templates(attack, tiny_model_dir):
    def change(text):
        def write(place):
            (place / "model" / "chat_template.jinja").write_text(text)
            (place / "rows.jsonl").write_text(ROWS)

        return write

    attack("bombs in templates", [
        attempt for name, text in TEMPLATES.items()
        for attempt in attempts(tiny_model_dir, f"template {name}", change(text), ["plan", "pack", "gguf"])
    ])  # fmt: skip


@LONG
def test_files_without_end(attack, tiny_model_dir):
    attack("files without end", [
        attempt for name in ENDLESS
        for attempt in attempts(
            tiny_model_dir, name, lambda place, name=name: endless(place / "model", name), [*READING, "rtn"]
        )
    ])  # fmt: skip


@LONG
def test_texts_without_end(attack, tiny_model_dir):
    def one(name, begin, place):
        shutil.copytree(tiny_model_dir, place / "model")
        endless(place, name, begin)

    attack("texts without end", [
        Attempt(f"{name} {label}", words, lambda place, name=name, begin=begin: one(name, begin, place),
                left=("out.work", "ids.safetensors"), seconds=45)
        for name, begin in (("x.txt", b"a"), ("x.md", b""), ("x.jsonl", b'{"text": "a'), ("x.parquet", b"PAR1"),
                            ("x.safetensors", b"\x10\0\0\0\0\0\0\0{}"))
        for label, words in (("plan", [*PLAN, "--calibration", name]), ("pack", [*PACK, "--calibration", name]),
                             ("eval", [*EVAL, "--text", name]))
    ])  # fmt: skip


@LONG
def test_archives(attack, tiny_model_dir):
    def packed(place, kind, repeats):
        shutil.copytree(tiny_model_dir, place / "model")
        shutil.copytree(tiny_model_dir, place / "out")
        head = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '<f8', 'fortran_order': False, 'shape': (250000000,), }"
        with zipfile.ZipFile(place / "out" / "transforms.npz", "w", kind) as file:
            for number in range(repeats):
                with file.open(f"a{number}.npy", "w", force_zip64=True) as entry:
                    entry.write(head.ljust(127) + b"\n")
                    for _ in range(200 if kind else 1):
                        entry.write(bytes(10_000_000))

    attack("bombs in archives", [
        Attempt(f"{label} {repeats}", ["verify", "out", "--source", "model"],
                lambda place, kind=kind, repeats=repeats: packed(place, kind, repeats))
        for label, kind in (("stored", zipfile.ZIP_STORED), ("packed", zipfile.ZIP_DEFLATED)) for repeats in (1, 2)
    ])  # fmt: skip
