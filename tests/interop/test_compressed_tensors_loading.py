"""transformers with the compressed-tensors package reads what we write, and computes what we promised."""

import pytest
import torch

pytestmark = pytest.mark.interop

IDS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(0))
SYMMETRIC = {
    "w4-g32": {"bits": 4, "group_size": 32},
    "w4-g128": {"bits": 4, "group_size": 128},
    "w8-g64": {"bits": 8, "group_size": 64},
    "w8-row": {"bits": 8, "group_size": -1},
    "w4-row": {"bits": 4, "group_size": -1},
    "w2-g32": {"bits": 2, "group_size": 32},
    "w3-g32": {"bits": 3, "group_size": 32},
    "w3-row": {"bits": 3, "group_size": -1},
    "w5-g64": {"bits": 5, "group_size": 64},
    "w6-g32": {"bits": 6, "group_size": 32},
    "mixed": {
        "bits": 4,
        "group_size": 32,
        "set": {"mlp.down_proj": {"bits": 8}, "self_attn.o_proj": {"group_size": -1}},
    },
    "skipped": {"bits": 4, "group_size": 32, "set": {"layers.1.mlp.*": {"skip": True}}},
}
ASYMMETRIC = {
    "w3-g32": {"bits": 3, "group_size": 32, "sym": False},
    "w5-g64": {"bits": 5, "group_size": 64, "sym": False},
    "w4-g32": {"bits": 4, "group_size": 32, "sym": False},
    "w8-g64": {"bits": 8, "group_size": 64, "sym": False},
    "w4-row": {"bits": 4, "group_size": -1, "sym": False},
}


def load(path, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, **options).eval()


def compare(compressed, dense):
    """Logits and weights of a loaded checkpoint against those of our own decoding."""
    with torch.no_grad():
        ours, theirs = dense(IDS).logits, compressed(IDS).logits  # codes are decoded on the first forward
    assert theirs.dtype == ours.dtype
    # guard against a test that compares nothing: the models do depend on their input
    assert ours.float().std() > 0.1
    scale = ours.float().abs().max()
    tolerance = {torch.float16: 2**-9, torch.bfloat16: 2**-6}[ours.dtype]
    assert (theirs.float() - ours.float()).abs().max() <= tolerance * scale
    weights = dict(dense.named_parameters())
    matrices = [name for name, value in weights.items() if ".layers." in name and value.ndim == 2]
    assert len(matrices) == 14
    for name in matrices:
        assert torch.equal(compressed.get_submodule(name.removesuffix(".weight")).weight, weights[name]), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("name", SYMMETRIC)
def test_symmetric_weights_load_in_plain_transformers(compress, family, dtype, name):
    options = SYMMETRIC[name]
    compressed = load(compress(family, dtype, "compressed-tensors", **options))
    compare(compressed, load(compress(family, dtype, "dense", **options)))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_floats_of_4_bits_load_in_plain_transformers(compress, family, name):
    """In bfloat16: the package decodes to nothing else."""
    compressed = load(compress(family, "bfloat16", "compressed-tensors", type=name))
    compare(compressed, load(compress(family, "bfloat16", "dense", type=name)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("name", ASYMMETRIC)
def test_asymmetric_weights_load_when_dequantised(compress, family, dtype, name):
    from transformers import CompressedTensorsConfig

    options = ASYMMETRIC[name]
    path = compress(family, dtype, "compressed-tensors", **options)
    compressed = load(path, quantization_config=CompressedTensorsConfig(dequantize=True))
    compare(compressed, load(compress(family, dtype, "dense", **options)))


@pytest.mark.parametrize(
    "family", ["mistral", "qwen3", "gemma2", "phi3", "opt", "gpt_neox", "olmo2", "mixtral", "qwen3_moe"]
)
def test_other_families_load_in_plain_transformers(compress, family):
    options = {"bits": 4, "group_size": 32}
    compressed = load(compress(family, "bfloat16", "compressed-tensors", **options))
    dense = load(compress(family, "bfloat16", "dense", **options))
    with torch.no_grad():
        ours, theirs = dense(IDS).logits.float(), compressed(IDS).logits.float()
    assert ours.std() > 0.1
    assert (theirs - ours).abs().max() <= 2**-6 * ours.abs().max()


@pytest.mark.parametrize("options", [*SYMMETRIC.values(), *ASYMMETRIC.values()])
def test_the_package_accepts_the_config(compress, options):
    import json

    from compressed_tensors.quantization import QuantizationConfig

    path = compress("llama", "bfloat16", "compressed-tensors", **options)
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(settings)
    assert parsed.quantization_status == "compressed"
    assert {group.weights.num_bits for group in parsed.config_groups.values()} == {
        options["bits"], *(own["bits"] for own in options.get("set", {}).values() if "bits" in own)
    }  # fmt: skip
