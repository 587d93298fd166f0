"""Layers that get more than hidden states from others run alone as they do in the model."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ggufmodels import small_config
from llmcompress.calib.pack import save
from streaming import LENGTH, ids, observed, reference_logits, streamed, streamed_logits

SLIDING, FULL = "sliding_attention", "full_attention"
STREAMS = {  # of Gemma 3n, whose hidden states are four
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 96, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 16,
    "laurel_rank": 32, "sliding_window": 8, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0], "pad_token_id": 0,
}  # fmt: skip
SHORT = ["--group-size", 16, "--samples", 6, "--length", LENGTH]
CASES = [
    ("gemma3n_text", STREAMS),
    ("gemma3n_text", {**STREAMS, "num_kv_shared_layers": 0}),
    ("gemma4_text", small_config("gemma4_text")),
    ("gemma4_text", {**small_config("gemma4_text"), "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
]


@pytest.mark.parametrize(("kind", "config"), CASES)
def test_layers_run_one_by_one_in_batches_as_in_the_model(kind, config, random_model_dir):
    path = random_model_dir(kind, dtype="float32", **config)
    tokens = ids(5)
    assert torch.allclose(streamed_logits(streamed(path), tokens), reference_logits(path, tokens), atol=1e-5)


def test_what_mixes_streams_is_never_rounded(random_model_dir):
    seen = observed(random_model_dir("gemma3n_text", **STREAMS))
    mixing = {f"altup.{name}" for name in ("modality_router", "prediction_coefs", "correction_coefs")}
    assert {linear.path for linear in seen.never} == mixing
    assert {"laurel.linear_left", "self_attn.q_proj", "mlp.down_proj"} <= {linear.path for linear in seen.linears}


def packed(folder):
    """A file of token ids."""
    file = folder / "ids.safetensors"
    save(ids(6), file)
    return file


def test_what_is_left_for_later_layers_is_there_where_modules_are_not_run_again(main, random_model_dir, tmp_path):
    """Attention that ends in a matrix runs once for all of its stages, unless later layers wait for what it leaves."""
    source = random_model_dir("gemma3n_text", **STREAMS)
    out = tmp_path / "out"
    assert main("gptq", source, *SHORT, "--calibration", packed(tmp_path), "--output", out) == 0
    assert main("verify", out, "--source", source) == 0


def test_keys_that_no_layer_uses_are_rounded_and_change_nothing_else(main, random_model_dir, tmp_path):
    """Published checkpoints of Gemma 3n hold keys and values of layers that take those of earlier ones."""
    made = random_model_dir("gemma3n_text", **STREAMS)
    more = shutil.copytree(made, tmp_path / "more")
    stored = load_file(more / "model.safetensors")
    unused = {
        name.replace(".0.", f".{layer}."): value.clone()
        for layer in (2, 3)
        for name, value in stored.items()
        if name.startswith("model.layers.0.self_attn.") and name.split(".")[4] in ("k_proj", "v_proj", "k_norm")
    }
    save_file(stored | unused, more / "model.safetensors", metadata={"format": "pt"})
    found = []
    for source in (made, more):
        out = tmp_path / f"out-{len(found)}"
        assert main("gptq", source, *SHORT, "--calibration", packed(tmp_path), "--output", out) == 0
        assert main("verify", out, "--source", source) == 0
        found.append({name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()})
    without, beside = found
    assert {name.rpartition(".")[0] for name in beside.keys() - without.keys()} == {
        name.removesuffix(".weight") for name in unused
    }
    assert all(torch.equal(beside[name], value) for name, value in without.items())
