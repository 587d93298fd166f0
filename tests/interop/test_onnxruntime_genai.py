"""onnxruntime-genai's model builder takes our codes over as they are: its runtime gives the logits of our reader."""

import pytest
import torch
from other_environment import asked

from llmcompress.validate.load import load_whole

pytestmark = pytest.mark.interop

IDS = torch.randint(5, 96, (2, 24), generator=torch.Generator().manual_seed(0))
TARGET = "onnxruntime-genai"
W4 = {"bits": 4, "group_size": 32}
READ = {
    "gptq": ("llama", "gptq", W4),
    "gptq in groups of 16": ("llama", "gptq", {"bits": 4, "group_size": 16}),
    "gptq in groups of 128": ("llama", "gptq", {"bits": 4, "group_size": 128}),
    "gptq w2": ("llama", "gptq", {"bits": 2, "group_size": 64}),
    "gptq w8": ("llama", "gptq", {"bits": 8, "group_size": 64}),
    "gptq, permuted": ("llama", "gptq", {**W4, "method": "gptq", "actorder": "group"}),
    "gptq, static groups": ("llama", "gptq", {**W4, "method": "gptq", "actorder": "static"}),
    "gptq, head": ("llama", "gptq", {**W4, "method": "gptq", "head_bits": 4}),
    "awq": ("llama", "awq", {**W4, "sym": False}),
    "awq, symmetric": ("llama", "awq", {"bits": 4, "group_size": 128}),
    "dense": ("llama", "dense", W4),
    **{
        family: (family, "gptq", W4)
        for family in ("ernie4_5", "granite", "hunyuan_v1_dense", "mistral", "qwen2", "qwen3")
    },
}
REFUSED = {  # by name, what is written, and the words of the builder; None where it takes other values without an error
    "gptq asymmetric": ("llama", "gptq", {**W4, "sym": False}, None),
    "gptq w3": ("llama", "gptq", {"bits": 3, "group_size": 32}, "3-bit quantization is not currently supported"),
    "gptq in groups of 8": ("llama", "gptq", {"bits": 4, "group_size": 8}, "Only power-of-two block sizes >= 16"),
    "gptq, mixed": ("llama", "gptq", {**W4, "set": {"mlp.down_proj": {"bits": 8}}}, "must match the size of tensor"),
    "gptq, skipped": ("llama", "gptq", {**W4, "set": {"layers.1.mlp.*": {"skip": True}}}, "'NoneType' object"),
    "gptq of experts": ("mixtral", "gptq", W4, "model is not currently supported"),
    "compressed-tensors": ("llama", "compressed-tensors", W4, "only supported on the CUDA EP"),
    "auto-round": ("llama", "auto-round", W4, "quantized model is not currently supported"),
}
CASES = {**READ, **{name: case[:3] for name, case in REFUSED.items()}}


@pytest.fixture(scope="module")
def results(compress, tmp_path_factory):
    """By case, the checkpoint, and the logits or the error of onnxruntime-genai."""
    paths = {name: compress(family, "bfloat16", format_, **how) for name, (family, format_, how) in CASES.items()}
    errors, logits = asked("onnxruntime_genai", IDS, tmp_path_factory.mktemp("onnx"), paths.values())
    return {name: (path, logits.get(str(path), errors.get(str(path)))) for name, path in paths.items()}


def ours(path):
    with torch.no_grad():
        return load_whole(path, dtype=torch.float32, linear=None).eval()(IDS).logits


@pytest.mark.parametrize("name", READ)
def test_logits_are_those_of_our_reader(results, refusal, name):
    path, theirs = results[name]
    family, format_, how = READ[name]
    assert not refusal(TARGET, family, "bfloat16", format_, **how)
    assert not isinstance(theirs, str), theirs
    expected = ours(path)
    assert (theirs - expected).abs().max() <= 1e-5 * expected.abs().max()  # measured: at most 2e-6 of it


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_plan_refuses_is_not_read(results, refusal, name):
    path, theirs = results[name]
    family, format_, how, words = REFUSED[name]
    assert "onnxruntime-genai does not load" in refusal(TARGET, family, "bfloat16", format_, **how)
    if words is None:
        assert (theirs - ours(path)).abs().max() > 0.1 * ours(path).abs().max()
    else:
        assert words in theirs
