"""Numbers that text or weights cannot stand: NaN and overflow in every stage, odd weights on every grid."""

import json
import shutil
from functools import partial

import pytest
from attempts import LONG, Attempt
from safetensors.torch import load_file, save_file

from rounds import in_turn

pytestmark = pytest.mark.slow

TEXT = ["--samples", 2, "--length", 16, "-q"]
IN_64 = ["--group-size", 64]
CALIBRATED = {
    "gptq": ["gptq", "--bits", 4, *IN_64],
    "gptq-codebook": ["gptq", "--type", "codebook", "--bits", 3, "--format", "codebook"],
    "nf4": ["nf4", "--calibration", "default"],
    "int8": ["int8", "--outliers", "topk"],
    "fp8-tensor": ["fp8", "--activations", "fp8-tensor"],
    "qoq": ["gptq", "--type", "progressive", "--format", "qoq", "--activations", "int8-token"],
    "awq": ["awq", *IN_64],
    "smoothquant": ["smoothquant"],
    "sparsegpt": ["sparsegpt", "--pattern", "2:4"],
    "wanda": ["wanda", "--sparsity", 0.5],
    "cache": ["rtn", "--bits", 8, *IN_64, "--kv-cache", "fp8"],
    "width": ["width", "--ffn", 256],
}
PLAIN = {
    "int2": ["rtn", "--bits", 2, *IN_64, "--asym"],
    "int4": ["rtn", "--bits", 4, *IN_64, "--format", "gptq"],
    "int8": ["rtn", "--bits", 8, "--group-size", -1],
    "fp8": ["fp8", "--activations", "none"],
    "nf4": ["nf4"],
    "absmax": ["int8"],
    "mxfp4": ["rtn", "--type", "mxfp4"],
    "codebook": ["rtn", "--type", "codebook", "--bits", 2, "--format", "codebook"],
    "pruned": ["magnitude", "--sparsity", 0.5],
    **{kind: ["gguf", "--type", kind] for kind in ("Q2_K", "Q4_K_M", "Q6_K", "Q8_0", "Q5_1", "IQ4_NL", "F16")},
}
FACTORS = (1e30, 1e-30, 1e38, 1e-39, 1e12, 1e-12, 1e6, 1e-6, 0.0, -0.0)
PLACES = ("q_proj", "down_proj", "embed_tokens", "input_layernorm")
VALUES = (float("nan"), float("inf"), float("-inf"), 0, -1, -1e-6, 1e30, 1e-45, 1e308, "NaN", None, True, [1.0])


def changed(change, model, place):
    """A copy of a model whose tensors of some names are multiplied, and whose config has other values."""
    factors, config = change
    shutil.copytree(model, place / "model")
    tensors = load_file(place / "model" / "model.safetensors")
    for name, tensor in tensors.items():
        for part, factor in factors.items():
            if part in name:
                tensors[name] = (tensor.float() * factor).to(tensor.dtype)
    save_file(tensors, place / "model" / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((place / "model" / "config.json").read_text())
    (place / "model" / "config.json").write_text(json.dumps({**said, **config}))


def attempt(name, command, change, model, *more, **expected):
    words = [command[0], "model", "-o", "out", *command[1:], *more]
    prepare = partial(changed, change, model)
    return Attempt(name, words, prepare, source="model", output="out", left=["out.work"], **expected)


@LONG
def test_odd_weights(attack, tiny_model_dir):
    attack(
        "odd weights",
        [
            attempt(f"{how} {place} {factor}", command, ({place: factor}, {}), tiny_model_dir, "-q")
            for row, (how, command) in enumerate(PLAIN.items())
            for column, factor in enumerate(FACTORS)
            for place in (PLACES[(row + column) % len(PLACES)],)
        ],
    )


@LONG
def test_overflow_in_every_stage(attack, tiny_model_dir):
    places = {"embed_tokens": 1e4, "up_proj": 1e4, "layers.1.mlp.down_proj": 1e6, "v_proj": 1e6, "k_proj": 1e5}
    kinds = ("float16", "bfloat16", "float32")
    attack(
        "overflow",
        [
            attempt(f"{how} {place} {kind}", command, ({place: factor}, {}), tiny_model_dir, *TEXT,
                    "--compute-dtype", kind)
            for row, (how, command) in enumerate(CALIBRATED.items())
            for column, (place, factor) in enumerate(places.items())
            for kind in dict.fromkeys(("float16", kinds[(row + column) % len(kinds)]))
        ],
    )  # fmt: skip


def test_numbers_of_a_config(attack, tiny_model_dir):
    rope = {"rope_type": "default", "rope_theta": 1e4}
    configs = [{key: value} for key in ("rms_norm_eps", "head_dim", "initializer_range") for value in VALUES]
    configs += [{"rope_parameters": {**rope, "rope_theta": value}} for value in VALUES]
    configs += [{"rope_parameters": {**rope, "rope_type": "linear", "factor": value}} for value in VALUES]
    attack(
        "numbers of a config",
        [
            attempt(f"{how} {config}", CALIBRATED[how], ({}, config), tiny_model_dir, *TEXT)
            for number, config in enumerate(configs)
            for how in in_turn(("gptq", "width"), number)
        ],
    )


def test_no_gate_passes_on_nothing(attack, tiny_model_dir):
    window = ["--length", 16, "--windows", 2, "-q"]
    gates = [f"{figure} {operator} {bound}" for figure in ("kl", "top1", "tv", "kl_max", "ref_perplexity")
             for operator in (">", "<", ">=", "<=") for bound in (-1e9, 1e9)]  # fmt: skip
    attempts, pairs = [], [("model", tiny_model_dir), (tiny_model_dir, "model"), ("model", "model")]
    for number, gate in enumerate(gates):
        for subject, reference in in_turn(pairs, number):
            factors = {("model.norm", "embed_tokens")[number % 2]: float("nan")}
            words = ["eval", subject, "--ref", reference, *window, "--fail-if", gate, "--json"]
            prepare = partial(changed, (factors, {}), tiny_model_dir)
            attempts.append(
                Attempt(f"{subject} {reference} {gate}", words, prepare, source="model", codes=frozenset({3}))
            )
    attack("gates", attempts)
