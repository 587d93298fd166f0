"""transformers reads FP8 in blocks as DeepSeek has them: on a processor it decodes them to bfloat16."""

import pytest
import torch
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.interop

IDS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(0))
BLOCKS = {"type": "fp8-block"}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_blocks_are_decoded_to_what_their_codes_say(compress, family):
    outputs = (
        compress(family, "bfloat16", "fp8", **BLOCKS, activations="fp8-group"),
        compress(family, "bfloat16", "dense", **BLOCKS),
    )
    theirs, ours = (AutoModelForCausalLM.from_pretrained(out).eval() for out in outputs)
    weights = dict(ours.named_parameters())
    matrices = [name for name, value in weights.items() if ".layers." in name and value.ndim == 2]
    assert len(matrices) == 14
    for name in matrices:
        assert torch.equal(theirs.get_parameter(name), weights[name]), name
    with torch.no_grad():
        assert torch.equal(theirs(IDS).logits, ours(IDS).logits)
