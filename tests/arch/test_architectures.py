"""Every declared architecture: section by section it is the model that transformers runs, and its facts are true."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from llmcompress import arch
from llmcompress.errors import CheckpointError
from llmcompress.model.experts import UnfusedExperts
from llmcompress.model.observe import observe
from llmcompress.model.skeleton import load_config, parameters_on_meta, skeleton
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.registry import discover
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.headers import read_headers
from streaming import LENGTH, ids, parameters, reference_logits, streamed, streamed_logits

SPECS = discover(arch, "ARCH")
MODEL_TYPES = [(name, model_type) for name, spec in SPECS.items() for model_type in spec.model_types]
SLIDING_AND_FULL = ["sliding_attention", "full_attention"]

# what families can differ in, beyond the tiny model of each declaration
VARIANTS = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"num_hidden_layers": 1}),
    ("llama", {"num_hidden_layers": 11}),
    ("llama", {"head_dim": 24, "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0,
               "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}),
    ("mistral", {"sliding_window": 8}),
    ("mistral", {"sliding_window": 64}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "layer_types": SLIDING_AND_FULL}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "layer_types": SLIDING_AND_FULL}),
    ("gemma2", {"sliding_window": 8, "layer_types": SLIDING_AND_FULL, "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 3.0}),
    ("gemma2", {"sliding_window": 64, "layer_types": SLIDING_AND_FULL, "tie_word_embeddings": False}),
    ("gemma3_text", {"sliding_window": 8, "layer_types": SLIDING_AND_FULL, "final_logit_softcapping": 3.0}),
    ("gemma3_text", {"sliding_window": 64, "layer_types": SLIDING_AND_FULL}),
    ("phi3", {"sliding_window": 8}),
    ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("gpt2", {"tie_word_embeddings": False}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("gpt_neox", {"tie_word_embeddings": True}),
    ("olmo2", {"attention_bias": True}),
    ("mixtral", {"sliding_window": 8}),
    ("qwen3_moe", {"mlp_only_layers": [0]}),
    ("qwen3_moe", {"norm_topk_prob": True, "num_hidden_layers": 3, "decoder_sparse_step": 2}),
]  # fmt: skip
ALL = [(model_type, {}) for _, model_type in MODEL_TYPES] + VARIANTS


def named(case):
    return "-".join([case[0], *(f"{key}={str(value)[:16]}" for key, value in case[1].items())])


@pytest.mark.parametrize("case", ALL, ids=named)
def test_sections_together_are_the_model_of_transformers(case, random_model_dir):
    model_type, overrides = case
    path = random_model_dir(model_type, **overrides)
    tokens = ids()
    truth = reference_logits(path, tokens, arch.find(model_type).attention)
    model = streamed(path)
    ours = streamed_logits(model, tokens)
    assert truth.std() > 0.1, "logits that hardly differ prove nothing"
    torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-5 * float(truth.abs().max()))
    assert all(parameter.is_meta for parameter in parameters(model))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_stored_type_is_read(dtype, random_model_dir):
    path = random_model_dir("llama", dtype=dtype)
    torch.testing.assert_close(streamed_logits(streamed(path), ids()), reference_logits(path, ids()))


def test_a_model_in_shards_is_the_same_model(random_model_dir):
    whole, shards = random_model_dir("qwen2"), random_model_dir("qwen2", shard="40KB")
    assert len(list(shards.glob("*.safetensors"))) > 3
    assert torch.equal(streamed_logits(streamed(whole), ids()), streamed_logits(streamed(shards), ids()))


@pytest.mark.parametrize("model_type", ["mistral", "phi3", "gemma3_text", "mixtral"])
def test_a_window_shorter_than_the_text_matters(model_type, random_model_dir):
    overrides = {"layer_types": SLIDING_AND_FULL} if model_type == "gemma3_text" else {}
    short, long = (random_model_dir(model_type, sliding_window=window, **overrides) for window in (8, 64))
    one, other = streamed_logits(streamed(short), ids()), streamed_logits(streamed(long), ids())
    assert torch.allclose(one[:, :8], other[:, :8], atol=1e-5)
    assert not torch.allclose(one[:, 8:], other[:, 8:], atol=1e-2)


@pytest.mark.parametrize("name", SPECS)
def test_the_declared_matrices_are_those_on_disk(name, random_model_dir):
    spec = SPECS[name]
    path = random_model_dir(name, **({"mlp_only_layers": [0]} if name == "qwen3_moe" else {}))
    config, headers = load_config(path), read_headers(path)
    model = skeleton(config, spec)
    experts = spec.expert_count(headers.config)
    for number, layer in enumerate(model.get_submodule(spec.layers).children()):
        matrices = {path: module for path, module in layer.named_modules() if isinstance(module, nn.Linear | Conv1D)}
        declared = {path: linear for linear in spec.linears for _, path, _ in spec.expand(linear, experts)}
        assert set(matrices) <= set(declared) | {linear.path for linear in spec.never}
        if spec.experts is None:
            assert set(declared) <= set(matrices)
        on_disk = set()
        for module_path, module in matrices.items():
            linear = declared[module_path]
            assert linear.conv1d == isinstance(module, Conv1D)
            stored = headers.tensors[f"{spec.layers}.{number}.{spec.disk_path(module_path)}.weight"].spec
            rows, columns = stored.shape[::-1] if linear.conv1d else stored.shape
            x = torch.zeros(columns, device="meta")
            assert module(x).shape == (rows,)  # [out, in] on disk, or [in, out] where so declared
            on_disk.add(stored.name)
        prefix = f"{spec.layers}.{number}."
        left = {n for n, t in headers.tensors.items() if n.startswith(prefix) and len(t.spec.shape) > 1} - on_disk
        assert left <= {f"{prefix}{spec.disk_path(router.path)}.weight" for router in spec.never}


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_unfused_experts_see_every_token_that_is_routed(model_type, random_model_dir):
    path = random_model_dir(model_type)
    model = streamed(path)
    counts = {}
    hidden = model.embed(ids())
    with model.layer(0) as layer:
        block = layer.get_submodule(model.spec.experts.paths[0])
        assert isinstance(block, UnfusedExperts)
        for number, expert in enumerate(block):
            see = lambda _, args, number=number: counts.__setitem__(number, len(args[0]))  # noqa: E731
            expert.gate_proj.register_forward_pre_hook(see)
        model.call(0, layer, hidden)
    assert sum(counts.values()) == hidden.shape[0] * LENGTH * model.config.num_experts_per_tok
    assert len(counts) > 1


def edit(source, target, change):
    """A copy of a model directory with changed tensors."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = change(load_file(target / "model.safetensors"))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_a_checkpoint_may_lack_the_prefix_of_the_base_model(random_model_dir, tmp_path):
    for model_type, prefix in (("gpt2", "transformer."), ("opt", "model."), ("llama", "model.")):
        path = random_model_dir(model_type)
        short = edit(
            path, tmp_path / model_type, lambda t, prefix=prefix: {n.removeprefix(prefix): v for n, v in t.items()}
        )
        assert torch.equal(streamed_logits(streamed(short), ids()), streamed_logits(streamed(path), ids()))


