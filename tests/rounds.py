"""How much of what takes long is tried: a part in a default run, all where LLMCOMPRESS_ATTACK_ROUNDS is 2 or more."""

import os
from collections.abc import Sequence
from typing import Any

ROUNDS = int(os.environ.get("LLMCOMPRESS_ATTACK_ROUNDS", "1"))


def in_turn(values: Sequence[Any], number: int, count: int = 1) -> Sequence[Any]:
    """Of what could meet attempt `number` a few, each in its turn; or all."""
    at = number % len(values)
    return values if ROUNDS > 1 else [*values[at:], *values[:at]][:count]


def thinned(values: Sequence[Any], every: int) -> Sequence[Any]:
    """The first of every so many values; or all."""
    return values if ROUNDS > 1 else values[::every]
