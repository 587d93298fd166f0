"""GPTQModel reads our gptq checkpoints on the CPU, and computes what we promised."""

import pytest
from gptqmodel_venv import TOLERANCE, logits_of, logits_of_dense

pytestmark = pytest.mark.interop

W4 = {"bits": 4, "group_size": 32}
CASES = {
    "w4": ("llama", "float16", W4),
    "w4 bfloat16": ("llama", "bfloat16", {"bits": 4, "group_size": 128}),
    "w4 asymmetric": ("llama", "float16", {**W4, "sym": False}),
    "w2": ("llama", "float16", {"bits": 2, "group_size": 32}),
    "w2 asymmetric": ("llama", "bfloat16", {"bits": 2, "group_size": 32, "sym": False}),
    "w3": ("llama", "float16", {"bits": 3, "group_size": 64}),
    "w3 asymmetric": ("llama", "float16", {"bits": 3, "group_size": 64, "sym": False}),
    "w8 by rows": ("llama", "float16", {"bits": 8, "group_size": -1}),
    "own settings": ("llama", "float16", {**W4, "set": {"mlp.down_proj": {"bits": 8, "group_size": 64}}}),
    "skipped": (
        "llama",
        "float16",
        {**W4, "set": {"layers.1.mlp.*": {"skip": True}, "layers.0.*.q_proj": {"skip": True}}},
    ),
    "permuted groups": ("llama", "float16", {**W4, "method": "gptq", "actorder": "group"}),
    "static groups": ("llama", "float16", {**W4, "method": "gptq", "actorder": "static"}),
    "qwen2": ("qwen2", "bfloat16", {"bits": 4, "group_size": 64}),
    "qwen2 w8": ("qwen2", "float16", {"bits": 8, "group_size": 64}),
    "qwen3_moe": ("qwen3_moe", "bfloat16", W4),
    "gpt2": ("gpt2", "float16", W4),
    "gemma2": ("gemma2", "bfloat16", W4),
}


@pytest.fixture(scope="session")
def gptqmodel_logits(compress, tmp_path_factory):
    """Logits of GPTQModel by case, and the errors of those it could not load."""
    paths = {name: compress(family, dtype, "gptq", **options) for name, (family, dtype, options) in CASES.items()}
    logits = logits_of(paths.values(), tmp_path_factory.mktemp("gptqmodel"))
    return {name: logits[path] for name, path in paths.items()}


@pytest.mark.parametrize("name", CASES)
def test_gptqmodel_computes_what_the_decoded_weights_give(gptqmodel_logits, compress, name):
    family, dtype, options = CASES[name]
    theirs = gptqmodel_logits[name]
    assert not isinstance(theirs, str), theirs
    ours = logits_of_dense(compress(family, dtype, "dense", **options))
    unlike = logits_of_dense(compress(family, dtype, "dense", bits=8, group_size=32))
    tolerance = TOLERANCE[dtype] * ours.abs().max()  # measured: at most 0.6 of this
    assert (theirs - ours).abs().max() <= tolerance
    if options["bits"] < 8:  # other codes would be noticed
        assert (unlike - ours).abs().max() > 2 * tolerance
