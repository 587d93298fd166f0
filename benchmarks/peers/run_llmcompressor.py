"""Quantise a model with llm-compressor, for comparison.

llm-compressor needs an environment of its own, as it pins transformers and compressed-tensors.
Torch comes first, so that the tool takes the build that is there:

    python3.11 -m venv llmcompressor-venv
    llmcompressor-venv/bin/pip install torch==2.13.0
    llmcompressor-venv/bin/pip install llmcompressor==0.14.0.1

Then, with the calibration tokens as an integer tensor ``input_ids`` [samples, length]:

    python run_llmcompressor.py MODEL_DIR IDS.safetensors OUT_DIR --bits 4 --group-size 64

All linears inside the decoder blocks are quantised, symmetric and weight-only; the head is not.
The tool's defaults hold for all the rest, among them its static activation order: ``--desc-act``
is taken only so that the peers share one command line, and is refused, since the tool no longer
writes checkpoints with a permuted ``g_idx``. The weights are loaded as bfloat16, as GPTQModel does
by itself on a CPU, where float16 is several times slower (``--dtype auto`` keeps the checkpoint's
own type). The last line printed is a JSON object with the costs.
"""

import argparse
import json
import os
import resource
import time
from importlib.metadata import version

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GPTQ by llm-compressor on given tokens")
    parser.add_argument("model", metavar="MODEL_DIR")
    parser.add_argument("ids", metavar="IDS.safetensors")
    parser.add_argument("out", metavar="OUT_DIR")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--desc-act", action="store_true", help="not available in this tool")
    parser.add_argument("--dtype", default="bfloat16", help="to load the weights in; or auto")
    args = parser.parse_args()
    if args.desc_act:
        parser.error("llm-compressor has no dynamic activation order; its default is static")
    return args


def quantize(args: argparse.Namespace) -> None:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = load_file(args.ids)["input_ids"]
    mask = ids.new_ones(ids.shape)
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": mask.tolist()})

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    weights = QuantizationArgs(
        num_bits=args.bits,
        type="int",
        symmetric=True,
        strategy="group",
        group_size=args.group_size,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=data,
        recipe=GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"]),
        batch_size=1,
        num_calibration_samples=len(ids),
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(args.out, save_compressed=True, quantization_format="pack-quantized")
    tokenizer.save_pretrained(args.out)


def main() -> None:
    args = parse_args()
    start = time.perf_counter()
    quantize(args)
    wall = time.perf_counter() - start
    usage = resource.getrusage(resource.RUSAGE_SELF)
    report = {
        "tool": "llmcompressor",
        "version": version("llmcompressor"),
        "bits": args.bits,
        "group_size": args.group_size,
        "variant": "static",
        "wall_s": round(wall, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_rss_mb": round(usage.ru_maxrss / 1024, 1),
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
