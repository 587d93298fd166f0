"""Folds: the changes of stored tensors that factors of channels and rotations amount to."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from llmcompress.arch.scaling_site import Site, SitePart
from llmcompress.engine.source.tensor_names import Anatomy
from llmcompress.solve.hadamard import Rotation
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.folds import Filled, Fold, Scaled, Turned
from llmcompress.transforms.rotate import Rotate

Folds = dict[str, list[Fold]]


def scaling_folds(anatomy: Anatomy, layer: int, parts: Iterable[SitePart], factors: Tensor) -> Folds:
    """The changes that factors [channels] make to the tensors of some parts of a site."""
    folds: Folds = {}
    for part in parts:
        factor = factors if part.spread is None else factors[torch.from_numpy(part.spread)]
        for name, axis, offset in _tensors(anatomy, layer, part):
            at = None if part.at is None else torch.from_numpy(part.at)
            folds.setdefault(name, []).append(Scaled(1 / factor if part.divided else factor, axis, at, offset))
    return folds


def factors_as_stored(anatomy: Anatomy, layer: int, site: Site, factors: Tensor, checkpoint: Checkpoint) -> Tensor:
    """The factors [channels] by which the gain of a norm changes once the gain is rounded to its stored type.

    The matrices that read the channels are multiplied by these factors, so that rounding the gain costs nothing. Where
    a matrix writes the channels, the factors are returned as they are, since the matrix is rounded anyway.
    """
    name = anatomy.tensor(layer, site.writer.path)
    if name is None or len(anatomy.headers.tensors[name].spec.shape) > 1:
        return factors
    weight, offset = checkpoint.read(name), site.writer.offset
    gain = weight.to(torch.float64) + offset
    stored = (gain / factors.to(torch.float64) - offset).to(weight.dtype).to(torch.float64)
    real = gain / (stored + offset)
    return torch.where(torch.isfinite(real) & (real > 0), real, torch.ones_like(real))


def rotation_folds(anatomy: Anatomy, step: Rotate, checkpoint: Checkpoint) -> Folds:
    """The changes that a rotation makes to all tensors of a model; gains of norms go into the matrices they feed."""
    folds: Folds = {}
    for layer in range(anatomy.layers) if step.values else ():
        _turn_values(folds, anatomy, layer, step.seed + 1)
    if step.residual:
        for layer in range(anatomy.layers):
            for site in anatomy.sites(layer):
                if site.norm:
                    name, offset = anatomy.tensor(layer, site.writer.path), site.writer.offset
                    _merge(folds, scaling_folds(anatomy, layer, site.readers, _gain(checkpoint, name, offset)))
                    _merge(folds, {_known(name): [Filled(1 - offset)]})
        _turn_residual(folds, anatomy, checkpoint, step.seed)
    return folds


def _turn_values(folds: Folds, anatomy: Anatomy, layer: int, seed: int) -> None:
    for site in anatomy.sites(layer):
        if site.heads:
            rotation = Rotation(site.channels // site.heads, seed)
            for part in site.parts:
                at = None if part.at is None else torch.from_numpy(part.at)
                for name, axis, _ in _tensors(anatomy, layer, part):
                    folds.setdefault(name, []).append(Turned(rotation, axis, at))


def _turn_residual(folds: Folds, anatomy: Anatomy, checkpoint: Checkpoint, seed: int) -> None:
    embedding = _known(anatomy.outer(anatomy.spec.embed))
    rotation = Rotation(anatomy.headers.tensors[embedding].spec.shape[1], seed)
    for layer in range(anatomy.layers):
        readers, writers = anatomy.residual(layer)
        for paths, inputs in ((readers, True), (writers, False)):
            for path in paths:
                for name, axis, _ in _tensors(anatomy, layer, SitePart(path, inputs=inputs)):
                    folds.setdefault(name, []).append(Turned(rotation, axis))
    folds.setdefault(embedding, []).append(Turned(rotation, 1))
    final, head = anatomy.spec.final, _known(anatomy.outer(anatomy.spec.head))
    assert final is not None
    norm = _known(anatomy.outer(final.path))
    folds.setdefault(head, []).append(Scaled(_gain(checkpoint, norm, final.offset), 1))
    folds[head].append(Turned(rotation, 1))
    folds.setdefault(norm, []).append(Filled(1 - final.offset))


def _tensors(anatomy: Anatomy, layer: int, part: SitePart) -> Iterator[tuple[str, int, float]]:
    """(on-disk tensor, axis, offset) of every tensor that a part changes."""
    weight, bias = anatomy.tensor(layer, part.path), anatomy.tensor(layer, part.path, "bias")
    if weight is not None:
        yield weight, int(part.inputs) ^ int(anatomy.transposed(part.path)), part.offset
    if bias is not None and not part.inputs:
        yield bias, 0, 0.0


def _gain(checkpoint: Checkpoint, name: str | None, offset: float) -> Tensor:
    return checkpoint.read(_known(name)).to(torch.float64) + offset


def _known(name: str | None) -> str:
    assert name is not None  # what a rotation touches was looked for when it was planned
    return name


def _merge(folds: Folds, more: Folds) -> None:
    for name, changes in more.items():
        folds.setdefault(name, []).extend(changes)
