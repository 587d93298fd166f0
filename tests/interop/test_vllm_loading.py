"""vLLM itself loads what a plan says it loads, and computes what our reader does.

Its reading of config.json, its loaders and its fusing of matrices are its own; products that it has for GPUs alone are
stood in for (scripts/interop/vllm_standins.py), in float32 and with inputs as they are.
"""

from pathlib import Path

import pytest
import torch
from other_environment import python_of
from safetensors.torch import load_file, save_file
from vllm_venv import IDS, found_by_vllm

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import PlanError
from llmcompress.recipe import parse
from llmcompress.validate.load import load_whole

pytestmark = [pytest.mark.interop, pytest.mark.timeout(4000)]  # one process loads all checkpoints

CT, GPTQ, AWQ, MODELOPT, AUTO_ROUND = "compressed-tensors", "gptq", "awq", "modelopt", "auto-round"
W4 = {"bits": 4, "group_size": 64}
ROW = {"bits": 4, "group_size": -1}
W8 = {"bits": 8, "group_size": 64}
NVFP4 = {"type": "nvfp4"}
MXFP8 = {"type": "mxfp8", "bits": 8, "activations": "mxfp8"}
FP8, FP8_TENSOR = {"type": "fp8", "bits": 8}, {"type": "fp8-tensor", "bits": 8}
BY_TOKEN, FIXED = {"activations": "fp8-token"}, {"activations": "fp8-tensor"}
BLOCKS = {"type": "fp8-block", "bits": 8, "activations": "fp8-group"}
INT8 = {"activations": "int8-token"}
SOME = {"set": {"layers.1.mlp.*": {"skip": True}}}
LOADED = {  # what is written, and what Marlin says of the matrices: True for yes, None where it is not asked
    "w4": (CT, W4, True),
    "w4 by rows": (CT, ROW, True),
    "w4 asymmetric": (CT, {"bits": 4, "group_size": 128, "sym": False}, True),
    "w4 by rows, asymmetric": (CT, {**ROW, "sym": False}, True),
    "w8": (CT, W8, True),
    "w8 by rows": (CT, {"bits": 8, "group_size": -1}, True),
    "w8 asymmetric": (CT, {**W8, "sym": False}, False),
    "w2": (CT, {"bits": 2, "group_size": 32}, False),
    "w3": (CT, {"bits": 3, "group_size": 32}, False),
    "w3 asymmetric": (CT, {"bits": 3, "group_size": 64, "sym": False}, False),
    "w5": (CT, {"bits": 5, "group_size": 32}, False),
    "w6": (CT, {"bits": 6, "group_size": -1}, False),
    "w4 by int8": (CT, {**W4, **INT8}, True),
    "w3 asymmetric by int8": (CT, {"bits": 3, "group_size": 64, "sym": False, **INT8}, False),
    "mixed": (CT, {**W4, "set": {"mlp.down_proj": {"bits": 8}, "o_proj": {"group_size": -1}}}, True),
    "types": (
        CT,
        {**W4, "set": {"mlp.down_proj": {**FP8, **BY_TOKEN}, "mlp.gate_proj": NVFP4, "mlp.up_proj": NVFP4}},
        True,
    ),
    "skipped": (CT, {**W4, **SOME}, True),
    "head": (CT, {**W4, "method": "gptq", "head_bits": 4}, True),
    "head of 8 bits": (CT, {**ROW, "method": "gptq", "head_bits": 8}, True),
    "head of fp8": (CT, {**FP8, **BY_TOKEN, "method": "gptq", "head_bits": 8}, True),
    "nvfp4": (CT, NVFP4, True),
    "nvfp4 by nvfp4": (CT, {**NVFP4, "activations": "nvfp4"}, True),
    "mxfp4": (CT, {"type": "mxfp4"}, True),
    "mxfp4 by mxfp4": (CT, {"type": "mxfp4", "activations": "mxfp4"}, True),
    "mxfp8": (CT, {"type": "mxfp8", "bits": 8}, True),
    "mxfp8 by mxfp8": (CT, MXFP8, True),
    "fp8": (CT, FP8, True),
    "fp8 by fp8": (CT, {**FP8, **BY_TOKEN}, True),
    "fp8 by fixed fp8": (CT, {**FP8, **FIXED}, True),
    "fp8 of matrices": (CT, FP8_TENSOR, True),
    "fp8 of matrices by fp8": (CT, {**FP8_TENSOR, **BY_TOKEN}, True),
    "fp8 of matrices by fixed fp8": (CT, {**FP8_TENSOR, **FIXED}, True),
    "fp8 in blocks": (CT, BLOCKS, True),
    "int8 by int8": (CT, {"bits": 8, "group_size": -1, **INT8}, None),
    "int8 by fixed int8": (CT, {"bits": 8, "group_size": -1, "activations": "int8-tensor"}, None),
    "fp8 in blocks, as DeepSeek": ("fp8", BLOCKS, True),
    "nvfp4, as ModelOpt": (MODELOPT, NVFP4, True),
    "nvfp4 by nvfp4, as ModelOpt": (MODELOPT, {**NVFP4, "activations": "nvfp4"}, True),
    "fp8, as ModelOpt": (MODELOPT, {**FP8_TENSOR, **FIXED}, True),
    "fp8 by rows, as ModelOpt": (MODELOPT, {**FP8, **BY_TOKEN}, True),
    "fp8 in blocks, as ModelOpt": (MODELOPT, BLOCKS, True),
    "mxfp8, as ModelOpt": (MODELOPT, MXFP8, True),
    "mixed, as ModelOpt": (
        MODELOPT,
        {**NVFP4, "set": {"mlp.down_proj": {**FP8_TENSOR, **FIXED}, "layers.1.mlp.*": {"skip": True}}},
        True,
    ),
    "gptq": (GPTQ, W4, True),
    "gptq by rows": (GPTQ, ROW, True),
    "gptq w8": (GPTQ, W8, True),
    "gptq, static groups": (GPTQ, {**W4, "method": "gptq", "actorder": "static"}, True),
    "gptq, mixed": (GPTQ, {**W4, "set": {"mlp.down_proj": {"bits": 8, "group_size": 32}}}, True),
    "gptq, skipped": (GPTQ, {**W4, **SOME}, True),
    "gptq, head": (GPTQ, {**W4, "method": "gptq", "head_bits": 4}, True),
    "gptq, head of 8 bits": (GPTQ, {**W4, "method": "gptq", "head_bits": 8}, True),
    "awq": (AWQ, {**W4, "sym": False}, True),
    "awq by rows": (AWQ, {**ROW, "sym": False}, True),
    "awq, skipped": (AWQ, {**W4, "sym": False, **SOME}, True),
    "auto-round": (AUTO_ROUND, W4, True),
    "auto-round by rows": (AUTO_ROUND, ROW, True),
    "auto-round w8": (AUTO_ROUND, W8, True),
    "auto-round, mixed": (AUTO_ROUND, {**W4, "set": {"mlp.down_proj": {"bits": 8}, **SOME["set"]}}, True),
    "dense": ("dense", W4, None),
}
REFUSED = {  # what is written, and vLLM's words
    "gptq asymmetric": (GPTQ, {**W4, "sym": False}, "Unsupported quantization config: bits=4, sym=False"),
    "gptq w3": (GPTQ, {"bits": 3, "group_size": 32}, "Unsupported quantization config: bits=3"),
    "gptq in groups of 16": (GPTQ, {"bits": 4, "group_size": 16}, "does not support group_size = 16"),
    "gptq, permuted": (GPTQ, {**W4, "method": "gptq", "actorder": "group"}, "no longer supported"),
    "fp8 blocks alone": (CT, {"type": "fp8-block", "bits": 8}, "AssertionError"),
    "w4 by fixed int8": (CT, {**W4, "activations": "int8-tensor"}, "No compressed-tensors compatible scheme"),
    "int8 cache": (CT, {**W4, "kv_cache": "int8"}, "type=float, however received num_bits=8, type=int"),
}
MARLIN, HUMMING, TRITON = "MarlinExperts", "HummingIndexedExperts", "TritonExperts"
EXPERTS = {  # what is written, and what vLLM would run experts by on a GPU, Marlin before the others where it can
    "w4": (CT, W4, MARLIN),
    "w4 by rows": (CT, ROW, MARLIN),
    "w4 asymmetric": (CT, {**W4, "sym": False}, MARLIN),
    "w8": (CT, W8, MARLIN),
    "w2": (CT, {"bits": 2, "group_size": 64}, HUMMING),
    "w3 asymmetric": (CT, {"bits": 3, "group_size": 64, "sym": False}, HUMMING),
    "w5": (CT, {"bits": 5, "group_size": 32}, HUMMING),
    "w6": (CT, {"bits": 6, "group_size": 64}, HUMMING),
    "nvfp4 by nvfp4": (CT, {**NVFP4, "activations": "nvfp4"}, MARLIN),
    "mxfp4": (CT, {"type": "mxfp4"}, MARLIN),
    "mxfp8": (CT, MXFP8, MARLIN),
    "fp8": (CT, {**FP8, **BY_TOKEN}, MARLIN),
    "fp8 of matrices": (CT, {**FP8_TENSOR, **FIXED}, MARLIN),
    "fp8 in blocks": (CT, BLOCKS, MARLIN),
    "int8": (CT, {"bits": 8, "group_size": -1, **INT8}, TRITON),
    "experts alone": (CT, {**W4, "set": {"self_attn.*": {"skip": True}}}, MARLIN),
    "attention alone": (CT, {**W4, "set": {"experts.*": {"skip": True}}}, True),
    "layers": (CT, {**W4, "set": {"layers.1.*.experts.*": {"bits": 8}}}, MARLIN),
    "fp8 in blocks, as DeepSeek": ("fp8", BLOCKS, MARLIN),
    "nvfp4, as ModelOpt": (MODELOPT, NVFP4, MARLIN),
    "fp8, as ModelOpt": (MODELOPT, {**FP8_TENSOR, **FIXED}, MARLIN),
    "mxfp8, as ModelOpt": (MODELOPT, MXFP8, MARLIN),
    "mixed, as ModelOpt": (MODELOPT, {**NVFP4, "set": {"self_attn.*": {**FP8_TENSOR, **FIXED}}}, MARLIN),
    "gptq": (GPTQ, W4, MARLIN),
    "gptq by rows": (GPTQ, ROW, MARLIN),
    "gptq, mixed": (GPTQ, {**W4, "set": {"experts.*": {"bits": 8}}}, MARLIN),
    "awq": (AWQ, {**W4, "sym": False}, MARLIN),
    "auto-round": (AUTO_ROUND, W4, MARLIN),
    "auto-round, mixed": (AUTO_ROUND, {**W4, "set": {"experts.*": {"bits": 8}}}, MARLIN),
}
REFUSED_EXPERTS = {
    "w8 asymmetric": (CT, {**W8, "sym": False}, "No WNA16 MoE backend supports"),
    "w3 by rows": (CT, {"bits": 3, "group_size": -1}, "AssertionError"),
    "w4 by int8": (CT, {**W4, **INT8}, "No W4A8 Int8 MoE backend supports"),
    "int8 by fixed int8": (CT, LOADED["int8 by fixed int8"][1], "Unsupported FusedMoe scheme"),
    "fp8 alone": (CT, FP8, "For Fused MoE layers, only format: pack-quantized"),
    "fp8 by fixed fp8": (CT, {**FP8, **FIXED}, "AssertionError"),
    "fp8 of matrices by fp8": (CT, {**FP8_TENSOR, **BY_TOKEN}, "AssertionError"),
    "fp8 by rows, as ModelOpt": (MODELOPT, {**FP8, **BY_TOKEN}, "is invalid for input of size"),
    "awq by rows": (AWQ, {**ROW, "sym": False}, "Trying to create tensor with negative dimension"),
}
CPU = Path("/proc/cpuinfo")
FLAGS = set(CPU.read_text().split()) if CPU.exists() else set()
REFUSED_SIZES = {
    "w4 by rows": (CT, ROW, "AssertionError"),
    # vLLM's own kernel takes it where the processor has what that needs, and fails
    "gptq by rows": (
        GPTQ,
        ROW,
        "Dimension size must be non-negative" if FLAGS & {"avx512f", "amx_tile"} else "No WNA16 MoE backend supports",
    ),
}
SCALES = (CT, {**W4, "kv_cache": "fp8"})
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
}
FEW = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {  # by name, the family and its sizes
    "llama": ("llama", {}),
    "96 tokens": ("llama", {"vocab_size": 96}),
    "qwen2": ("qwen2", {}),
    "mixtral": ("mixtral", FEW),
    "narrow": ("mixtral", {**FEW, "hidden_size": 192, "head_dim": 48}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}),
}
BIASED = ("w4", "w3 asymmetric", "types", "fp8 by fp8", "mixed, as ModelOpt", "gptq, mixed", "awq", "auto-round, mixed")
OTHERS = ("w4 asymmetric", "nvfp4 by nvfp4", "fp8 in blocks", "layers", "mixed, as ModelOpt", "gptq, mixed", "awq")
RUN = {  # by model and name, what is written and what is expected
    **{("llama", name): case for name, case in LOADED.items()},
    **{("qwen2", name): LOADED[name] for name in BIASED},
    **{("96 tokens", name): LOADED[name] for name in ("head", "head of 8 bits")},
    **{("mixtral", name): case for name, case in EXPERTS.items()},
    **{("qwen3_moe", name): EXPERTS[name] for name in OTHERS},
}
NOT_RUN = {
    **{("llama", name): case for name, case in REFUSED.items()},
    **{("mixtral", name): case for name, case in REFUSED_EXPERTS.items()},
    **{("narrow", name): case for name, case in REFUSED_SIZES.items()},
    ("96 tokens", "gptq, head"): (*LOADED["gptq, head"][:2], "The size of tensor a (128) must match"),
}
CASES = {**RUN, **NOT_RUN, ("llama", "scales"): SCALES, ("qwen3_moe", "scales"): SCALES}


