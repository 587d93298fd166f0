"""transformers and GPTQModel read our awq checkpoints on the CPU, and compute what we promised."""

import pytest
from gptqmodel_venv import TOLERANCE, logits_of, logits_of_dense

pytestmark = pytest.mark.interop

W4 = {"bits": 4, "group_size": 32}
ASYM = {**W4, "sym": False}
SKIPPED = {"layers.1.mlp.*": {"skip": True}, "layers.0.*.q_proj": {"skip": True}}
CASES = {
    "asymmetric": ("llama", "float16", ASYM),
    "asymmetric bfloat16": ("llama", "bfloat16", {**ASYM, "group_size": 128}),
    "symmetric": ("llama", "float16", W4),
    "groups of 64": ("llama", "float16", {**ASYM, "group_size": 64}),
    "by rows": ("llama", "float16", {**ASYM, "group_size": -1}),
    "skipped": ("llama", "float16", {**ASYM, "set": SKIPPED}),
    "skipped bfloat16": ("qwen2", "bfloat16", {**W4, "set": {"mlp.down_proj": {"skip": True}}}),
    "static groups": ("llama", "float16", {**ASYM, "method": "gptq"}),
    "biases": ("qwen2", "bfloat16", {**ASYM, "group_size": 64}),
}


@pytest.fixture(scope="module")
def loaded(compress, tmp_path_factory):
    """loaded(loader): logits by case."""
    folder = tmp_path_factory.mktemp("awq")
    made = {}

    def of(loader):
        if loader not in made:
            paths = {name: compress(family, dtype, "awq", **how) for name, (family, dtype, how) in CASES.items()}
            logits = logits_of(paths.values(), folder, loader)
            made[loader] = {name: logits[path] for name, path in paths.items()}
        return made[loader]

    return of


@pytest.mark.parametrize("loader", ["transformers", "gptqmodel"])
@pytest.mark.parametrize("name", CASES)
def test_others_compute_what_the_decoded_weights_give(loaded, compress, loader, name):
    family, dtype, options = CASES[name]
    theirs = loaded(loader)[name]
    assert not isinstance(theirs, str), theirs
    ours = logits_of_dense(compress(family, dtype, "dense", **options))
    unlike = logits_of_dense(compress(family, dtype, "dense", bits=8, group_size=32))
    # the kernel that transformers takes on a CPU computes in bfloat16, whatever the model says
    tolerance = TOLERANCE["bfloat16" if loader == "transformers" else dtype] * ours.abs().max()
    assert (theirs - ours).abs().max() <= tolerance
    assert (unlike - ours).abs().max() > 2 * tolerance  # other codes would be noticed
