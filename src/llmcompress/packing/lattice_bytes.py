"""Bytes of the types of GGUF that are rounded by eights, IQ2_XXS to IQ3_S, after the `d` of a block.

Source: the block structures of GGML, as GGUF files hold them (little-endian).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcompress.lazy import Tensor, torch


def _by(values: Tensor, count: int) -> Tensor:
    """The last extent cut into parts of `count`."""
    return values.view(*values.shape[:-1], -1, count) if values.is_contiguous() else _by(values.contiguous(), count)


def _halves(at: Tensor) -> Tensor:
    """Whole numbers of 16 bits [...] as bytes [..., 2], the lower one first."""
    return torch.stack([at & 255, at >> 8], dim=-1).flatten(-2)


def _nibbles(scales: Tensor) -> Tensor:
    """Numbers of 4 bits [..., n] as bytes [..., n / 2], the earlier one below."""
    return scales[..., ::2] | scales[..., 1::2] << 4


def _words(signs: Tensor, scales: Tensor) -> Tensor:
    """Four times seven signs and a scale of 4 bits in words of four bytes [..., groups, 4]."""
    shifts = 7 * torch.arange(4, device=signs.device)
    words = ((_by(signs, 4) & 127) << shifts).sum(-1) | scales << 28
    return torch.stack([(words >> shift) & 255 for shift in (0, 8, 16, 24)], dim=-1)


def _spread(rows: Tensor, width: int) -> Tensor:
    """The bits above the eighth of numbers [..., n], `width` of each, together in bytes [..., n * width / 8]."""
    per = 8 // width
    return (_by(rows >> 8, per) << width * torch.arange(per, device=rows.device)).sum(-1)


def _of_halves(data: Tensor) -> Tensor:
    return data[..., ::2] | data[..., 1::2] << 8


def _of_nibbles(data: Tensor) -> Tensor:
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)


def _of_words(data: Tensor) -> tuple[Tensor, Tensor]:
    """Signs of eight, the eighth making minus signs even, and scales."""
    words = (data << torch.tensor([0, 8, 16, 24], device=data.device)).sum(-1)
    seven = (words.unsqueeze(-1) >> 7 * torch.arange(4, device=data.device)).flatten(-2) & 127
    return _with_eighth(seven), words >> 28


def _with_eighth(seven: Tensor) -> Tensor:
    odd = ((seven.unsqueeze(-1) >> torch.arange(7, device=seven.device)) & 1).sum(-1) % 2
    return seven | odd << 7


def _of_spread(low: Tensor, high: Tensor, width: int) -> Tensor:
    shifts = width * torch.arange(8 // width, device=high.device)
    return low | ((high.unsqueeze(-1) >> shifts).flatten(-2) & ((1 << width) - 1)) << 8


def _bytes(*parts: Tensor) -> tuple[Tensor, ...]:
    return tuple(part.to(torch.uint8) for part in parts)


def _pack_2xxs(rows: Tensor, signs: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    return _bytes(torch.cat([_by(rows, 4), _words(signs, scales)], dim=-1).flatten(-2))


def _take_2xxs(data: Tensor) -> tuple[Tensor, ...]:
    whole = _by(data, 8)
    return whole[..., :4].flatten(-2), *_of_words(whole[..., 4:])


def _pack_2xs(rows: Tensor, signs: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    return _bytes(_halves(rows | (signs & 127) << 9), _nibbles(scales))


def _take_2xs(data: Tensor) -> tuple[Tensor, ...]:
    both = _of_halves(data[..., :64])
    return both & 511, _with_eighth(both >> 9), _of_nibbles(data[..., 64:])


def _pack_2s(rows: Tensor, signs: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    return _bytes(rows & 255, signs, _spread(rows, 2), _nibbles(scales))


def _take_2s(data: Tensor) -> tuple[Tensor, ...]:
    low, signs, high, scales = torch.split(data, [32, 32, 8, 8], dim=-1)
    return _of_spread(low, high, 2), signs, _of_nibbles(scales)


def _pack_3xxs(rows: Tensor, signs: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    return _bytes(rows, _words(signs, scales).flatten(-2))


def _take_3xxs(data: Tensor) -> tuple[Tensor, ...]:
    return data[..., :64], *_of_words(_by(data[..., 64:], 4))


def _pack_3s(rows: Tensor, signs: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    return _bytes(rows & 255, _spread(rows, 1), signs, _nibbles(scales))


def _take_3s(data: Tensor) -> tuple[Tensor, ...]:
    low, high, signs, scales = torch.split(data, [64, 8, 32, 4], dim=-1)
    return _of_spread(low, high, 1), signs, _of_nibbles(scales)


LATTICE_BYTES: Mapping[str, tuple[Any, Any]] = {
    "IQ2_XXS": (_pack_2xxs, _take_2xxs),
    "IQ2_XS": (_pack_2xs, _take_2xs),
    "IQ2_S": (_pack_2s, _take_2s),
    "IQ3_XXS": (_pack_3xxs, _take_3xxs),
    "IQ3_S": (_pack_3s, _take_3s),
}
"""Bytes of blocks after d, of rows of the table, signs (a byte of eight, minus being 1) and scales; and back."""
