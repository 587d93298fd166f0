"""Quantise a model with GPTQModel, for comparison.

GPTQModel needs an environment of its own. Torch comes first, so that the tool takes the build that
is there instead of fetching another one:

    python3.11 -m venv gptqmodel-venv
    gptqmodel-venv/bin/pip install torch==2.13.0 setuptools wheel packaging ninja pybind11 numpy
    gptqmodel-venv/bin/pip install --no-build-isolation gptqmodel==7.6.0

Version 7.6.0 is the last one that accepts torch 2.13. Then, with the calibration tokens as an
integer tensor ``input_ids`` [samples, length]:

    python run_gptqmodel.py MODEL_DIR IDS.safetensors OUT_DIR --bits 4 --group-size 64 --desc-act

All linears inside the decoder blocks are quantised, symmetric and weight-only; the head is not.
The tool's defaults hold for all the rest. The last line printed is a JSON object with the costs.
"""

import argparse
import json
import os
import resource
import time
from importlib.metadata import version

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The tool wants a pool of at least two workers, but asks for one on a machine of two cores.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GPTQ by GPTQModel on given tokens")
    parser.add_argument("model", metavar="MODEL_DIR")
    parser.add_argument("ids", metavar="IDS.safetensors")
    parser.add_argument("out", metavar="OUT_DIR")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--desc-act", action="store_true", help="dynamic activation order (g_idx)")
    return parser.parse_args()


def quantize(args: argparse.Namespace) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig
    from safetensors.torch import load_file

    ids = load_file(args.ids)["input_ids"].long()
    rows = [{"input_ids": row, "attention_mask": row.new_ones(row.shape)} for row in ids]

    order = {"desc_act": True} if args.desc_act else {}
    config = QuantizeConfig(
        bits=args.bits,
        group_size=args.group_size,
        sym=True,
        format="gptq",
        device="cpu",
        **order,
    )
    model = GPTQModel.load(args.model, config)
    model.quantize(rows, batch_size=1)
    model.save(args.out)


def main() -> None:
    args = parse_args()
    start = time.perf_counter()
    quantize(args)
    wall = time.perf_counter() - start
    usage = resource.getrusage(resource.RUSAGE_SELF)
    report = {
        "tool": "gptqmodel",
        "version": version("gptqmodel"),
        "bits": args.bits,
        "group_size": args.group_size,
        "variant": "desc_act" if args.desc_act else "default",
        "wall_s": round(wall, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_rss_mb": round(usage.ru_maxrss / 1024, 1),
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
