"""Load gptq checkpoints with GPTQModel on the CPU and save the logits they give for some token ids.

GPTQModel needs an environment of its own; torch comes first, so that it takes that build (7.6.0 is the last version
that accepts torch 2.13):

    python3 -m venv .venv-gptqmodel
    .venv-gptqmodel/bin/pip install torch==2.13.0 setuptools wheel packaging ninja numpy
    .venv-gptqmodel/bin/pip install --no-build-isolation gptqmodel==7.6.0

    .venv-gptqmodel/bin/python gptqmodel_check.py IDS.safetensors LOGITS.safetensors CHECKPOINT ...

IDS holds an integer tensor `input_ids` [samples, length]. LOGITS gets a float32 tensor [samples, length, vocabulary]
under each checkpoint's name as given; the last line printed is a JSON object with the error of those that do not load.
"""

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# the tool wants a pool of at least two workers, but asks for one on a machine of two cores
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ids", metavar="IDS.safetensors")
    parser.add_argument("logits", metavar="LOGITS.safetensors")
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT")
    arguments = parser.parse_args()

    import torch
    from gptqmodel import BACKEND, GPTQModel
    from safetensors.torch import load_file, save_file

    ids = load_file(arguments.ids)["input_ids"].long()
    logits: dict[str, torch.Tensor] = {}
    errors: dict[str, str] = {}
    for checkpoint in arguments.checkpoints:
        try:
            # by itself it computes in bfloat16 on a CPU, whatever the checkpoint says
            dtype = getattr(torch, declared_dtype(Path(checkpoint)))
            model = GPTQModel.load(checkpoint, device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=dtype)
            with torch.inference_mode():
                logits[checkpoint] = model.model(input_ids=ids).logits.float().contiguous()
        except Exception as error:  # whatever another project raises is the finding
            errors[checkpoint] = f"{type(error).__name__}: {error}"
    save_file(logits, arguments.logits)
    print(json.dumps(errors), flush=True)


def declared_dtype(checkpoint: Path) -> str:
    config = json.loads((checkpoint / "config.json").read_text())
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")


if __name__ == "__main__":
    main()
