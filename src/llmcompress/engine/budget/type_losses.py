"""What rounding each tensor of a GGUF file to each type would lose, by the Fisher information of its matrices."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from llmcompress.formats.gguf.mixture import is_quantised
from llmcompress.formats.gguf.tensors import GGUFTensor, Piece, Read, multiplied, pieces, unmultiplied
from llmcompress.formats.gguf.types import tensor_type
from llmcompress.grids.encoders import encode
from llmcompress.grids.grid_type import gguf_specs
from llmcompress.stats.fisher import Fisher, expected_loss, sampled_rows
from llmcompress.workers import SERIAL, Workers

Losses = dict[str, dict[str, float]]
"""Expected KL divergence per token in nats, by GGUF name and tensor type."""

Known = Sequence[Sequence[Fisher]]
"""Fisher information of each matrix of a tensor: one for each use of the matrix, none where it is never used.

Empty for a tensor of which no information is gathered.
"""

_WIDE = ("Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "F16")
_BY_EIGHTS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
_NARROW = ("Q4_0", "IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16")
_SAMPLED = 1 << 18  # weights of a matrix that are rounded to see what it loses, and
_FEWER = 4  # times less for types that take thirty times as long, measured beside
_BESIDE = "Q2_K"
_TABLE = "token_embd.weight"


def candidates(width: int, informed: bool) -> tuple[str, ...]:
    """Names of the tensor types to choose from for rows of `width`, smallest first.

    informed: whether the run knows what errors in inputs cost, which types that are rounded by eights ask for.
    """
    wide = sorted((*_WIDE, *_BY_EIGHTS), key=_size) if informed else _WIDE
    kinds = wide if tensor_type(_WIDE[0]).fits(width) else _NARROW
    return tuple(kind for kind in kinds if tensor_type(kind).fits(width))


def _size(kind: str) -> float:
    found = tensor_type(kind)
    return found.block_bytes / found.block


def measured_losses(
    tensors: Sequence[GGUFTensor],
    known: Mapping[str, Known],
    read: Read,
    informed: bool,
    workers: Workers,
    watch: Callable[[], None] = lambda: None,
) -> Losses:
    """Losses of the tensors that have a type to choose, each for all its candidates.

    Of large matrices a sample of rows is rounded, by the encoder called `fast`. informed: as for `candidates`; rows are
    then rounded by what errors in the inputs cost. watch: called after each tensor.
    """
    chosen = [tensor for tensor in tensors if is_quantised(tensor.name, tensor.shape)]
    losses = {tensor.name: dict.fromkeys(candidates(tensor.shape[-1], informed), 0.0) for tensor in chosen}
    samples = _samples(chosen, known, read, watch)
    for sample, found in workers.in_order(lambda sample: (sample, _rounded(sample, informed)), samples):
        for kind, loss in found.items():
            losses[sample.name][kind] += loss
    supposed = {tensor.name: _supposed(tensor, chosen, losses, known) for tensor in chosen if not known[tensor.name]}
    return losses | supposed


def _supposed(
    tensor: GGUFTensor, others: Sequence[GGUFTensor], losses: Losses, known: Mapping[str, Known]
) -> dict[str, float]:
    """Losses of a tensor without information: those of the embedding, if it is a table of as many tokens, or of all
    tensors that have some, for as many weights."""
    measured = [other for other in others if known[other.name]]
    alike = [other for other in measured if other.name == _TABLE and other.shape[0] == tensor.shape[0]] or measured
    found = {}
    for kind in losses[tensor.name]:
        same = [other for other in alike if kind in losses[other.name]] or alike
        nearest = [min(losses[other.name], key=lambda one: abs(_size(one) - _size(kind))) for other in same]
        lost = sum(losses[other.name][near] for other, near in zip(same, nearest, strict=True))
        found[kind] = lost * prod(tensor.shape) / sum(prod(other.shape) for other in same)
    return found


class _Sample(NamedTuple):
    """Rows [rows, in] float32 of a tensor, with the Fisher information outputs [rows] times inputs [in]."""

    name: str
    rows: Tensor
    outputs: Tensor
    inputs: Tensor


def _samples(
    tensors: Sequence[GGUFTensor], known: Mapping[str, Known], read: Read, watch: Callable[[], None]
) -> Iterator[_Sample]:
    for tensor in tensors:
        measured = zip(known[tensor.name], pieces(tensor, read), strict=True) if known[tensor.name] else ()
        for fishers, piece in measured:
            for fisher in fishers:
                sample = _sample(tensor.name, piece, fisher)
                if sample is not None:
                    yield sample
        watch()


def _sample(name: str, piece: Piece, fisher: Fisher) -> _Sample | None:
    outputs = fisher.outputs[:, None]
    outputs = unmultiplied(unmultiplied(outputs, piece.factors), piece.factors)[:, 0]  # of squares of multiplied errors
    outputs = outputs if piece.index is None else outputs[piece.index]
    total = fisher.inputs.sum()
    if float(outputs.sum()) <= 0:
        return None  # no token came to it
    rows, weights = sampled_rows(outputs, max(1, _SAMPLED // piece.shape[-1]))
    rows = rows if piece.index is None else piece.index[rows]
    values = multiplied(piece.source[rows].to(torch.float32), piece.factors, rows)
    return _Sample(name, values.contiguous(), weights, fisher.inputs / total)


def _rounded(sample: _Sample, informed: bool) -> dict[str, float]:
    """The loss of a sample by each type."""
    kinds = candidates(sample.rows.shape[-1], informed)
    slow = [kind for kind in kinds if kind in _BY_EIGHTS]
    found = {kind: _loss(sample, kind, informed) for kind in kinds if kind not in slow}
    if slow:
        few = sample._replace(rows=sample.rows[::_FEWER].contiguous(), outputs=sample.outputs[::_FEWER])
        beside = _loss(few, _BESIDE, informed)
        share = found[_BESIDE] / beside if beside > 0 else 0.0
        found |= {kind: share * _loss(few, kind, informed) for kind in slow}
    return found


def _loss(sample: _Sample, kind: str, informed: bool) -> float:
    spec = gguf_specs().get(kind)
    if spec is None:
        values = sample.rows.to(torch.float16).to(torch.float32)
    else:
        values = encode(sample.rows, spec, "fast", SERIAL, sample.inputs if informed else None).decode()
    return expected_loss(values - sample.rows, sample.outputs, sample.inputs)
