"""What torch itself offers for products with small weights, to be timed beside ours."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from llmcompress.grids.fitting import fit
from llmcompress.grids.integer import IntegerSpec
from llmcompress.kernels.compile_errors import KernelsError

_LEAST_INT8 = 17  # tokens that _int_mm takes


@dataclass(frozen=True)
class Rival:
    """work(x, copy): a product of x [tokens, in], prepared, with a copy of the weight. nbytes: of the weight."""

    name: str
    tokens: Sequence[int]
    nbytes: int
    copy: Callable[[], Any]
    work: Callable[[Tensor, Any], Tensor]
    prepare: Callable[[Tensor], Tensor] = lambda x: x


def rivals(dense: Tensor, weight: Tensor, tokens: Sequence[int]) -> Iterator[Rival]:
    """cuBLAS in bfloat16, then what this build of torch has on this GPU.

    dense: the weight [out, in] on the GPU in bfloat16; weight: the same in float32. KernelsError for a 2:4
    product that is not that of the dense matrix with zeros.
    """
    yield Rival("cuBLAS bf16", tokens, dense.nbytes, dense.clone, lambda x, w: x @ w.T)
    for make in (_int4, _int8, _sparse):
        try:
            rival = make(dense, weight, tokens)
            rival.work(rival.prepare(torch.zeros_like(dense[: max(tokens)])), rival.copy())
        except (RuntimeError, NotImplementedError):  # torch's words for what a build or a GPU lacks
            continue
        yield rival


def _int4(dense: Tensor, weight: Tensor, tokens: Sequence[int]) -> Rival:
    grid: Any = fit(weight, IntegerSpec(4, 128), clip="minmax")
    codes = grid.encode(weight).to(dense.device)
    words = torch.ops.aten._convert_weight_to_int4pack((codes[:, ::2] << 4 | codes[:, 1::2]).contiguous(), 8)
    pairs = torch.stack([grid.scale, torch.zeros_like(grid.scale)], dim=-1).transpose(0, 1).contiguous()
    scales = pairs.to(dense.device, dense.dtype)
    return Rival(
        "torch _weight_int4pack_mm",
        tokens,
        words.nbytes + scales.nbytes,
        words.clone,
        lambda x, w: torch.ops.aten._weight_int4pack_mm(x, w, 128, scales),
    )


def _int8(dense: Tensor, weight: Tensor, tokens: Sequence[int]) -> Rival:
    codes = (weight / weight.abs().amax(1, keepdim=True) * 127).round().to(dense.device, torch.int8)
    return Rival(
        "torch _int_mm (int32 out)",
        [count for count in tokens if count >= _LEAST_INT8],
        codes.nbytes,
        codes.clone,
        lambda x, w: torch._int_mm(x, w.t()),
        lambda x: x.to(torch.int8),
    )


def _sparse(dense: Tensor, weight: Tensor, tokens: Sequence[int]) -> Rival:
    from torch.sparse import to_sparse_semi_structured

    zeroed = two_of_four(dense)
    x = torch.randn(128, dense.shape[1], device=dense.device, dtype=dense.dtype)
    check_sparse(linear(x, to_sparse_semi_structured(zeroed)), x, zeroed)
    nbytes = dense.nbytes * 9 // 16  # half the values, and two bits to say which
    return Rival("torch 2:4 bf16", tokens, nbytes, lambda: to_sparse_semi_structured(zeroed), linear)


def two_of_four(dense: Tensor) -> Tensor:
    """A matrix [out, in] of whose every four neighbours in a row the two largest are kept, the others zero."""
    fours = dense.view(dense.shape[0], -1, 4)
    kept = torch.zeros_like(fours, dtype=torch.bool).scatter_(-1, fours.abs().topk(2, dim=-1).indices, True)
    return (fours * kept).view(dense.shape)


def check_sparse(y: Tensor, x: Tensor, zeroed: Tensor) -> None:
    """KernelsError unless y [tokens, out] is x times the matrix with zeros, within what bfloat16 rounds."""
    wanted, magnitudes = x.double() @ zeroed.double().T, x.double().abs() @ zeroed.double().abs().T
    if not bool(((y.double() - wanted).abs() <= 2.0**-7 * wanted.abs() + 2.0**-14 * magnitudes).all()):
        raise KernelsError("torch's 2:4 product is not that of the dense matrix with zeros")
