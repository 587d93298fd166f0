"""transformers with compressed-tensors reads weights and inputs of 8 bits, and computes what our reader does.

Both round floats and multiply floats, and agree to a thousandth of what rounding does to the logits. (Codes times codes
have other last bits, which tell what becomes of the extreme of each token, half a step from two codes.)
"""

import json

import pytest
import torch

from llmcompress import export
from llmcompress.validate.load import load_whole
from llmcompress.validate.verify import passed, verify
from shippedmodels import changed

pytestmark = pytest.mark.interop

IDS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(0))
SCHEMES = {
    "int8-token": {"bits": 8, "group_size": -1, "activations": "int8-token"},
    "int8-tensor": {"bits": 8, "group_size": -1, "activations": "int8-tensor"},
    "fp8-token": {"type": "fp8", "bits": 8, "activations": "fp8-token"},
    "fp8-tensor": {"type": "fp8", "bits": 8, "activations": "fp8-tensor"},
    "fp8": {"type": "fp8", "bits": 8},
    "fp8-one-scale": {"type": "fp8-tensor"},
    "fp8-one-scale-tensor": {"type": "fp8-tensor", "activations": "fp8-tensor"},
    "fp8-block": {"type": "fp8-block"},
    "fp8-block-group": {"type": "fp8-block", "activations": "fp8-group"},
    "w4a8": {"bits": 4, "group_size": 32, "activations": "int8-token"},
    "mixed": {
        "bits": 8,
        "group_size": -1,
        "activations": "int8-token",
        "set": {"mlp.down_proj": {"type": "fp8", "activations": "fp8-tensor"}, "o_proj": {"activations": "none"}},
    },
}

IN_BFLOAT16 = {
    "mxfp8": {"type": "mxfp8"},
    "mxfp8-inputs": {"type": "mxfp8", "activations": "mxfp8"},
    "mxfp4-inputs": {"type": "mxfp4", "activations": "mxfp4"},
    "nvfp4-inputs": {"type": "nvfp4", "activations": "nvfp4"},
    "four-schemes": {
        "type": "nvfp4",
        "activations": "nvfp4",
        "set": {
            "self_attn.*": {"type": "fp8", "activations": "fp8-token"},
            "o_proj": {"type": "fp8-block", "activations": "fp8-group"},
            "mlp.down_proj": {"type": "int", "group_size": 32, "activations": "none"},
            "layers.1.self_attn.*": {"skip": True},
        },
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


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_blocks_that_the_package_decodes_to_bfloat16_are_multiplied_by_inputs_as_ours(compress, family, name):
    """Both models in bfloat16 once, which decodes codes, then with the same numbers in float32."""
    from transformers import AutoModelForCausalLM

    out = compress(family, "bfloat16", "compressed-tensors", **IN_BFLOAT16[name])
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).eval()
    ours = load_whole(out, dtype=torch.bfloat16, linear=None)
    unrounded = load(out.parent / f"{family}-bfloat16")
    with torch.no_grad():
        theirs(IDS, use_cache=False)
        models = (torch.nn.Module.float(model) for model in (theirs, ours, unrounded))  # transformers refuses
        seen, expected, original = (model(IDS, use_cache=False).logits for model in models)
    loss = (expected - original).square().mean().sqrt()
    assert loss > 1e-4
    assert (seen - expected).square().mean().sqrt() < 1e-3 * loss


def test_scales_of_float32_from_modelopt_are_read(compress, tmp_path):
    """Of matrices and of inputs, in a model of bfloat16."""
    options = {"type": "fp8-tensor", "activations": "fp8-tensor"}
    source = changed(compress("llama", "bfloat16", "modelopt", **options), tmp_path / "source", finer)
    export(source, "compressed-tensors", tmp_path / "out")
    theirs, ours = load(tmp_path / "out"), load_whole(source, dtype=torch.float32, linear=None)
    with torch.no_grad():
        seen, expected = (model(IDS, use_cache=False).logits for model in (theirs, ours))
    assert (seen - expected).abs().max() < 1e-5


def finer(tensors):
    for name, tensor in tensors.items():
        if name.endswith("_scale"):
            tensor.mul_(1.0013)


def logits_of_both(out):
    """Of transformers and of our reader: both in bfloat16 once, which decodes codes, then the numbers in float32."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).eval()
    ours = load_whole(out, dtype=torch.bfloat16, linear=None)
    with torch.no_grad():
        theirs(IDS, use_cache=False)
        return [torch.nn.Module.float(model)(IDS, use_cache=False).logits for model in (theirs, ours)]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("experts", [{"type": "int", "group_size": 32}, {"type": "mxfp4"}, {"type": "fp8"}])
def test_experts_attention_and_head_have_each_its_scheme(compress, family, experts):
    """A router of 16 bits is between them."""
    kinds = {"self_attn.*": {"type": "mxfp8"}, "lm_head": {"type": "int", "group_size": 64}}
    out = compress(family, "bfloat16", "compressed-tensors", "gptq", **experts, head_bits=8, set=kinds)
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["format"] == "mixed-precision"
    targets = [target for group in settings["config_groups"].values() for target in group["targets"]]
    assert len(targets) == 1 + 2 * 4 + 1
    assert passed(verify(out))
    seen, expected = logits_of_both(out)
    assert expected.std() > 0.1
    assert (seen - expected).abs().max() <= 2**-7 * expected.abs().max()


UNREAD = [
    {"type": "nvfp4"},
    {"type": "mxfp8"},
    {"bits": 8, "group_size": -1, "activations": "int8-token"},
    {"group_size": 32, "set": {"layers.1.*experts*": {"bits": 8}}},
    {"group_size": 32, "set": {"layers.1.*experts*": {"skip": True}}},
    {"group_size": 32, "set": {"*experts*": {"skip": True}}},
]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, options) for family in ("mixtral", "qwen3_moe") for options in UNREAD),
        ("mixtral", {"type": "fp8-block"}),  # of qwen3_moe it was seen to be read
    ],
)
def test_experts_that_the_target_refuses_are_not_read(compress, refusal, family, options):
    """transformers fails, or has other numbers: what `--target transformers` says of experts is still true."""
    assert "experts" in refusal("transformers", family, "bfloat16", "compressed-tensors", **options)
    try:
        seen, expected = logits_of_both(compress(family, "bfloat16", "compressed-tensors", **options))
    except RuntimeError as error:
        if "automatic conversion of the weights" not in str(error):
            raise
    else:
        assert (seen - expected).abs().max() > 2**-4 * expected.abs().max()


@pytest.mark.parametrize("name", SCHEMES | IN_BFLOAT16)
def test_the_package_accepts_the_config_and_finds_the_scheme(compress, name):
    from compressed_tensors.quantization import QuantizationConfig

    out = compress("llama", "float16", "compressed-tensors", **(SCHEMES | IN_BFLOAT16)[name])
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(settings)
    rounded = [group.input_activations for group in parsed.config_groups.values()]
    assert any(rounded) == ("activations" in (SCHEMES | IN_BFLOAT16)[name])
    assert all(args is None or (args.num_bits in (4, 8) and args.symmetric) for args in rounded)
