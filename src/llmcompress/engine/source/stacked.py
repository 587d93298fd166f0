"""Checkpoints whose experts are one tensor, seen as checkpoints of one matrix per expert.

Each matrix is cut out of a range of the stack's bytes when it is read: only headers change.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from llmcompress.arch import find
from llmcompress.engine.source.header_checks import check_numbers
from llmcompress.engine.source.open import config_of
from llmcompress.engine.source.quantised import DecodedHeaders
from llmcompress.errors import CheckpointError
from llmcompress.formats.base import FLOAT_TYPES, TensorSpec
from llmcompress.isolation import probe
from llmcompress.ledger import Ledger
from llmcompress.store.expert_stacks import Cut, ExpertStack
from llmcompress.store.headers import ModelHeaders, Stored

if TYPE_CHECKING:
    from llmcompress.model.observe import StackedExperts

_SIZE = 1_000_000  # bounds processor time and memory as for so many bytes: building what may be a large model


def unstacked_headers(headers: ModelHeaders, ledger: Ledger, *, only_merged: bool = False) -> ModelHeaders:
    """Headers with a tensor for every matrix of every expert; `headers` where no stack of an undeclared family is.

    only_merged: take nothing apart that transformers, while it loads, does not put together again.
    """
    model_type = str(headers.config.get("model_type"))
    if (
        type(headers) not in (ModelHeaders, DecodedHeaders)
        or find(model_type) is not None
        or "auto_map" in headers.config
    ):
        return headers
    if not any(_may_be_stack(stored) for stored in headers.tensors.values()):
        return headers
    check_numbers(headers)

    def failed(reason: str) -> CheckpointError:
        return CheckpointError(f"a {model_type!r} model of this config cannot be built: {reason}")

    probe(lambda: _found(headers), failed, _SIZE + 1000 * len(headers.tensors))
    found = _found(headers)
    if not found.stacks or (only_merged and not found.merged):
        return headers
    if not found.merged:
        ledger.note(
            "engine",
            model_type,
            "experts, one tensor in the source, are written one by one; transformers does not put them together again",
        )
    tensors = dict(_taken_apart(headers, found.stacks))
    if not isinstance(headers, DecodedHeaders):
        return replace(headers, tensors=tensors, unstacked=found.stacks)
    pieces = dict(_pieces(headers, found.stacks))
    packed = headers.packed | pieces.keys()
    return replace(headers, tensors=tensors, unstacked=found.stacks, pieces=pieces, packed=packed)


def _pieces(headers: DecodedHeaders, stacks: Mapping[str, ExpertStack]) -> Iterator[tuple[str, tuple[str, int, Cut]]]:
    """The modules that are cut out of stacks of codes."""
    for name in headers.stacks.keys() & stacks.keys():
        stack = stacks[name]
        for part, cut in stack.cuts(headers.tensors[name].spec.shape):
            for number in range(stack.experts):
                yield part.format(e=number).removesuffix(".weight"), (name, number, cut)


def _may_be_stack(stored: Stored) -> bool:
    """Whether headers let a tensor be a stack; what shares an axis of experts and rows is told by its name."""
    name, shape = stored.spec.name, stored.spec.shape
    several = len(shape) == 3 and 1 not in shape
    return stored.spec.dtype in FLOAT_TYPES and (several or re.search(r"\.experts\.(?!\d)", name) is not None)


def _found(headers: ModelHeaders) -> "StackedExperts":
    from llmcompress.model.observe import stacked_experts

    shapes = {name: stored.spec.shape for name, stored in headers.tensors.items()}
    return stacked_experts(config_of(headers, False), shapes)


def _taken_apart(headers: ModelHeaders, stacks: Mapping[str, ExpertStack]) -> Iterator[tuple[str, Stored]]:
    for name, stored in headers.tensors.items():
        if name not in stacks:
            yield name, stored
            continue
        stack = stacks[name]
        size = (stored.end - stored.begin) // stack.experts
        for number in range(stack.experts):
            for part, cut in stack.cuts(stored.spec.shape):
                spec = TensorSpec(part.format(e=number), stored.spec.dtype, cut.shape)
                begin = stored.begin + number * size
                if cut.whole:
                    begin += cut.first * (size // cut.share[0])
                    yield spec.name, Stored(spec, stored.file, begin, begin + spec.nbytes)
                else:
                    yield spec.name, Stored(spec, stored.file, begin, begin + size, cut)
