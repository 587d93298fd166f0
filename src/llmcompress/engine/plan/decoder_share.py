"""How much of a decoder a plan changes, and which of its weights stay as they are."""

from collections import Counter
from dataclasses import dataclass
from math import prod

from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.source.tensor_names import without_numbers


@dataclass(frozen=True)
class DecoderShare:
    """Of all weights in tensors of two or more dimensions inside the decoder layers of a source, without those that
    predict further tokens.

    changed: the share that is rounded or pruned, 1.0 for a decoder without such tensors. left: the shares of the others
    by on-disk name, `*` in place of numbers, the largest first.
    """

    changed: float
    left: tuple[tuple[str, float], ...]


def decoder_share(plan: Plan) -> DecoderShare:
    """The shares of a plan."""
    changed = {matrix.entry.source.name for matrix in plan.matrices}
    sizes, left = 0, Counter[str]()
    for entry in plan.entries:
        if entry.block and not entry.further and len(entry.source.shape) > 1:
            size = prod(entry.source.shape)
            sizes += size
            if entry.source.name not in changed:
                left[without_numbers(entry.source.name)] += size
    if not sizes:
        return DecoderShare(1.0, ())
    return DecoderShare(1 - left.total() / sizes, tuple((name, size / sizes) for name, size in left.most_common()))
