"""Scales of cached keys and values in a directory, checked by numpy alone.

Proved: config.json and the tensors agree on whether there are scales, every attention has both, each is one positive
number where the format has its place, and each is the largest magnitude recorded in report.json divided by the code's
largest value.
"""

import re
from collections.abc import Mapping
from typing import Any

from llmcompress.validate.stored import Tensor

_SCALE = re.compile(r"(.*\.(\d+)\.self_attn)(\.(?:[kv]|qkv)_proj)?\.([kv])_scale")
_KEYS = re.compile(r"(.*\.\d+\.self_attn)\.(k_proj|qkv_proj)\.(?:weight|weight_packed)")
_CODES = {("float", 8): ("fp8", 448.0), ("int", 8): ("int8", 127.0), ("float", 4): ("nvfp4", 448.0)}
_STATIC = {"symmetric": True, "strategy": "tensor", "dynamic": False}
_SIDES = {"k": "key", "v": "value"}
_ROUNDING = {"BF16": 2.0**-7, "F16": 2.0**-10, "F32": 2.0**-23, "F64": 1e-12}  # upwards, by one unit


def cache_scales(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The scales of keys and values among all tensors."""
    return {name: tensor for name, tensor in tensors.items() if _SCALE.fullmatch(name)}


def cache_wrongs(settings: Mapping[str, Any], tensors: Mapping[str, Tensor], report: Mapping[str, Any]) -> list[str]:
    """Faults of the scales of keys and values, given quantization_config, all tensors and report.json."""
    scheme, held = settings.get("kv_cache_scheme"), cache_scales(tensors)
    if scheme is None:
        return [f"{name} is there, and config.json has no kv_cache_scheme" for name in held]
    by_matrix = settings.get("quant_method") == "modelopt"  # which leaves out what it always says of scales
    if by_matrix and scheme == "NVFP4":
        scheme = {"type": "float", "num_bits": 4}
    code, end = _CODES.get((scheme["type"], scheme["num_bits"]), (None, 0.0))
    if (
        code is None
        or (code == "nvfp4" and not by_matrix)
        or any(scheme.get(key, value if by_matrix else None) != value for key, value in _STATIC.items())
    ):
        return [f"kv_cache_scheme is none of one scale per layer in 8 bits or nvfp4: {scheme}"]
    wanted = {
        _place(match[1], match[2], side, by_matrix)
        for name in tensors
        if (match := _KEYS.fullmatch(name))
        for side in _SIDES
    }
    wrong = [f"{name} is missing" for name in sorted(wanted - held.keys())]
    wrong += [f"{name} belongs to no attention" for name in sorted(held.keys() - wanted)]
    recorded = report.get("kv_cache") or {}
    if recorded.get("code", code) != code:
        wrong.append(f"kv_cache_scheme says {code}, report.json {recorded['code']}")
    for name, tensor in held.items():
        if tensor.shape != (() if by_matrix else (1,)) or tensor.dtype not in (["F32"] if by_matrix else _ROUNDING):
            wrong.append(f"{name} is {tensor.dtype} {list(tensor.shape)}, not one floating number")
            continue
        scale = float(tensor.array() if by_matrix else tensor.floats()[0])
        if not 0 < scale < float("inf"):
            wrong.append(f"{name} is {scale}")
        elif recorded:
            match = _SCALE.fullmatch(name)
            assert match is not None
            largest = float(recorded["largest"][int(match[2])][_SIDES[match[4]]])
            exact = largest / end or 1.0
            if not exact * (1 - 1e-6) <= scale <= exact * (1 + _ROUNDING[tensor.dtype]):
                wrong.append(f"{name} is {scale:g}, by report.json {exact:g}")
    return wrong


def _place(attention: str, keys: str, side: str, by_matrix: bool) -> str:
    """The name of a scale: below the matrix that makes keys or values, or below the attention."""
    matrix = f".{side}_proj" if keys == "k_proj" else f".{keys}"
    return f"{attention}{matrix if by_matrix else ''}.{side}_scale"
