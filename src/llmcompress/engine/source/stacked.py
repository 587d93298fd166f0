"""Checkpoints whose experts are one tensor, seen as checkpoints of one matrix per expert.

Where the matrices of a stack lie one behind the other, each is a range of the stack's bytes: only headers change.
Other layouts stay as they are: `observe` leaves their experts out and says so.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from llmcompress.arch import find
from llmcompress.engine.source.header_checks import check_numbers
from llmcompress.engine.source.open import config_of
from llmcompress.errors import CheckpointError
from llmcompress.formats.base import FLOAT_TYPES, TensorSpec
from llmcompress.isolation import probe
from llmcompress.ledger import Ledger
from llmcompress.store.headers import ModelHeaders, Stored

_SIZE = 1_000_000  # bounds processor time and memory as for so many bytes: building what may be a large model


@dataclass(frozen=True)
class UnstackedHeaders(ModelHeaders):
    """Headers in which every stack of matrices is one tensor per matrix.

    stacked: by the name of a stack in the files, the names of what each expert has of it, `{e}` for the number of the
    expert, in order of rows.
    """

    stacked: Mapping[str, tuple[str, ...]]


def unstacked_headers(headers: ModelHeaders, ledger: Ledger, *, only_merged: bool = False) -> ModelHeaders:
    """Headers with a tensor for every matrix of every expert; `headers` where no stack of an undeclared family is.

    only_merged: take nothing apart that transformers, while it loads, does not put together again.
    """
    model_type = str(headers.config.get("model_type"))
    if type(headers) is not ModelHeaders or find(model_type) is not None or "auto_map" in headers.config:
        return headers
    if not any(_may_be_stack(stored) for stored in headers.tensors.values()):
        return headers
    check_numbers(headers)

    def failed(reason: str) -> CheckpointError:
        return CheckpointError(f"a {model_type!r} model of this config cannot be built: {reason}")

    probe(lambda: _found(headers), failed, _SIZE + 1000 * len(headers.tensors))
    stacked, merged = _found(headers)
    if not stacked or (only_merged and not merged):
        return headers
    if not merged:
        ledger.note(
            "engine",
            model_type,
            "experts, one tensor in the source, are written one by one; transformers does not put them together again",
        )
    tensors = dict(_taken_apart(headers, stacked))
    return UnstackedHeaders(headers.path, headers.config, tensors, headers.files, stacked, wrapper=headers.wrapper)


def _may_be_stack(stored: Stored) -> bool:
    shape = stored.spec.shape
    return len(shape) == 3 and 1 not in shape and stored.spec.dtype in FLOAT_TYPES


def _found(headers: ModelHeaders) -> tuple[dict[str, tuple[str, ...]], bool]:
    """`UnstackedHeaders.stacked`, and whether transformers merges matrices of these names while it loads them."""
    from llmcompress.model.observe import stacked_experts

    found = stacked_experts(config_of(headers, False), headers.tensors)
    stacked = {name: parts for name, parts in found.parts.items() if _may_be_stack(headers.tensors[name])}
    return stacked, found.merged


def _taken_apart(headers: ModelHeaders, stacked: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, Stored]]:
    for name, stored in headers.tensors.items():
        if name not in stacked:
            yield name, stored
            continue
        parts = stacked[name]
        count, rows, columns = stored.spec.shape
        size = (stored.end - stored.begin) // (count * len(parts))
        begin = stored.begin
        for number in range(count):
            for part in parts:
                spec = TensorSpec(part.format(e=number), stored.spec.dtype, (rows // len(parts), columns))
                yield spec.name, replace(stored, spec=spec, begin=begin, end=begin + size)
                begin += size
