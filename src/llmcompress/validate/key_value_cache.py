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
from llmcompress.grids.cache import Code, by_scale, by_token
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.headers import read_headers
from llmcompress.validate.gguf_file import gguf_in

_SCALE = re.compile(r"(?:^|.*\.)(\d+)\.self_attn\.(?:(?:[kv]|qkv)_proj\.)?([kv])_scale")
_KINDS: dict[Code, tuple[str, int]] = {"fp8": ("float", 8), "int8": ("int", 8)}


@dataclass(frozen=True)
class CacheOptions:
    """The user's choice of a cache. bits: 16 for an unquantised cache; both None: as the checkpoint declares."""

    bits: int | None = None
    type: Literal["int", "fp8"] | None = None

    def __post_init__(self) -> None:
        if self.bits not in (None, 4, 8, 16):
            raise RecipeError(f"--kv-bits {self.bits} is not 4, 8 or 16")
        if self.type is not None and self.bits not in (None, *((8,) if self.type == "fp8" else (4, 8))):
            raise RecipeError(f"a cache of type {self.type} cannot have {self.bits} bits", "use --kv-bits 8")


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

    The user's choice overrides the checkpoint's; fp8 takes the checkpoint's scales if there are any, else 1.
    CheckpointError for invalid scales.
    """
    if asked.bits == 16:
        return None
    if (asked.bits is not None and asked.type != "fp8") or asked.type == "int":
        return TokenCodes(asked.bits or 8)
    own = stored_cache(path) if gguf_in(path) is None else None
    if asked.type == "fp8" and (own is None or own.code != "fp8"):
        return ByScale("fp8", {})
    return own


def stored_cache(path: Path) -> ByScale | None:
    """The static scales of a directory of compressed-tensors or ModelOpt; None if its config declares none."""
    headers = text_view(read_headers(path))
    settings = headers.config.get("quantization_config")
    scheme = settings.get("kv_cache_scheme") if isinstance(settings, dict) else None
    if scheme is None:
        return None
    if not isinstance(scheme, dict):
        raise CheckpointError(
            f"{path / 'config.json'}: kv_cache_scheme is no mapping", "use --kv-bits 16 to do without"
        )
    code = next((code for code, kind in _KINDS.items() if kind == (scheme.get("type"), scheme.get("num_bits"))), None)
    heads = attention_heads(headers.config)
    shapes: dict[str, list[tuple[int, ...]]] = {"tensor": [(), (1,)]}
    if heads is not None:
        shapes["attn_head"] = [(heads[1], 1, 1)]
    fitting = shapes.get(str(scheme.get("strategy", "tensor")))  # ModelOpt has no other, and does not say so
    static = scheme.get("dynamic", False) is False and scheme.get("symmetric", True) is True
    if code is None or fitting is None or not static:
        raise CheckpointError(
            f"{path / 'config.json'}: kv_cache_scheme is not one of static scales in 8 bits",
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
