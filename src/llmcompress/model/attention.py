"""Causal attention of whole windows on a processor, in tiles that stay in its caches.

torch's own kernel for bfloat16 multiplies at a fraction of the speed of its plain products. Over whole windows scores
fit into memory tile by tile, so that two batched products and a softmax do, about three times as fast. Scores are
rounded to bfloat16, as in transformers' eager implementation; the softmax sums in float32.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

NAME = "llmcompress_tiled"
_ROWS = 128  # queries in a tile
_TILE = 1 << 20  # scores in a tile, about


def tiled_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """query [batch, heads, length, dim], key and value [batch, kv heads, length, dim] to [batch, length, heads, dim].

    torch's own kernel computes all other cases: other types and devices, caches, further options.
    """
    known = {"scaling", "dropout", "is_causal", "sliding_window", "position_ids", "use_cache", "output_attentions"}
    odd = any(item is not None for name, item in options.items() if name not in known)
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    cached = query.shape[2] != key.shape[2] or key.shape[-1] != value.shape[-1]
    if query.dtype != torch.bfloat16 or query.device.type != "cpu" or odd or cached or options.get("dropout"):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    scaling = options.get("scaling")
    return _tiles(query, key, value, attention_mask, causal, query.shape[-1] ** -0.5 if scaling is None else scaling)


def _tiles(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scaling: float
) -> tuple[Tensor, None]:
    batch, heads, length, dim = query.shape
    groups = key.shape[1]
    share = heads // groups  # query heads that read one key head: rows of one product
    out = torch.empty(batch, length, heads, dim, dtype=query.dtype)
    least = torch.finfo(query.dtype).min
    future = torch.full((_ROWS, _ROWS), least, dtype=query.dtype).triu_(1)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, least)
    for item in range(batch):
        queries = query[item].view(groups, share, length, dim)
        keys, values = key[item].transpose(1, 2), value[item]
        for start in range(0, length, _ROWS):
            stop = min(start + _ROWS, length)
            seen = stop if mask is None and causal else length
            rows = stop - start
            step = max(1, _TILE // (share * rows * seen))
            for first in range(0, groups, step):
                last = min(first + step, groups)
                tile = queries[first:last, :, start:stop].reshape(last - first, share * rows, dim)
                scores = torch.baddbmm(tile.new_empty(1, 1, 1), tile, keys[first:last, :, :seen], beta=0, alpha=scaling)
                grid = scores.view(last - first, share, rows, seen)
                if mask is not None:
                    heads_of = mask[min(item, mask.shape[0] - 1)]
                    if heads_of.shape[0] > 1:
                        heads_of = heads_of.view(groups, share, *heads_of.shape[1:])[first:last]
                    grid += heads_of[..., start:stop, :seen]
                elif causal:
                    grid[..., start:] += future[:rows, :rows]
                weighted = torch.softmax(scores, dim=-1) @ values[first:last, :seen]
                out[item, start:stop].view(rows, groups, share, dim)[:, first:last] = weighted.view(
                    last - first, share, rows, dim
                ).permute(2, 0, 1, 3)
    return out, None


def register() -> None:
    """Make `tiled_attention` known to transformers under NAME."""
    AttentionInterface.register(NAME, tiled_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
