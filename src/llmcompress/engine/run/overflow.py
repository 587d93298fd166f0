"""Statistics of inputs that overflowed: what is left of them is nothing to go by, so the run ends."""

from collections.abc import Iterable

import torch

from llmcompress.errors import RunError
from llmcompress.stats.statistic import Counted

_LARGEST = 2.0**80  # mean square of a channel, beyond which losses overflow float32


def refuse_overflow(name: str, found: Iterable[Counted], dtype: torch.dtype, routed: bool = False) -> None:
    """RunError unless statistics of an input kept at least half of their tokens, are finite, and not all zero.

    name: of a matrix that reads the input. dtype: that the layers ran in. routed: whether no token need have come.
    """
    for item in found:
        kept, lost = item.tokens, item.dropped
        if lost > kept or not (kept or routed):
            _refuse(f"{lost} of {kept + lost} tokens that enter {name} are not finite", dtype)
        squares = getattr(item, "sums", None)  # of channels, where a statistic holds them
        if squares is None:
            continue
        if not bool((squares <= _LARGEST * max(kept, 1)).all()):
            _refuse(f"what enters {name} is too large to be squared", dtype)
        if not (routed or bool(squares.any())):
            raise RunError(f"what enters {name} is zero for every token", "look at the weights and config.json")


def _refuse(message: str, dtype: torch.dtype) -> None:
    wider = "use --compute-dtype float32" if dtype != torch.float32 else "look at the weights and config.json"
    raise RunError(message, wider if dtype != torch.float16 else f"{wider} or bfloat16")
