"""vLLM itself loads what a plan says it loads, and computes what our reader does.

Its reading of config.json, its loaders and its fusing of matrices are its own; products that it has for GPUs alone are
stood in for (scripts/interop/vllm_standins.py), in float32 and with inputs as they are.
"""

import pytest
import torch
from safetensors.torch import save_file
from vllm_venv import IDS, found_by_vllm

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import PlanError
from llmcompress.recipe import parse
from llmcompress.validate.load import load_whole

pytestmark = pytest.mark.interop

CT, GPTQ, AWQ, MODELOPT = "compressed-tensors", "gptq", "awq", "modelopt"
W4 = {"bits": 4, "group_size": 64}
ROW = {"bits": 4, "group_size": -1}
LOADED = {  # what is written, and what Marlin says of the matrices: True for yes, None where it is not asked
    "w4": (CT, W4, True),
    "w4 by rows": (CT, ROW, True),
    "w4 asymmetric": (CT, {"bits": 4, "group_size": 128, "sym": False}, True),
    "w4 by rows, asymmetric": (CT, {**ROW, "sym": False}, True),
    "w8": (CT, {"bits": 8, "group_size": 32}, True),
    "w8 by rows": (CT, {"bits": 8, "group_size": -1}, True),
    "w2": (CT, {"bits": 2, "group_size": 32}, False),
    "w3": (CT, {"bits": 3, "group_size": 32}, False),
    "w3 asymmetric": (CT, {"bits": 3, "group_size": 64, "sym": False}, False),
    "w5": (CT, {"bits": 5, "group_size": 32}, False),
    "w6": (CT, {"bits": 6, "group_size": -1}, False),
    "mixed": (CT, {**W4, "set": {"mlp.down_proj": {"bits": 8}, "o_proj": {"group_size": -1}}}, True),
    "skipped": (CT, {**W4, "set": {"layers.1.mlp.*": {"skip": True}}}, True),
    "nvfp4": (CT, {"type": "nvfp4"}, True),
    "nvfp4 by nvfp4": (CT, {"type": "nvfp4", "activations": "nvfp4"}, True),
    "mxfp4": (CT, {"type": "mxfp4"}, True),
    "mxfp4 by mxfp4": (CT, {"type": "mxfp4", "activations": "mxfp4"}, True),
    "mxfp8": (CT, {"type": "mxfp8", "bits": 8}, True),
    "mxfp8 by mxfp8": (CT, {"type": "mxfp8", "bits": 8, "activations": "mxfp8"}, True),
    "fp8 in blocks": (CT, {"type": "fp8-block", "bits": 8, "activations": "fp8-group"}, True),
    "int8 by int8": (CT, {"bits": 8, "group_size": -1, "activations": "int8-token"}, None),
    "int8 by fixed int8": (CT, {"bits": 8, "group_size": -1, "activations": "int8-tensor"}, None),
    "fp8 in blocks, as DeepSeek": ("fp8", {"type": "fp8-block", "bits": 8, "activations": "fp8-group"}, True),
    "nvfp4, as ModelOpt": (MODELOPT, {"type": "nvfp4"}, True),
    "nvfp4 by nvfp4, as ModelOpt": (MODELOPT, {"type": "nvfp4", "activations": "nvfp4"}, True),
    "gptq": (GPTQ, W4, True),
    "gptq by rows": (GPTQ, ROW, True),
    "gptq, static groups": (GPTQ, {**W4, "method": "gptq", "actorder": "static"}, True),
    "awq": (AWQ, {**W4, "sym": False}, True),
    "awq by rows": (AWQ, {**ROW, "sym": False}, True),
    "dense": ("dense", W4, None),
}
REFUSED = {  # what is written, and vLLM's words
    "gptq asymmetric": (GPTQ, {**W4, "sym": False}, "Unsupported quantization config: bits=4, sym=False"),
    "gptq w3": (GPTQ, {"bits": 3, "group_size": 32}, "Unsupported quantization config: bits=3"),
    "gptq in groups of 16": (GPTQ, {"bits": 4, "group_size": 16}, "does not support group_size = 16"),
    "gptq, permuted": (GPTQ, {**W4, "method": "gptq", "actorder": "group"}, "no longer supported"),
    "fp8 blocks alone": (CT, {"type": "fp8-block", "bits": 8}, "AssertionError"),
}
LLAMA = {**{name: case[:2] for name, case in LOADED.items()}, **{name: case[:2] for name, case in REFUSED.items()}}
CASES = [("llama", name) for name in LLAMA]
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 96,
}


@pytest.fixture(scope="module")
def planned(random_model_dir, tmp_path_factory):
    """planned(family, name, target=None): the plan of a case, for a directory of its own."""
    root = tmp_path_factory.mktemp("vllm")
    text = root / "ids.safetensors"
    save_file({"input_ids": torch.randint(0, 96, (16, 32), generator=torch.Generator().manual_seed(1))}, text)

    def make(family, name, target=None):
        format_, options = LLAMA[name]
        recipe = {
            "calibration": {"source": str(text), "samples": 16, "length": 32},
            "steps": [{"method": "rtn", **options}],
            "output": {"format": format_},
        }
        out = root / (f"{family} {name}" if target is None else f"{family} {name}, planned")  # the first is written
        options = Options(out=out, compute_dtype="float32", target=target)
        return make_plan(parse(recipe), random_model_dir(family, **SIZES), options), out

    return make


@pytest.fixture(scope="module")
def results(planned, tmp_path_factory):
    """By case, the checkpoint and what vLLM made of it."""
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


@pytest.mark.parametrize(("family", "name"), [case for case in CASES if case[1] in LOADED])
def test_vllm_computes_what_our_reader_does(results, planned, family, name):
    planned(family, name, "vllm")  # does not raise
    path, found = results[family, name]
    assert not found.error
    expected = ours(path)
    assert expected.std() > 0.1
    assert (found.values - expected).abs().max() < 1e-3  # measured: at most 4e-6
    said = {answer == "yes" for kernel, answers in found.verdicts.items() if "Marlin" in kernel for answer in answers}
    assert said == ({LOADED[name][2]} if LOADED[name][2] is not None else set())


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_plan_refuses_vllm_refuses(results, planned, name):
    with pytest.raises(PlanError, match="vLLM does not load"):
        planned("llama", name, "vllm")
    assert REFUSED[name][2] in results["llama", name][1].error