def test_tying_follows_the_tensors_as_in_transformers(random_model_dir, tmp_path):
    path = random_model_dir("llama", tie_word_embeddings=True)
    name, head = "model.embed_tokens.weight", "lm_head.weight"
    assert head not in read_headers(path).tensors

    both = edit(path, tmp_path / "both", lambda t: {**t, head: t[name].clone()})
    other = edit(path, tmp_path / "other", lambda t: {**t, head: -t[name]})
    alone = edit(path, tmp_path / "alone", lambda t: {(head if n == name else n): v for n, v in t.items()})
    for case, tied in ((path, True), (both, True), (other, False), (alone, True)):
        model = streamed(case)
        assert model.head_is_tied == tied
        torch.testing.assert_close(streamed_logits(model, ids()), reference_logits(case, ids()), rtol=1e-5, atol=1e-5)


def test_a_head_absent_from_the_file_is_the_embedding(random_model_dir, tmp_path):
    path = random_model_dir("llama")
    short = edit(path, tmp_path / "short", lambda t: {n: v for n, v in t.items() if n != "lm_head.weight"})
    tied = edit(path, tmp_path / "tied", lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].clone()})
    assert streamed(short).head_is_tied
    assert torch.equal(streamed_logits(streamed(short), ids()), streamed_logits(streamed(tied), ids()))


