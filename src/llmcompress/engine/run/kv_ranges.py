"""How large a layer's cached keys and values become: watched during a pass, and checked for the scale of a cache."""

from torch import Tensor

from llmcompress.engine.run.current_batch import stop_forward
from llmcompress.errors import RunError
from llmcompress.stats.key_value_range import KeyValueRange
from llmcompress.workers import Workers


class KeyValueWatch:
    """Notes the keys and values that one pass writes into the cache, as `model.cache` hands them over.

    ending: a layer is not run beyond its cache.
    """

    def __init__(self, ending: bool = False) -> None:
        self.seen, self.ending = KeyValueRange(), ending

    def __call__(self, _: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.update(key, value)
        if self.ending:
            stop_forward()
        return key, value

    def of_all(self, workers: Workers) -> KeyValueRange:
        """What all ranks have seen together."""
        every = KeyValueRange()
        for key, value in workers.all_gather((self.seen.key, self.seen.value)):
            if key is not None and value is not None:
                every.include(key, value)
        return every


def largest_magnitudes(seen: KeyValueRange, number: int) -> dict[str, float]:
    """The largest magnitudes of the keys, after rotation, and of the values of layer `number`.

    RunError if there are none or they are not finite.
    """
    if seen.key is None or seen.value is None:
        raise RunError(f"layer {number} keeps no keys and values, so that they have no scale", "leave --kv-cache out")
    largest = {"key": float(seen.key.max()), "value": float(seen.value.max())}
    for side, value in largest.items():
        if not value < float("inf"):
            raise RunError(f"{side}s of layer {number} are not finite", "use --compute-dtype float32")
    return largest
