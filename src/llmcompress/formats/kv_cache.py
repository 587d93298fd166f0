"""Static scales of quantised keys and values, as a format may hold them: which tensors, and what a config says.

A cache holds K / k_scale and V / v_scale in 8 bits, or in NVFP4, whose blocks have scales of their own beside. For
the attention module M of a layer the scales are

    compressed-tensors   M.k_scale, M.v_scale [1] in the type of the model; read by vLLM and compressed-tensors
    modelopt             M.k_proj.k_scale, M.v_proj.v_scale F32 [] (where a matrix makes both, of M.qkv_proj), fp8
                         and nvfp4; read by vLLM and TensorRT-LLM, fp8 by SGLang
"""

from collections.abc import Iterable, Mapping
from typing import Any

from llmcompress.formats.base import Entry, TensorSpec

OPTION = "kv_cache"  # of an entry: the code that its scale is for
_BY_MATRIX = "modelopt"
HOLDERS = ("compressed-tensors", _BY_MATRIX)
PARTS = ("k_scale", "v_scale")  # last parts of names

_TYPES = {"fp8": "float", "int8": "int"}
NVFP4 = "NVFP4"  # ModelOpt's scheme
_SCHEMES = {"fp8": {"dynamic": False, "num_bits": 8, "type": "float"}, "nvfp4": NVFP4}  # of ModelOpt


def code_of(entries: Iterable[Entry]) -> str | None:
    """The code that keys and values are to be cached in; None where no entry is a scale of them."""
    return next((str(entry.options[OPTION]) for entry in entries if OPTION in entry.options), None)


def refusal(name: str, entries: Iterable[Entry]) -> tuple[str, str] | None:
    """Why format `name` cannot hold the scales among `entries`, and the way out; None if it can, or there are none."""
    code = code_of(entries)
    if name == _BY_MATRIX and code == "int8":
        return "ModelOpt knows scales of keys and values in fp8 and nvfp4", "use --kv-cache fp8"
    if name != _BY_MATRIX and code == "nvfp4":
        return f"format {name} has no place for keys and values in nvfp4", "use --format modelopt, or --kv-cache fp8"
    if name in HOLDERS or code is None:
        return None
    return (
        f"format {name} has no place for scales of cached keys and values",
        f"use --format {' or '.join(HOLDERS)}, or leave --kv-cache out",
    )


def places(name: str, matrix: str, dtype: str) -> list[TensorSpec]:
    """The scales of one attention in format `name`: of keys, of values.

    matrix: the module that makes the keys. dtype: of the model.
    """
    if name != _BY_MATRIX:
        return [TensorSpec(f"{matrix.rpartition('.')[0]}.{part}", dtype, (1,)) for part in PARTS]
    makers = matrix, matrix.removesuffix("k_proj") + "v_proj" if matrix.endswith(".k_proj") else matrix
    return [TensorSpec(f"{maker}.{part}", "F32", ()) for maker, part in zip(makers, PARTS, strict=True)]


def scheme(code: str) -> Mapping[str, Any]:
    """QuantizationArgs of compressed-tensors for one static scale per layer."""
    return {"num_bits": 8, "type": _TYPES[code], "symmetric": True, "strategy": "tensor", "dynamic": False}


def modelopt_scheme(entries: Iterable[Entry]) -> tuple[str | None, Any]:
    """ModelOpt's name of how keys and values are cached, and its kv_cache_scheme; None where they are left alone."""
    code = code_of(entries)
    return (None, None) if code is None else (code.upper(), _SCHEMES[code])
