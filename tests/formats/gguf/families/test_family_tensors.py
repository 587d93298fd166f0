"""Tensors of GGUF files are those that llama.cpp's converter makes, as scripts/interop/gguf_converter.py recorded them.

Where rows change their order, what llama.cpp computes from them is compared with what transformers does.
"""

import hashlib
import json
from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ggufmodels import made_values
from llmcompress.errors import CheckpointError, PlanError
from llmcompress.formats.gguf.names import gguf_tensors
from llmcompress.formats.gguf.tensors import convert, parted, pieces, rotary_pairs, stretch
from llmcompress.store.headers import read_headers

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "gguf_converter.json").read_text())
FAMILIES = [model for model in GOLDEN if " " not in model]
VOCABULARY = 90


def tensors_of(model, source=None, **changes):
    config = {**GOLDEN[model]["config"], **changes}
    source = GOLDEN[model]["source"] if source is None else source
    config = {key: value for key, value in config.items() if value != "absent"}
    return gguf_tensors(config, list(source.items()), VOCABULARY)


def reader(model):
    return lambda name: made_values(name, GOLDEN[model]["source"][name])


@pytest.mark.parametrize("model", GOLDEN)
def test_names_shapes_and_values_are_those_of_the_converter(model):
    wanted = GOLDEN[model]["tensors"]
    made = {tensor.name: tensor for tensor in tensors_of(model)}
    assert {name: list(tensor.shape) for name, tensor in made.items()} == {
        name: item[0] for name, item in wanted.items()
    }
    for name, tensor in made.items():
        found = convert(tensor, reader(model))
        assert found.dtype == torch.float32
        assert tuple(found.shape) == tensor.shape
        if tensor.values is None:  # computed ones: see below
            assert hashlib.sha256(found.numpy().tobytes()).hexdigest()[:16] == wanted[name][1], name


@pytest.mark.parametrize("model", FAMILIES)
def test_every_tensor_of_the_checkpoint_is_used_once(model):
    used = [
        name for tensor in tensors_of(model) if tensor.rows is None or tensor.rows.first == 0 for name in tensor.sources
    ]
    left_out = set(GOLDEN[model]["source"]) - set(used)
    assert len(used) == len(set(used))
    assert left_out <= {"lm_head.weight"}


def test_the_order_is_fixed_whatever_that_of_the_checkpoint():
    source = GOLDEN["llama"]["source"]
    backwards = dict(reversed(list(source.items())))
    assert tensors_of("llama", backwards) == tensors_of("llama")
    names = [tensor.name for tensor in tensors_of("llama")]
    assert names[:4] == ["output.weight", "output_norm.weight", "token_embd.weight", "blk.0.attn_k.weight"]
    layers = [int(name.split(".")[1]) for name in names if name.startswith("blk.")]
    assert layers == sorted(layers)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "mixtral", "gemma3_text"])
def test_saved_models_are_read_as_they_lie_on_disk(family, random_model_dir):
    scalar = {"query_pre_attn_scalar": 16} if family.startswith("gemma") else {}
    headers = read_headers(random_model_dir(family, **scalar))
    source = [(name, stored.spec.shape) for name, stored in headers.tensors.items()]
    made = gguf_tensors(headers.config, source)
    known = set(gguf.TENSOR_NAMES.values())
    for tensor in made:
        number = tensor.name.split(".")[1] if tensor.name.startswith("blk.") else ""
        role = tensor.name.removesuffix(".weight").removesuffix(".bias").replace(f"blk.{number}.", "blk.{bid}.")
        assert role in known


@pytest.mark.parametrize("model", ["llama", "gpt2", "gpt_neox", "gemma2"])
def test_a_checkpoint_may_lack_the_prefix_of_the_base_model(model):
    prefix = {"gpt2": "transformer.", "gpt_neox": "gpt_neox."}.get(model, "model.")
    short = {name.removeprefix(prefix): shape for name, shape in GOLDEN[model]["source"].items()}
    found = tensors_of(model, short)
    assert [(tensor.name, tensor.shape) for tensor in found] == [(item.name, item.shape) for item in tensors_of(model)]
    assert {name for tensor in found for name in tensor.sources} <= set(short)


def test_masks_and_tables_of_old_checkpoints_are_left_out():
    extra = {
        "transformer.h.0.attn.bias": [1, 1, 128, 128],
        "transformer.h.1.attn.masked_bias": [],
    }
    assert tensors_of("gpt2", GOLDEN["gpt2"]["source"] | extra) == tensors_of("gpt2")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": [8]}
    assert tensors_of("llama", GOLDEN["llama"]["source"] | extra) == tensors_of("llama")


# ---- what permutations mean ----


def rotated_halves(x, theta):
    """transformers: value j of a head is turned with value j + half. x: [heads, tokens, head_dim]."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1]).view(-1, 1) * theta ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def rotated_neighbours(x, theta):
    """llama.cpp in its architecture llama: value 2j is turned with value 2j + 1."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1]).view(-1, 1) * theta ** (-torch.arange(half) / half)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1).flatten(-2)


