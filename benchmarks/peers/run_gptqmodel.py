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
import os

from common import measured, parser

# The tool wants a pool of at least two workers, but asks for one on a machine of two cores.
if (os.cpu_count() or 1) <= 2:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")


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
    args = parser("GPTQ by GPTQModel on given tokens", "dynamic activation order (g_idx)").parse_args()
    measured(args, quantize, "gptqmodel", "desc_act" if args.desc_act else "default")


if __name__ == "__main__":
    main()
