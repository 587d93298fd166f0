"""How much a model repeats itself where it writes greedily, and whether it ends in a loop.

The repetition of a text is the share of its sequences of four tokens that occurred in it before: one less distinct ones
over all, rep-4 of Welleck et al., arXiv:1908.04319, section 6.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmcompress.significant import significant
from llmcompress.validate.tasks import drop_interval, mean_interval, share_interval
from llmcompress.validate.token_statistics import Array

ALONE = ("prompts", "written_tokens", "repetition", "looping")
COMPARED = ("ref_written_tokens", "ref_repetition", "ref_looping", "repetition_rise", "looping_rise")
_GRAM = 4
_TURNS = 3  # times that a sequence stands at the end of a text which ends in a loop
_LEAST = 24  # tokens that these have together, so that dots at the end of a line are no loop


def repetition(ids: Sequence[int]) -> float:
    """The share of sequences of four tokens that occurred before; 0 for a text without any."""
    grams = [tuple(ids[at : at + _GRAM]) for at in range(len(ids) - _GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def ends_in_loop(ids: Sequence[int]) -> bool:
    """Whether the last tokens are one sequence, of any length, that stands there at least three times in a row."""
    for period in range(1, len(ids) // _TURNS + 1):
        tail = ids[-max(_TURNS * period, _LEAST) :]
        if len(tail) >= _LEAST and tail[period:] == tail[:-period]:
            return True
    return False


def repetition_figures(written: Sequence[Sequence[Sequence[int]]]) -> dict[str, Any]:
    """Figures of what the model and any reference write after the same prompts: token ids by model and prompt.

    `_ci`: 95% intervals over prompts; `_rise`: the model's less the reference's, paired.
    """
    rates, loops = ([np.array([measure(ids) for ids in of], dtype=float) for of in written]
                    for measure in (repetition, ends_in_loop))  # fmt: skip
    result: dict[str, Any] = {"prompts": len(written[0])}

    def add(name: str, values: Array, interval: tuple[float, float]) -> None:
        result[name] = significant(values.mean())
        result[f"{name}_ci"] = [significant(bound) for bound in interval]

    for prefix, of_model, rate, loop in zip(("", "ref_"), written, rates, loops, strict=False):
        result[f"{prefix}written_tokens"] = significant(np.mean([len(ids) for ids in of_model]))
        add(f"{prefix}repetition", rate, mean_interval(rate))
        add(f"{prefix}looping", loop, share_interval(loop))
    if len(written) > 1:
        add("repetition_rise", rates[0] - rates[1], mean_interval(rates[0] - rates[1]))
        add("looping_rise", loops[0] - loops[1], drop_interval(*loops))
    return result