@pytest.fixture(scope="module")
def planned(random_model_dir, tmp_path_factory):
    """planned(model, name, target=None): the plan of a case, and a directory of its own."""
    root = tmp_path_factory.mktemp("vllm")
    text = root / "ids.safetensors"
    save_file({"input_ids": torch.randint(0, 96, (16, 32), generator=torch.Generator().manual_seed(1))}, text)

    def make(model, name, target=None):
        format_, options = CASES[model, name][:2]
        step = {"method": "rtn", **options}
        code = step.pop("kv_cache", None)
        recipe = {
            "calibration": {"source": str(text), "samples": 16, "length": 32},
            "steps": [step],
            "output": {"format": format_},
            "kv_cache": None if code is None else {"code": code},
        }
        out = root / (f"{model} {name}" if target is None else f"{model} {name}, planned")  # the first is written
        options = Options(out=out, compute_dtype="float32", target=target)
        family, sizes = MODELS[model]
        return make_plan(parse(recipe), random_model_dir(family, **{**SIZES, **sizes}), options), out

    return make


@pytest.fixture(scope="module")
def results(planned, tmp_path_factory):
    """By case, the checkpoint and what vLLM made of it."""
    python_of("vllm")  # skips before anything is written
    paths = {}
    for case in CASES:
        plan, paths[case] = planned(*case)
        run(plan)
    found = found_by_vllm(paths.values(), tmp_path_factory.mktemp("found"))
    return {case: (path, found[path]) for case, path in paths.items()}


