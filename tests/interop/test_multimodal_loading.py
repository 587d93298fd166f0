"""transformers' multimodal classes read what we write of multimodal models, and compute what we decode."""

import pytest
import torch
from safetensors.torch import load_file

from llmcompress.validate.load import load_whole
from llmcompress.validate.verify import passed, verify
from multimodals import KINDS, multimodal
from tinyruns import compress, recipe

pytestmark = pytest.mark.interop

IDS = torch.randint(2, 256, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", [{}, {"set": {"self_attn.o_proj": {"bits": 8}}}], ids=["one grid", "two grids"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_compressed_language_model_loads_within_its_whole(kind, options, tmp_path):
    from transformers import AutoModelForImageTextToText

    source, _ = multimodal(kind, tmp_path / "model", torch.bfloat16)
    compress(source, tmp_path / "out", recipe(group_size=16, **options))
    checks = verify(tmp_path / "out", source)
    assert passed(checks), checks
    theirs, told = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(told.values())
    with torch.no_grad():
        found = theirs.eval()(input_ids=IDS, use_cache=False).logits
        ours = load_whole(tmp_path / "out", dtype=torch.float32)(input_ids=IDS, use_cache=False).logits
    assert ours.std() > 0.1
    assert torch.allclose(found, ours, atol=1e-4 * float(ours.abs().max()))
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "out"))
    towers = [name for name in before if "vision" in name or "visual" in name]
    assert towers
    assert all(torch.equal(before[name], after[name]) for name in towers)
