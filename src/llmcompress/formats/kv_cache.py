"""Static scales of quantised keys and values, as a format may hold them: which tensors, and what a config says.

The attention module M of a layer has M.k_scale and M.v_scale, shape [1], in the type of the model: a cache holds
K / k_scale and V / v_scale in 8 bits. Both compressed-tensors and, for fp8, vLLM read them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from llmcompress.formats.base import Entry

OPTION = "kv_cache"  # of an entry: the code that its scale is for
HOLDERS = ("compressed-tensors",)
PARTS = ("k_scale", "v_scale")  # last parts of names

_TYPES = {"fp8": "float", "int8": "int"}


def code_of(entries: Iterable[Entry]) -> str | None:
    """The code that keys and values are to be cached in; None where no entry is a scale of them."""
    return next((str(entry.options[OPTION]) for entry in entries if OPTION in entry.options), None)


def refusal(name: str, entries: Iterable[Entry]) -> tuple[str, str] | None:
    """Why format `name` cannot hold the scales among `entries`, and the way out; None if it can, or there are none."""
    if name in HOLDERS or code_of(entries) is None:
        return None
    return (
        f"format {name} has no place for scales of cached keys and values",
        f"use --format {' or '.join(HOLDERS)}, or leave --kv-cache out",
    )


def scheme(code: str) -> Mapping[str, Any]:
    """QuantizationArgs of compressed-tensors for one static scale per layer."""
    return {"num_bits": 8, "type": _TYPES[code], "symmetric": True, "strategy": "tensor", "dynamic": False}
