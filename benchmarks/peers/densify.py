"""Write a plain float32 copy of a GPTQ or compressed-tensors (pack-quantized) checkpoint.

One evaluator can then judge all tools alike, without their loaders and their kernels:

    python densify.py QUANTISED_DIR DENSE_DIR

Needs torch and safetensors only, so it runs in any of the peers' environments. The weights are
dequantised exactly as stored: scale * (code - zero) is exact in float32 for 16-bit scales.
Tensors that were not quantised are widened to float32 unchanged.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Read ``count`` codes from the bit stream in the last dimension of int32 words."""
    low = words.to(torch.int64) & 0xFFFFFFFF
    high = torch.nn.functional.pad(low[..., 1:], (0, 1))
    start = torch.arange(count) * bits
    index = start // 32
    pair = low[..., index] | (high[..., index] << 32)
    return (pair >> (start % 32)) & (2**bits - 1)


def from_gptq(part: Tensors, config: dict) -> torch.Tensor:
    """Dequantise one linear of the GPTQ format to a float32 weight [out, in]."""
    bits = config["bits"]
    groups = part["g_idx"].long()
    scales = part["scales"].float()
    zeros = unpack(part["qzeros"], bits, scales.shape[1])
    if config.get("checkpoint_format", "gptq") == "gptq":  # this version stores zero - 1
        zeros = (zeros + 1) & (2**bits - 1)
    if config["sym"] and not bool((zeros == 2 ** (bits - 1)).all()):
        raise ValueError("zero points of a symmetric checkpoint are not in the middle")
    codes = unpack(part["qweight"].T, bits, len(groups))
    return (codes - zeros[groups].T) * scales[groups].T


def from_packed(part: Tensors, config: dict) -> torch.Tensor:
    """Dequantise one linear of the pack-quantized format to a float32 weight [out, in]."""
    bits = config["config_groups"]["group_0"]["weights"]["num_bits"]
    columns = int(part["weight_shape"][1])
    scales = part["weight_scale"].float()
    codes = unpack(part["weight_packed"], bits, columns) - 2 ** (bits - 1)
    zeros = torch.zeros_like(scales)
    if "weight_zero_point" in part:
        zeros = unpack(part["weight_zero_point"].T.contiguous(), bits, len(scales)).T.float() - 2 ** (bits - 1)
    size = columns // scales.shape[1]
    return (codes - zeros.repeat_interleave(size, dim=1)) * scales.repeat_interleave(size, dim=1)


FORMATS = {
    "gptq": (from_gptq, ("qweight", "qzeros", "scales", "g_idx")),
    "compressed-tensors": (from_packed, ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")),
}


def densify(source: Path, target: Path) -> int:
    """Convert a directory; return how many linears were dequantised."""
    model_config = json.loads((source / "config.json").read_text())
    config = model_config.pop("quantization_config")
    dequantise, names = FORMATS[config["quant_method"]]

    dense: Tensors = {}
    parts: dict[str, Tensors] = {}
    for file in sorted(source.glob("*.safetensors")):
        for key, tensor in load_file(file).items():
            module, _, name = key.rpartition(".")
            if name in names:
                parts.setdefault(module, {})[name] = tensor
            else:
                dense[key] = tensor.float()
    for module, part in parts.items():
        dense[f"{module}.weight"] = dequantise(part, config).contiguous()

    target.mkdir(parents=True, exist_ok=True)
    save_file(dense, target / "model.safetensors", metadata={"format": "pt"})
    model_config.pop("torch_dtype", None)
    model_config["dtype"] = "float32"
    (target / "config.json").write_text(json.dumps(model_config, indent=2) + "\n")
    for pattern in ("tokenizer*", "special_tokens_map.json", "generation_config.json", "*.jinja"):
        for file in source.glob(pattern):
            shutil.copy2(file, target)
    return len(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="float32 copy of a quantised checkpoint")
    parser.add_argument("source", metavar="QUANTISED_DIR", type=Path)
    parser.add_argument("target", metavar="DENSE_DIR", type=Path)
    args = parser.parse_args()
    count = densify(args.source, args.target)
    print(f"{count} linears dequantised into {args.target}")


if __name__ == "__main__":
    main()
