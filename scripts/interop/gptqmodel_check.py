"""Load gptq and awq checkpoints with GPTQModel on the CPU and save the logits they give for some token ids.

GPTQModel needs an environment of its own (7.6.0 is the last version that accepts torch 2.13):

    bash scripts/interop/gptqmodel_env.sh
    .venv-gptqmodel/bin/python scripts/interop/gptqmodel_check.py IDS.safetensors LOGITS.safetensors CHECKPOINT ...

With `--loader transformers` that loads them, on GPTQModel's kernels.

IDS holds an integer tensor `input_ids` [samples, length]. LOGITS gets a float32 tensor [samples, length, vocabulary]
under each checkpoint's name as given; the last line printed is a JSON object with the error of those that do not load.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# the tool wants a pool of at least two workers, but asks for one on a machine of two cores
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loader", choices=LOADERS, default="gptqmodel")
    parser.add_argument("ids", metavar="IDS.safetensors")
    parser.add_argument("logits", metavar="LOGITS.safetensors")
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT")
    arguments = parser.parse_args()

    import torch
    from safetensors.torch import load_file, save_file

    ids = load_file(arguments.ids)["input_ids"].long()
    logits: dict[str, torch.Tensor] = {}
    errors: dict[str, str] = {}
    for checkpoint in arguments.checkpoints:
        try:
            model = LOADERS[arguments.loader](Path(checkpoint))
            with torch.inference_mode():
                logits[checkpoint] = model(input_ids=ids).logits.float().contiguous()
        except Exception as error:  # whatever another project raises is the finding
            errors[checkpoint] = f"{type(error).__name__}: {error}"
    save_file(logits, arguments.logits)
    print(json.dumps(errors), flush=True)


def by_gptqmodel(checkpoint: Path) -> Any:
    import torch
    from gptqmodel import BACKEND, GPTQModel

    config = config_of(checkpoint)
    backends = {"gptq": BACKEND.GPTQ_TORCH, "awq": BACKEND.AWQ_TORCH}
    # by itself it computes in bfloat16 on a CPU, whatever the checkpoint says
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    backend = backends[config["quantization_config"]["quant_method"]]
    return GPTQModel.load(str(checkpoint), device="cpu", backend=backend, dtype=dtype).model


def by_transformers(checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, device_map="cpu")


def config_of(checkpoint: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    return config


LOADERS = {"gptqmodel": by_gptqmodel, "transformers": by_transformers}

if __name__ == "__main__":
    main()
