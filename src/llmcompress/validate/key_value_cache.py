"""The key-value cache of an evaluated model: quantised by the checkpoint's scales or as the user asks."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from llmcompress.arch.spec import attention_heads
from llmcompress.engine.source.multimodal import text_view
from llmcompress.errors import CheckpointError, RecipeError
from llmcompress.formats.kv_cache import NVFP4
from llmcompress.grids.cache import Code, by_scale, by_token
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.headers import read_headers
from llmcompress.validate.gguf_file import gguf_in

_SCALE = re.compile(r"(?:^|.*\.)(\d+)\.self_attn\.(?:(?:[kv]|qkv)_proj\.)?([kv])_scale")
_KINDS: dict[Code, tuple[str, int]] = {"fp8": ("float", 8), "int8": ("int", 8), "nvfp4": ("float", 4)}


@dataclass(frozen=True)
class CacheOptions:
    """The user's choice of a cache. bits: 16 for an unquantised cache; both None: as the checkpoint declares."""

    bits: int | None = None
    type: Literal["int", "fp8", "nvfp4"] | None = None

    def __post_init__(self) -> None:
        if self.bits not in (None, 4, 8, 16):
            raise RecipeError(f"--kv-bits {self.bits} is not 4, 8 or 16")
        taken = (8, 4) if self.type is None or self.type == "int" else (_KINDS[self.type][1],)
        if self.type is not None and self.bits not in (None, *taken):
            raise RecipeError(f"a cache of type {self.type} cannot have {self.bits} bits", f"use --kv-bits {taken[0]}")


@dataclass(frozen=True)
class TokenCodes:
    """Integers with a scale and a lowest value per token and head, computed as each token arrives."""

    bits: int

    def __call__(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return by_token(key, self.bits), by_token(value, self.bits)

    def __str__(self) -> str:
        return f"int{self.bits} per token and head"


@dataclass(frozen=True)
class ByScale:
    """Codes under static scales by layer; like engines, 1 for layers without scales."""

    code: Code
    scales: dict[int, tuple[Tensor, Tensor]]

    def __call__(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        of_key, of_value = self.scales.get(layer, (torch.ones(1), torch.ones(1)))
        return (
            by_scale(key, of_key.to(key.device), self.code),
            by_scale(value, of_value.to(value.device), self.code),
        )

    def __str__(self) -> str:
        return f"{self.code}, scales {'of the checkpoint' if self.scales else '1'}"


def cache_of(path: Path, asked: CacheOptions) -> TokenCodes | ByScale | None:
    """The cache to simulate for the model at `path`; None for an unquantised cache.

    The user's choice overrides the checkpoint's; floats take the checkpoint's scales if it has such, else 1.
    CheckpointError for invalid scales.
    """
    if asked.bits == 16:
        return None
    if asked.type == "int" or (asked.bits is not None and asked.type is None):
        return TokenCodes(asked.bits or 8)
    own = stored_cache(path) if gguf_in(path) is None else None
    if asked.type is not None and (own is None or own.code != asked.type):
        return ByScale(asked.type, {})
    return own


def stored_cache(path: Path) -> ByScale | None:
    """The static scales of a directory of compressed-tensors or ModelOpt; None if its config declares none."""
    headers = text_view(read_headers(path))
    settings = headers.config.get("quantization_config")
    if not isinstance(settings, dict) or settings.get("kv_cache_scheme") is None:
        return None
    scheme = settings["kv_cache_scheme"]
    kinds = _KINDS
    if not str(settings.get("quant_method")).startswith("modelopt"):
        kinds = {code: kind for code, kind in _KINDS.items() if kind[1] == 8}
    elif scheme == NVFP4:
        scheme = {"type": "float", "num_bits": 4}
    if not isinstance(scheme, dict):
        raise CheckpointError(
            f"{path / 'config.json'}: kv_cache_scheme is no mapping", "use --kv-bits 16 to do without"
        )
    code = next((code for code, kind in kinds.items() if kind == (scheme.get("type"), scheme.get("num_bits"))), None)
    heads = attention_heads(headers.config)
    shapes: dict[str, list[tuple[int, ...]]] = {"tensor": [(), (1,)]}
    if heads is not None:
        shapes["attn_head"] = [(heads[1], 1, 1)]
    fitting = shapes.get(str(scheme.get("strategy", "tensor")))  # ModelOpt has no other, and does not say so
    static = scheme.get("dynamic", False) is False and scheme.get("symmetric", True) is True
    if code is None or fitting is None or not static:
        raise CheckpointError(
            f"{path / 'config.json'}: kv_cache_scheme is not one of static scales in 8 bits or nvfp4",
            "use --kv-bits 16 to do without",
        )
    reader = Checkpoint(headers)
    found: dict[int, dict[str, Tensor]] = {}
    for name in headers.tensors:
        if match := _SCALE.fullmatch(name):
            scale = reader.read_finite(name)
            if not scale.is_floating_point() or tuple(scale.shape) not in fitting or not bool((scale > 0).all()):
                raise CheckpointError(f"{path}: {name} is no scale of cached keys or values")
            found.setdefault(int(match[1]), {})[match[2]] = scale.to(torch.float32)
    scales = {layer: (sides["k"], sides["v"]) for layer, sides in found.items() if len(sides) == 2}
    if not scales or len(scales) < len(found):
        raise CheckpointError(f"{path} lacks scales of keys or values, which its config.json speaks of")
    return ByScale(code, scales)
