"""transformers with compressed-tensors reads weights and inputs of 8 bits, and computes what our reader does.

Both round floats and multiply floats, and agree to a thousandth of what rounding does to the logits. (Codes times codes
have other last bits, which tell what becomes of the extreme of each token, half a step from two codes.)
"""

import json

import pytest
import torch

from llmcompress.validate.load import load_whole

pytestmark = pytest.mark.interop

IDS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(0))
SCHEMES = {
    "int8-token": {"bits": 8, "group_size": -1, "activations": "int8-token"},
    "int8-tensor": {"bits": 8, "group_size": -1, "activations": "int8-tensor"},
    "fp8-token": {"type": "fp8", "bits": 8, "activations": "fp8-token"},
    "fp8-tensor": {"type": "fp8", "bits": 8, "activations": "fp8-tensor"},
    "fp8": {"type": "fp8", "bits": 8},
    "w4a8": {"bits": 4, "group_size": 32, "activations": "int8-token"},
    "mixed": {
        "bits": 8,
        "group_size": -1,
        "activations": "int8-token",
        "set": {"mlp.down_proj": {"type": "fp8", "activations": "fp8-tensor"}, "o_proj": {"activations": "none"}},
    },
}


def load(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_package_rounds_inputs_as_our_reader_does(compress, family, name):
    out = compress(family, "float16", "compressed-tensors", **SCHEMES[name])
    theirs, ours, unrounded = (
        load(out),
        load_whole(out, dtype=torch.float32, linear=None),
        load(out.parent / f"{family}-float16"),
    )
    with torch.no_grad():
        seen, expected, original = (model(IDS, use_cache=False).logits for model in (theirs, ours, unrounded))
    loss = (expected - original).square().mean().sqrt()
    assert loss > 1e-4
    assert (seen - expected).square().mean().sqrt() < 1e-3 * loss


@pytest.mark.parametrize("name", SCHEMES)
def test_the_package_accepts_the_config_and_finds_the_scheme(compress, name):
    from compressed_tensors.quantization import QuantizationConfig

    out = compress("llama", "float16", "compressed-tensors", **SCHEMES[name])
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(settings)
    rounded = [group.input_activations for group in parsed.config_groups.values()]
    assert any(rounded) == ("activations" in SCHEMES[name])
    assert all(args is None or (args.num_bits == 8 and args.symmetric) for args in rounded)
