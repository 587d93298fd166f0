"""Round a model's weights to NVFP4 with NVIDIA's ModelOpt, for comparison.

ModelOpt needs an environment of its own. Torch comes first, so that the tool takes the build that is there:

    python3.11 -m venv modelopt-venv
    modelopt-venv/bin/pip install torch==2.13.0
    modelopt-venv/bin/pip install nvidia-modelopt==0.47.0 transformers==5.17.0 safetensors

    python run_modelopt.py MODEL_DIR IDS.safetensors OUT_DIR

All linears inside the decoder blocks are rounded, weights alone. Without CUDA the tool can do no more than its default,
`max`: scales that cover the largest weight of a block, for which it looks at no token. Its searches of scales, its AWQ
and its GPTQ for NVFP4 stop at an assertion on a processor. What is written is a model of float32 that has the rounded
values, for every evaluator alike. The last line printed is a JSON object with the costs.
"""

import argparse

from common import measured, parser

BLOCK = 16


def quantize(args: argparse.Namespace) -> None:
    import torch
    from modelopt.torch.quantization.qtensor import NVFP4QTensor
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                codes, scale, factor = NVFP4QTensor.quantize(module.weight, BLOCK)
                module.weight.copy_(
                    codes.dequantize(torch.float32, scale=scale, double_scale=factor, block_sizes={-1: BLOCK})
                )
    model.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.out)


if __name__ == "__main__":
    taken = parser(__doc__, "is not taken")
    given = taken.parse_args()
    if (given.bits, given.group_size, given.desc_act) != (4, 64, False):
        taken.error("the grid is NVFP4, without options")
    measured(given, quantize, "nvidia-modelopt", "max")
