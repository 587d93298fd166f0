"""Bytes of the types of GGUF that have three levels: TQ1_0 and TQ2_0 by trits, IQ1_S and IQ1_M by points of a table.

Source: the block structures of GGML, as GGUF files hold them (little-endian).
"""

from __future__ import annotations

from llmcompress.lazy import Tensor, torch

_TRITS = ((0, 160, 5), (160, 80, 5), (240, 16, 4))  # of a block of TQ1_0: the first code, how many, trits of a byte
_POWERS = (81, 27, 9, 3, 1)
_DELTA = 0x8  # of a nibble of IQ1_M: whether its eight levels are lowered


def pack_tq1(codes: Tensor) -> Tensor:
    """Codes 0 to 2 [..., 256] as bytes uint8 [..., 52]: five trits a byte, as a fraction of 243 that is rounded up."""
    parts = []
    for first, count, trits in _TRITS:
        planes = codes[..., first : first + count].view(*codes.shape[:-1], trits, -1).to(torch.int64)
        powers = torch.tensor(_POWERS[:trits], device=codes.device).unsqueeze(-1)
        parts.append(((planes * powers).sum(-2) * 256 + 242) // 243)
    return torch.cat(parts, dim=-1).to(torch.uint8)


def take_tq1(data: Tensor) -> Tensor:
    """The inverse of `pack_tq1`, for any bytes."""
    parts, at = [], 0
    for _, count, trits in _TRITS:
        held = data[..., at : at + count // trits].to(torch.int64)
        parts += [((held * 3**n & 255) * 3) >> 8 for n in range(trits)]
        at += count // trits
    return torch.cat(parts, dim=-1).to(torch.uint8)


def pack_tq2(codes: Tensor) -> Tensor:
    """Codes of two bits [..., 256] as bytes uint8 [..., 64]; four codes of a byte lie 32 apart."""
    planes = codes.view(*codes.shape[:-1], 2, 4, 32)
    return (planes[..., 0, :] | planes[..., 1, :] << 2 | planes[..., 2, :] << 4 | planes[..., 3, :] << 6).flatten(-2)


def take_tq2(data: Tensor) -> Tensor:
    """The inverse of `pack_tq2`."""
    held = data.view(*data.shape[:-1], 2, 1, 32)
    return torch.cat([held >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2).flatten(-3)


def pack_iq1s(d: Tensor, rows: Tensor, lowered: Tensor, scales: Tensor) -> Tensor:
    """A block of IQ1_S, uint8 [..., 50].

    d [...] float32. rows [..., 32] int64: points of the table, of 11 bits. lowered [..., 32] int64: 1 where levels are
    lowered, the same for each four. scales [..., 8] int64 of 3 bits.
    """
    fours = rows.view(*rows.shape[:-1], 8, 4)
    high = ((fours >> 8) << 3 * torch.arange(4, device=rows.device)).sum(-1)
    words = high | scales << 12 | lowered[..., ::4] << 15
    half = d.to(torch.float16).unsqueeze(-1).view(torch.uint8)
    return torch.cat([half, (rows & 255).to(torch.uint8), _halves(words)], dim=-1)


def take_iq1s(data: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inverse of `pack_iq1s`."""
    d = data[..., :2].contiguous().view(torch.float16).squeeze(-1).to(torch.float32)
    words = _of_halves(data[..., 34:])
    high = (words.unsqueeze(-1) >> 3 * torch.arange(4, device=data.device) & 7).flatten(-2)
    rows = data[..., 2:34].to(torch.int64) | high << 8
    return d, rows, (words >> 15).repeat_interleave(4, dim=-1), words >> 12 & 7


def pack_iq1m(d: Tensor, rows: Tensor, lowered: Tensor, scales: Tensor) -> Tensor:
    """A block of IQ1_M, uint8 [..., 56]; the arguments are those of `pack_iq1s`, but for 16 scales.

    The four nibbles of d lie above the scales.
    """
    nibbles = rows >> 8 | lowered * _DELTA
    threes = (scales.view(*scales.shape[:-1], 4, 4) << 3 * torch.arange(4, device=rows.device)).sum(-1)
    half = d.to(torch.float16).view(torch.int16).to(torch.int64).unsqueeze(-1)
    tops = half >> 4 * torch.arange(4, device=rows.device) & 15
    packed = (rows & 255, nibbles[..., ::2] | nibbles[..., 1::2] << 4)
    return torch.cat([*(part.to(torch.uint8) for part in packed), _halves(threes | tops << 12)], dim=-1)


def take_iq1m(data: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inverse of `pack_iq1m`."""
    low, high, held = (part.to(torch.int64) for part in torch.split(data, [32, 16, 8], dim=-1))
    nibbles = torch.stack([high & 15, high >> 4], dim=-1).flatten(-2)
    words = _of_halves(held)
    places = torch.arange(4, device=data.device)
    half = ((words >> 12) << 4 * places).sum(-1)
    d = half.to(torch.uint16).view(torch.float16).to(torch.float32)
    scales = (words.unsqueeze(-1) >> 3 * places & 7).flatten(-2)
    return d, low | (nibbles & 7) << 8, nibbles >> 3, scales


def _halves(words: Tensor) -> Tensor:
    """Whole numbers of 16 bits [..., n] as bytes uint8 [..., 2 n], the lower one first."""
    return torch.stack([words & 255, words >> 8 & 255], dim=-1).flatten(-2).to(torch.uint8)


def _of_halves(data: Tensor) -> Tensor:
    whole = data.to(torch.int64)
    return whole[..., ::2] | whole[..., 1::2] << 8
