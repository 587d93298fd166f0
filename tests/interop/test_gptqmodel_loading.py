"""transformers and GPTQModel read our gptq checkpoints on the CPU, and compute what we promised."""

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


@pytest.fixture(scope="module")
def loaded(compress, tmp_path_factory):
    """loaded(loader): logits by case, and the errors of those it could not load."""
    made = {}

    def of(loader):
        if loader not in made:
            paths = {name: compress(family, dtype, "gptq", **how) for name, (family, dtype, how) in CASES.items()}
            logits = logits_of(paths.values(), tmp_path_factory.mktemp(loader), loader)
            made[loader] = {name: logits[path] for name, path in paths.items()}
        return made[loader]

    return of


@pytest.mark.parametrize("loader", ["transformers", "gptqmodel"])
@pytest.mark.parametrize("name", CASES)
def test_loaders_compute_what_the_decoded_weights_give(loaded, compress, refusal, loader, name):
    family, dtype, options = CASES[name]
    theirs = loaded(loader)[name]
    ours = logits_of_dense(compress(family, dtype, "dense", **options))
    # the kernel that transformers takes on a CPU computes in bfloat16, whatever the model says
    tolerance = TOLERANCE["bfloat16" if loader == "transformers" else dtype] * ours.abs().max()
    if said := refusal(loader, family, dtype, "gptq", **options):
        assert "does not load" in said
        assert isinstance(theirs, str) or (theirs - ours).abs().max() > tolerance
        return
    assert not isinstance(theirs, str), theirs
    unlike = logits_of_dense(compress(family, dtype, "dense", bits=8, group_size=32))
    assert (theirs - ours).abs().max() <= tolerance  # measured: at most 0.6 of this by GPTQModel
    if options["bits"] < 8:  # other codes would be noticed
        assert (unlike - ours).abs().max() > 2 * tolerance
