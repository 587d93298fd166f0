"""PEFT loads our adapters upon the compressed model, and computes what `eval --adapter` measures."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.structure.lora import repair
from llmcompress.engine.structure.lora_plan import plan_lora
from llmcompress.recipe import Calibration, build
from llmcompress.validate.adapted_model import adapt_whole
from llmcompress.validate.load import load_whole

pytestmark = pytest.mark.interop

IDS = torch.randint(2, 90, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("by", ["outputs", "weights"])
@pytest.mark.parametrize(
    ("family", "form"),
    [*((family, "dense") for family in ("llama", "gpt2", "phi3", "opt")), ("llama", "compressed-tensors")],
)
def test_peft_computes_what_we_do(family, form, by, compress, random_model_dir, tmp_path):
    from peft import PeftModel
    from transformers import CompressedTensorsConfig

    compressed = compress(family, "bfloat16", form, bits=3, group_size=32)
    decoded = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if form != "dense" else {}
    original = compressed.parent / f"{family}-bfloat16"
    text = build(Calibration, {"source": str(compressed.parent / "ids.safetensors"), "samples": 16, "length": 32}, "")
    out = tmp_path / "adapter"
    repair(plan_lora(original, compressed, 8, by, text, Options(out=out, compute_dtype="float32")))
    base = AutoModelForCausalLM.from_pretrained(compressed, dtype=torch.float32, **decoded)
    theirs = PeftModel.from_pretrained(base, out)
    missing = [name for name, value in theirs.named_parameters() if "lora_B" in name and not value.any()]
    assert not missing
    ours = load_whole(compress(family, "bfloat16", "dense", bits=3, group_size=32), dtype=torch.float32)
    with torch.no_grad():
        before = ours(IDS, use_cache=False).logits
        adapt_whole(ours, out, compressed)
        mine, peft = ours(IDS, use_cache=False).logits, theirs.eval()(IDS, use_cache=False).logits
    torch.testing.assert_close(mine, peft, rtol=1e-3, atol=1e-3)
    assert (mine - before).abs().max() > 0.01
    torch.testing.assert_close(theirs.merge_and_unload()(IDS, use_cache=False).logits, mine, rtol=1e-3, atol=1e-3)
