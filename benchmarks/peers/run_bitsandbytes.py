"""Round a model to NF4 with transformers and bitsandbytes, scales quantised again, for comparison.

    python run_bitsandbytes.py MODEL_DIR IDS.safetensors OUT_DIR

Runs in our own environment, which has both for its tests. All linears but the head are rounded, on the CPU; no text is
read, and bits and groups are those of the format: the ids and options are taken as by the other scripts. The last line
printed is a JSON object.
"""

import argparse

from common import measured, parser


def quantize(args: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, quantization_config=config, device_map="cpu"
    )
    model.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.out)


def main() -> None:
    options = parser("NF4 by bitsandbytes", "not available in this tool")
    measured(options.parse_args(), quantize, "bitsandbytes", "double quantisation")


if __name__ == "__main__":
    main()