def test_permuted_queries_and_keys_give_the_same_scores_with_neighbouring_rotation():
    config, read = GOLDEN["llama"]["config"], reader("llama")
    heads, pairs, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    x = torch.randn(7, config["hidden_size"], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    made = {tensor.name: convert(tensor, read).double() for tensor in tensors_of("llama")}

    def scores(q, k, rotated):
        q = rotated((x @ q.T).view(7, heads, size).transpose(0, 1), 1e4)
        k = rotated((x @ k.T).view(7, pairs, size).transpose(0, 1), 1e4).repeat_interleave(heads // pairs, 0)
        return q @ k.transpose(1, 2)

    path = "model.layers.0.self_attn"
    ours = scores(made["blk.0.attn_q.weight"], made["blk.0.attn_k.weight"], rotated_neighbours)
    theirs = scores(read(f"{path}.q_proj.weight").double(), read(f"{path}.k_proj.weight").double(), rotated_halves)
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_parted_queries_keys_and_values_are_those_of_each_head():
    config, read = GOLDEN["gpt_neox"]["config"], reader("gpt_neox")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    name = "gpt_neox.layers.1.attention.query_key_value"
    made = {tensor.name: convert(tensor, read) for tensor in tensors_of("gpt_neox")}
    for kind in ("weight", "bias"):
        each = read(f"{name}.{kind}").view(heads, 3, hidden // heads, -1)
        thirds = made[f"blk.1.attn_qkv.{kind}"].view(3, heads, hidden // heads, -1)
        for part in range(3):
            assert torch.equal(thirds[part], each[:, part])


def test_llama_3_factors_slow_frequencies_as_transformers_does():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(**GOLDEN["llama 3"]["config"])
    slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    half = config.head_dim // 2
    plain = config.rope_parameters["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
    for model in ("llama 3", "llama 3, old config"):
        (factors,) = (tensor.values for tensor in tensors_of(model) if tensor.name == "rope_freqs.weight")
        assert torch.allclose(plain / torch.tensor(factors), slowed.double(), rtol=1e-6)
        assert min(factors) == 1.0
        assert max(factors) == 8.0
        assert any(1 < factor < 8 for factor in factors)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5))
def test_rows_are_a_permutation_that_the_index_tells(heads, half, extra):
    for rows in (rotary_pairs(heads, 2 * half), parted(heads, half)):
        assert sorted(rows.index().tolist()) == list(range(len(rows)))
    part = stretch(extra, half, extra + half)
    assert part.index().tolist() == list(range(extra, extra + half))
    assert len(part) == half


def test_the_index_says_where_the_rows_of_a_converted_matrix_come_from():
    (tensor,) = (tensor for tensor in tensors_of("llama") if tensor.name == "blk.0.attn_k.weight")
    source = reader("llama")(tensor.sources[0])
    assert torch.equal(convert(tensor, reader("llama")), source[tensor.rows.index()])
    assert not torch.equal(convert(tensor, reader("llama")), source)


# ---- experts ----


def fused(source):
    """The names and shapes of a checkpoint whose experts are three-dimensional tensors."""
    found = {name: shape for name, shape in source.items() if ".experts." not in name}
    for layer in range(2):
        found[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = [4, 2 * 32, 64]
        found[f"model.layers.{layer}.mlp.experts.down_proj"] = [4, 64, 32]
    return found


def test_fused_experts_give_the_same_tensors_as_separate_ones():
    read = reader("qwen3_moe")

    def read_fused(name):
        block, _, leaf = name.rpartition(".")
        if not block.endswith("experts"):
            return read(name)
        parts = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else ["down_proj"]
        return torch.stack([torch.cat([read(f"{block}.{e}.{part}.weight") for part in parts]) for e in range(4)])

    separate = tensors_of("qwen3_moe")
    together = tensors_of("qwen3_moe", fused(GOLDEN["qwen3_moe"]["source"]))
    assert [(tensor.name, tensor.shape) for tensor in together] == [(item.name, item.shape) for item in separate]
    for one, other in zip(separate, together, strict=True):
        assert torch.equal(convert(one, read), convert(other, read_fused))


def test_the_experts_of_a_stack_come_one_by_one():
    (stack,) = (tensor for tensor in tensors_of("mixtral") if tensor.name == "blk.1.ffn_down_exps.weight")
    assert stack.sources == tuple(f"model.layers.1.block_sparse_moe.experts.{e}.w2.weight" for e in range(4))
    parts = list(pieces(stack, reader("mixtral")))
    assert [tuple(part.shape) for part in parts] == [(64, 96)] * 4
    assert torch.equal(torch.stack([part.rows() for part in parts]), convert(stack, reader("mixtral")))


# ---- the head ----


@pytest.mark.parametrize("model", ["llama", "gemma2", "gpt2", "qwen2"])
def test_a_tied_head_is_left_out(model):
    source = GOLDEN[model]["source"] | {"lm_head.weight": [96, 64]}
    assert "output.weight" not in {tensor.name for tensor in tensors_of(model, source, tie_word_embeddings=True)}


def test_a_head_without_a_word_about_tying_is_kept():
    assert "output.weight" in {tensor.name for tensor in tensors_of("llama", tie_word_embeddings="absent")}


def test_what_is_tied_may_be_stored_as_the_head():
    source = GOLDEN["llama"]["source"]
    only_head = {name: shape for name, shape in source.items() if "embed_tokens" not in name}
    made = {tensor.name: tensor for tensor in tensors_of("llama", only_head, tie_word_embeddings=True)}
    assert made["token_embd.weight"].sources == ("lm_head.weight",)
    assert "output.weight" not in made


@pytest.mark.parametrize("model", ["gpt_neox", "olmo2"])
def test_a_tied_head_is_written_where_llama_cpp_asks_for_it(model):
    source = {
        name: shape for name, shape in GOLDEN[model]["source"].items() if not name.startswith(("embed_out", "lm_head"))
    }
    made = {tensor.name: tensor for tensor in tensors_of(model, source, tie_word_embeddings=True)}
    assert made["output.weight"].sources == made["token_embd.weight"].sources


def test_a_missing_head_is_refused():
    source = {name: shape for name, shape in GOLDEN["llama"]["source"].items() if name != "lm_head.weight"}
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight"):
        tensors_of("llama", source)


def test_an_untied_gemma_2_is_refused():
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has no place"):
        tensors_of("gemma2", GOLDEN["gemma2"]["source"] | {"lm_head.weight": [96, 64]}, tie_word_embeddings=False)


# ---- what is refused ----


def test_an_unknown_architecture_is_refused():
    with pytest.raises(CheckpointError, match="'gpt3' cannot be written as GGUF") as caught:
        tensors_of("llama", model_type="gpt3")
    assert "gpt2" in caught.value.hint
    with pytest.raises(CheckpointError, match="None cannot be written"):
        tensors_of("llama", model_type="absent")


@pytest.mark.parametrize("model", FAMILIES)
def test_every_missing_tensor_is_noticed(model):
    source = GOLDEN[model]["source"]
    for name in source:
        if name == "lm_head.weight" or (model == "qwen2" and name.endswith("bias")):  # optional for llama.cpp
            continue
        with pytest.raises(CheckpointError):
            tensors_of(model, {other: shape for other, shape in source.items() if other != name})


@pytest.mark.parametrize("model", FAMILIES)
def test_every_wrong_shape_is_noticed(model):
    source = GOLDEN[model]["source"]
    for name, shape in source.items():
        for axis in range(len(shape)):
            other = [extent + (axis == place) for place, extent in enumerate(shape)]
            with pytest.raises(CheckpointError):
                tensors_of(model, source | {name: other})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.0.self_attn.mystery.weight", "mystery.weight has no name in GGUF"),
        ("model.layers.2.mlp.up_proj.weight", "has no name in GGUF"),
        ("model.layers.0.mlp.experts.0.up_proj.weight", "1 experts are like"),
        ("model.norm.bias", "has no place"),
        ("layers.0.mlp.up_proj.weight", "are the same one"),
    ],
)
def test_a_tensor_without_a_place_is_named(name, message):
    with pytest.raises(CheckpointError, match=message):
        tensors_of("llama", GOLDEN["llama"]["source"] | {name: [96, 64]})


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("llama", {"num_hidden_layers": 3}),
        ("llama", {"num_hidden_layers": 1}),
        ("llama", {"num_hidden_layers": 10**9}),
        ("llama", {"num_attention_heads": 8}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"head_dim": 8}),
        ("llama", {"vocab_size": 95}),
        ("llama", {"hidden_size": 32}),
        ("llama", {"intermediate_size": "absent"}),
        ("llama", {"hidden_size": True}),
        ("llama", {"rms_norm_eps": "small"}),
        ("llama", {"rope_parameters": [1]}),
        ("llama 3", {"rope_parameters": {"rope_type": "llama3", "factor": 8}}),
        ("mixtral", {"num_local_experts": 8}),
        ("qwen3_moe", {"moe_intermediate_size": 64}),
        ("gpt2", {"n_positions": 64}),
        ("phi3 long", {"rope_parameters": {"rope_type": "longrope", "long_factor": [1], "short_factor": [1]}}),
    ],
)
def test_a_config_that_is_not_that_of_the_weights_is_refused(model, changes):
    with pytest.raises(CheckpointError):
        tensors_of(model, **changes)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
        ("qwen2", {"rope_parameters": {"rope_type": "llama3"}}),
        ("qwen2", {"head_dim": 32}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("gemma2", {"query_pre_attn_scalar": 256}),
        ("gemma2", {"layer_types": ["full_attention", "full_attention"]}),
        ("gemma3", {"sliding_window_pattern": 2}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt_neox", {"attention_bias": False}),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(model, changes):
    with pytest.raises(PlanError):
        tensors_of(model, **changes)