def test_weights_that_do_not_fit_the_config_are_refused_by_name(random_model_dir, tmp_path):
    path = random_model_dir("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    lacking = streamed(edit(path, tmp_path / "lacking", lambda t: {n: v for n, v in t.items() if n != name}))
    wrong = streamed(edit(path, tmp_path / "wrong", lambda t: {**t, name: t[name][:-1].clone()}))
    for model, words in ((lacking, "missing"), (wrong, r"\[95, 64\].*\[96, 64\]")):
        with pytest.raises(CheckpointError, match=f"{name}.*{words}"), model.layer(1):
            pass
        assert all(parameter.is_meta for parameter in parameters(model))  # what was read before is let go


def test_a_section_lets_go_of_its_weights_when_its_user_fails(random_model_dir):
    model = streamed(random_model_dir("gemma2"))
    with pytest.raises(ZeroDivisionError), model.layer(0):
        _ = 1 / 0
    with pytest.raises(ZeroDivisionError), model.outer(embed=True, head=True):
        _ = 1 / 0
    assert all(parameter.is_meta for parameter in parameters(model))


def test_only_one_section_is_in_memory(random_model_dir):
    path = random_model_dir("llama")
    model = streamed(path)
    model.embed(ids())
    with model.layer(1) as layer:
        assert not any(parameter.is_meta for parameter in layer.parameters())
        assert all(parameter.is_meta for parameter in [*model.layers[0].parameters(), *model.causal.parameters()])
    with model.outer(embed=False, head=True) as causal:
        assert causal.get_submodule("model.embed_tokens").weight.is_meta
        assert not causal.lm_head.weight.is_meta
    with model.outer(embed=True, head=False) as causal:
        assert not causal.get_submodule("model.embed_tokens").weight.is_meta
        assert causal.lm_head.weight.is_meta


def test_the_embedding_of_a_tied_model_is_read_once(random_model_dir):
    path = random_model_dir("llama", tie_word_embeddings=True)
    model = streamed(path)
    with model.outer(embed=True, head=True) as causal:
        assert causal.lm_head.weight is causal.model.embed_tokens.weight


def test_nothing_global_changes(random_model_dir):
    path = random_model_dir("qwen3_moe")
    config = load_config(path)
    before = copy.deepcopy(config.to_dict()), torch.get_rng_state(), nn.Module.register_parameter
    assert torch.get_default_dtype() == torch.float32
    streamed_logits(StreamedModel(Checkpoint(path), config, arch.find("qwen3_moe"), dtype=torch.bfloat16), ids())
    observe(config, ())
    assert config.to_dict() == before[0]
    assert config._attn_implementation_internal is None
    assert torch.equal(torch.get_rng_state(), before[1])
    assert nn.Module.register_parameter is before[2]
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    with pytest.raises(ZeroDivisionError), parameters_on_meta():
        _ = 1 / 0
    assert nn.Module.register_parameter is before[2]


def test_a_skeleton_larger_than_memory_takes_none(random_model_dir):
    config = load_config(random_model_dir("mixtral"))
    config.hidden_size, config.intermediate_size, config.num_local_experts = 1 << 16, 1 << 18, 64
    model = skeleton(config, arch.find("mixtral"))
    assert sum(parameter.numel() for parameter in model.parameters()) > 1e12
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_quantised_source_is_built_as_what_it_was(random_model_dir):
    config = load_config(random_model_dir("llama"))
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    assert isinstance(skeleton(config, arch.find("llama")).model.layers[0].mlp.up_proj, nn.Linear)
    assert config.quantization_config["bits"] == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "no-such-type"}, "no-such-type"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
    ],
)
def test_a_config_that_transformers_cannot_use_is_refused(change, words, random_model_dir, tmp_path):
    path = random_model_dir("llama")
    data = json.loads((path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=words):
        skeleton(load_config(tmp_path), arch.find("llama"))


def test_model_types_are_declared_once_and_found():
    declared = [model_type for _, model_type in MODEL_TYPES]
    assert len(set(declared)) == len(declared)
    assert all(model_type in arch.find(model_type).model_types for model_type in declared)
    assert arch.find("no-such-type") is None
