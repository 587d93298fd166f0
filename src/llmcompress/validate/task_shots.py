"""Worked examples before the items of tasks, the same that lm-evaluation-harness 0.4 takes from the same rows."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

from llmcompress.errors import CalibrationError
from llmcompress.validate.task_items import Item

_SEED = 1234  # of lm-evaluation-harness


class Shots:
    """Examples for the items of a task, one after another: what is drawn at random depends on what was before.

    place: where the examples are from; count: how many an item gets.
    """

    def __init__(self, place: Path, examples: Sequence[Item], count: int) -> None:
        self._place, self._examples, self._count = place, examples, count
        self._random = Random(_SEED)

    def before(self, item: Item, spare: int | None) -> str:
        """The text of the examples for the next item. CalibrationError where there are too few.

        spare: how many more are drawn at random than it gets, in case it is among them; None: the first about its
        subject, in order.
        """
        if item.fixed:
            raise CalibrationError(
                f"{item.where} is what another program had models read, and takes no examples",
                "leave --shots out, or give the items themselves",
            )
        known = self._examples if spare is not None else [one for one in self._examples if one.about == item.about]
        if len(known) < self._count + (spare or 0):
            raise CalibrationError(
                f"{self._place} has {len(known)} examples for {item.where}, --shots {self._count} takes "
                f"{self._count + (spare or 0)}",
                "add some, or take fewer",
            )
        taken = known[: self._count] if spare is None else self._drawn(item, spare)
        return "".join(f"{prompt}{choice}\n\n" for prompt, choice in (one.pairs[one.answer] for one in taken))

    def _drawn(self, item: Item, spare: int) -> Sequence[Item]:
        found = self._random.sample(self._examples, self._count + spare)
        if not spare:
            return found
        others = [one for one in found if not _same(one, item)]
        if len(others) < self._count:
            others = self._random.sample([one for one in self._examples if not _same(one, item)], self._count)
        return others[: self._count]


def _same(one: Item, other: Item) -> bool:
    return (one.pairs, one.answer) == (other.pairs, other.answer)