def ours(path):
    """What our reader makes of it, with inputs as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmcompress.validate.load.round_as_stored", lambda *_: None)
        model = load_whole(path, dtype=torch.float32, linear=None).eval()
    with torch.no_grad():
        return model(IDS).logits[:, :-1].log_softmax(-1)


@pytest.mark.parametrize(("model", "name"), RUN)
def test_vllm_computes_what_our_reader_does(results, planned, model, name):
    planned(model, name, "vllm")  # does not raise
    path, found = results[model, name]
    assert not found.error
    expected = ours(path)
    assert expected.std() > 0.1
    assert (found.values - expected).abs().max() < 1e-3  # measured: at most 4e-6
    kernel = RUN[model, name][2]
    if isinstance(kernel, str):
        assert found.verdicts["experts"] == [kernel]
        return
    said = {answer == "yes" for kernel, answers in found.verdicts.items() if "Marlin" in kernel for answer in answers}
    assert said == ({kernel} if kernel is not None else set())


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_keys_and_values_are_cached_under_our_scales(results, planned, model):
    planned(model, "scales", "vllm")  # does not raise
    path, found = results[model, "scales"]
    if not FLAGS & {"avx512f", "amx_tile"}:
        assert "requires x86 with AVX-512 or AMX" in found.error
        return
    assert not found.error
    stored = load_file(path / "model.safetensors")
    scales = {name.replace("self_attn.attn.", "self_attn."): scale for name, scale in found.scales.items()}
    assert len(scales) == 4
    for name, scale in scales.items():
        assert scale == pytest.approx(stored[name].float().item(), rel=1e-6)
    assert 1e-3 < (found.values - ours(path)).abs().mean() < 0.1  # it does round keys and values


@pytest.mark.parametrize(("model", "name"), NOT_RUN)
def test_what_a_plan_refuses_vllm_refuses(results, planned, model, name):
    with pytest.raises(PlanError, match="vLLM does not load"):
        planned(model, name, "vllm")
    assert NOT_RUN[model, name][2] in results[model, name][1].error


OWN = [
    *(("llama", name) for name in LOADED if "head of" not in name),
    *(("llama", name) for name in ("scales", "gptq asymmetric", "gptq in groups of 16", "gptq, permuted")),
    *(("mixtral", name) for name in (*EXPERTS, "awq by rows", "int8 by fixed int8")),
]


@pytest.fixture(scope="module")
def own(results, tmp_path_factory):
    """By case, what vLLM makes of it by its own means on this processor."""
    if not {"avx512f", "avx512_vnni", "amx_tile"} <= FLAGS:
        pytest.skip("a processor without AVX-512, VNNI and AMX")
    paths = {case: results[case][0] for case in OWN}
    found = found_by_vllm(paths.values(), tmp_path_factory.mktemp("own"), ["--own"])
    return {case: (path, found[path]) for case, path in paths.items()}


@pytest.mark.parametrize(("model", "name"), OWN)
def test_a_plan_for_a_cpu_says_what_vllm_runs_on_one(own, planned, model, name):
    path, found = own[model, name]
    try:
        planned(model, name, "vllm-cpu")
    except PlanError:
        assert found.error or not found.values.isfinite().all()  # the latter for experts of gptq by rows
        return
    assert not found.error
    with torch.no_grad():  # inputs rounded as stored
        expected = load_whole(path, dtype=torch.float32, linear=None).eval()(IDS).logits[:, :-1].log_softmax(-1)
    divergence = (expected.exp() * (expected - found.values)).sum(-1).mean()
    assert divergence < 0.003  # measured: at most 0.0012
