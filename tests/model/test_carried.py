"""Layers that get more than hidden states from others run alone as they do in the model."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ggufmodels import small_config
from llmcompress.calib.pack import save
from llmcompress.errors import CheckpointError
from llmcompress.model.carried import Carried, HandedOn
from streaming import LENGTH, ids, observed, reference_logits, streamed, streamed_logits

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from zoo import config_of

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
    ("zamba", {}),  # the embeddings enter every layer
    ("zamba2", {}),
    ("zaya", {}),  # routers look at the states of the ones before
    ("hy_v4", {"index_topk": 8}),  # tokens found by one layer are those that the next looks at; streams
    ("glm_moe_dsa", {"index_topk": 8, "indexer_types": ["full", "shared", "full", "shared"]}),
    ("deepseek_v4", {}),  # a layer routes by the tokens themselves; streams
]


@pytest.mark.parametrize(("kind", "config"), CASES)
def test_layers_run_one_by_one_in_batches_as_in_the_model(kind, config, random_model_dir):
    if "hidden_size" not in config:
        config = {**config_of(kind).to_dict(), **config}
        del config["dtype"]
    path = random_model_dir(kind, dtype="float32", **config)
    tokens = ids(5)
    truth = reference_logits(path, tokens)
    assert truth.std() > 0.01
    assert torch.allclose(streamed_logits(streamed(path), tokens), truth, atol=1e-5)


def test_what_is_handed_on_keeps_its_type_beside_states_of_another(random_model_dir):
    """Routers of Zaya hand on bfloat16 in a model of that type, whose hidden states are float32 all the same."""
    config = config_of("zaya").to_dict()
    del config["dtype"]
    path, tokens = random_model_dir("zaya", dtype="float32", **config), ids(2)
    model = streamed(path, dtype=torch.bfloat16)
    assert model.embed(tokens).dtype == torch.float32
    truth = reference_logits(path, tokens, dtype=torch.bfloat16)
    assert torch.equal(streamed_logits(model, tokens), truth)


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "deepseek_v4"])
def test_what_transformers_keeps_in_float32_is_so_in_layers_too(kind, random_model_dir):
    """Routers of the one, gates and mixtures of streams of the other."""
    config = config_of(kind).to_dict()
    del config["dtype"]
    path, tokens = random_model_dir(kind, dtype="float32", **config), ids(2)
    truth = reference_logits(path, tokens, dtype=torch.bfloat16)
    assert torch.equal(streamed_logits(streamed(path, dtype=torch.bfloat16), tokens), truth)


class Layer(torch.nn.Module):
    def forward(self, hidden_states, more=None, *, other=None):
        return hidden_states, more


def test_whole_numbers_and_vectors_travel_in_rows_of_every_type():
    """What is made of the tokens reaches each layer that gets it, and what one hands on the next alone."""
    carried, tokens = Carried([Layer(), Layer(), Layer()]), torch.Size((1, 4))
    hidden, found = torch.randn(1, 4, 8), torch.tensor([[0, 255, 65536, 256**3 - 1]])
    vectors = torch.arange(12.0).view(1, 4, 3)
    calls = [
        ((), {"other": found}),
        ((HandedOn(1),), {"other": vectors}),
        ((HandedOn(1),), {"other": found}),
    ]
    others = [
        ((), {"other": found + 1}),
        ((HandedOn(1),), {"other": vectors + 1}),
        ((HandedOn(1),), {"other": found + 1}),
    ]
    assert carried.learn(tokens, hidden, calls, others)
    carried.see_handed(tokens, (hidden, torch.zeros(1, 4, 2, dtype=torch.int64)))
    plain = [((), {"other": None}), ((None,), {"other": None}), ((None,), {"other": None})]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = carried.packed(hidden.to(dtype), calls)
        assert rows.shape == (1, 4, 8 + 3 + 3 + 2 * 3)
        states, call = carried.opened(0, rows, plain[0])
        assert torch.equal(states, hidden.to(dtype))
        assert torch.equal(call[1]["other"], found)
        handed = torch.tensor([[[1, 70000]] * 4])
        rows = carried.closed(0, rows, (states, handed), call)
        _, call = carried.opened(1, rows, plain[1])
        assert torch.equal(call[0][0], handed)
        assert torch.equal(call[1]["other"], vectors)  # small whole numbers, in the type that they were given in
        _, call = carried.opened(2, carried.closed(1, rows, (states, handed + 1), call), plain[2])
        assert torch.equal(call[0][0], handed + 1)
        with pytest.raises(CheckpointError, match="layer 1 hands on something else"):
            carried.closed(1, rows, (states, None), call)
        random = carried.random(rows, torch.Generator().manual_seed(0))
        assert not torch.equal(random[..., :8], rows[..., :8])
        assert torch.equal(random[..., 8:11], rows[..., 8:11])
        assert torch.equal(random[..., 14:], rows[..., 14:])


@pytest.mark.parametrize(("kind", "config"), CASES[:2])
def test_what_a_layer_gets_of_its_own_is_carried_once(kind, config, random_model_dir):
    model = streamed(random_model_dir(kind, dtype="float32", **config))
    rows = model.embed(ids(2))
    keys = (
        2 * 16 * config["num_key_value_heads"] * len(set(config["layer_types"])) * bool(config["num_kv_shared_layers"])
    )
    own = config["num_hidden_layers"] * config["hidden_size_per_layer_input"]
    assert rows.shape[-1] == model.streams * config["hidden_size"] + own + keys


@pytest.mark.parametrize("kind", ["zamba", "gemma3n_text"])
def test_a_first_text_of_one_token_repeated_tells_as_much(kind, random_model_dir):
    config = {"zamba": config_of("zamba").to_dict(), "gemma3n_text": STREAMS}[kind]
    path = random_model_dir(kind, **{**config, "dtype": "float32"})
    tokens = torch.cat([torch.full((1, LENGTH), 7), ids(2)])
    assert torch.allclose(streamed_logits(streamed(path), tokens), reference_logits(path, tokens), atol=1e-5)


@pytest.mark.parametrize("value", [torch.randn(1, 2, 4, 4), {"mask": torch.randn(4)}])
def test_what_depends_on_the_tokens_in_another_way_is_refused(value):
    """A layer that is called with more than can be carried would otherwise silently run on another text."""
    other = {"mask": torch.randn(4)} if isinstance(value, dict) else value + 1
    carried = Carried([Layer()])
    hidden = torch.randn(1, 4, 8)
    assert not carried.learn(torch.Size((1, 4)), hidden, [((value,), {})], [((value,), {})])
    with pytest.raises(CheckpointError, match="made of the tokens"):
        carried.learn(torch.Size((1, 4)), hidden, [((value,), {})], [((other,), {})])
    assert carried.learn(torch.Size((1, 4)), hidden, [((HandedOn(1),), {})], [((HandedOn(1),), {})])
    with pytest.raises(CheckpointError, match="handed on"):
        carried.see_handed(torch.Size((1, 4)), (hidden, None))


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
