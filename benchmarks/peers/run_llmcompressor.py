"""Quantise a model with llm-compressor, for comparison.

llm-compressor needs an environment of its own, as it pins transformers and compressed-tensors.
Torch comes first, so that the tool takes the build that is there:

    python3.11 -m venv llmcompressor-venv
    llmcompressor-venv/bin/pip install torch==2.13.0
    llmcompressor-venv/bin/pip install llmcompressor==0.14.0.1

Then, with the calibration tokens as an integer tensor ``input_ids`` [samples, length]:

    python run_llmcompressor.py MODEL_DIR IDS.safetensors OUT_DIR --bits 4 --group-size 64

All linears inside the decoder blocks are quantised, weight-only, symmetric by GPTQ and asymmetric by AWQ (`--method
awq`, with both kinds of scales tried); the head is not. With `--method wanda` or `sparsegpt` they are pruned instead,
to `--sparsity 0.5` or in the `--pattern` 2:4, and written in their own type. With `--scheme NVFP4` or another
preset of the tool's, weights and inputs are rounded as it says, by `--method gptq` or, to the nearest, `rtn` and
`smoothquant`, which shares outliers out before.
The tool's defaults hold for all the rest, among them its static activation order: ``--desc-act``
is taken only so that the peers share one command line, and is refused, since the tool no longer
writes checkpoints with a permuted ``g_idx``. The weights are loaded as bfloat16, as GPTQModel does
by itself on a CPU, where float16 is several times slower (``--dtype auto`` keeps the checkpoint's
own type). An expert is calibrated on all tokens, or with `--routed-tokens` on those that its router
sends it. Its AWQ asks a CUDA device to pin memory also where there is none, which is turned off
here. The last line printed is a JSON object with the costs.
"""

import argparse
from typing import Any

from common import measured, parser

PRUNING = ("wanda", "sparsegpt")
ROUNDING = ("gptq", "rtn", "smoothquant")


def modifiers(args: argparse.Namespace, groups: dict[str, Any]) -> list[Any]:
    """The steps of a method for all linears but the head."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.pruning.sparsegpt import SparseGPTModifier
    from llmcompressor.modifiers.pruning.wanda import WandaPruningModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform import AWQModifier, SmoothQuantModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    if args.method in PRUNING:
        modifier = {"wanda": WandaPruningModifier, "sparsegpt": SparseGPTModifier}[args.method]
        return [modifier(sparsity=args.sparsity, mask_structure=args.pattern, ignore=["re:.*lm_head"])]
    rounded = {"targets": "Linear", "scheme": args.scheme} if args.scheme else {"config_groups": groups}
    if args.method in ROUNDING:
        before = [SmoothQuantModifier()] if args.method == "smoothquant" else []
        modifier = GPTQModifier if args.method == "gptq" else QuantizationModifier
        return [*before, modifier(**rounded, ignore=["lm_head"])]
    IntermediatesCache.pin_memory = lambda *_: None
    return [AWQModifier(duo_scaling="both"), QuantizationModifier(config_groups=groups, ignore=["lm_head"])]


def quantize(args: argparse.Namespace) -> None:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
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
        symmetric=args.method != "awq",
        strategy="group",
        group_size=args.group_size,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=data,
        recipe=modifiers(args, {"group_0": scheme}),
        batch_size=1,
        num_calibration_samples=len(ids),
        shuffle_calibration_samples=False,
        moe_calibrate_all_experts=not args.routed_tokens,
    )
    how = {} if args.method in PRUNING else {"save_compressed": True}
    if how and not args.scheme:
        how["quantization_format"] = "pack-quantized"
    model.save_pretrained(args.out, **how)
    tokenizer.save_pretrained(args.out)


def main() -> None:
    options = parser("GPTQ or AWQ by llm-compressor on given tokens", "not available in this tool")
    options.add_argument("--method", choices=(*ROUNDING, "awq", *PRUNING), default="gptq")
    options.add_argument("--scheme", help="a preset of the tool's, such as NVFP4A16, in place of bits and groups")
    options.add_argument("--dtype", default="bfloat16", help="to load the weights in; or auto")
    options.add_argument("--sparsity", type=float, default=0.5)
    options.add_argument("--pattern", default="0:0", help="zeros:of, as the tool has it")
    options.add_argument("--routed-tokens", action="store_true", help="calibrate an expert on the tokens sent to it")
    args = options.parse_args()
    if args.desc_act:
        options.error("llm-compressor has no dynamic activation order; its default is static")
    if args.scheme and args.method not in ROUNDING:
        options.error(f"--scheme is taken by --method {' and '.join(ROUNDING)} alone")
    measured(args, quantize, "llmcompressor", "static" if args.method == "gptq" else args.method)


if __name__ == "__main__":
    main()
