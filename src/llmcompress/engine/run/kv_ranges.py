"""The largest magnitudes of a layer's cached keys and values, measured while the layer is compressed."""

from typing import TYPE_CHECKING

from llmcompress.errors import RunError

if TYPE_CHECKING:
    from llmcompress.engine.run.forward import Forward


def measured(forward: "Forward", number: int) -> dict[str, float]:
    """The largest magnitudes of a layer's keys, after rotation, and values; RunError if they are not finite."""
    seen = forward.key_value_range()
    if seen.key is None or seen.value is None:
        raise RunError(f"layer {number} keeps no keys and values, so that they have no scale", "leave --kv-cache out")
    largest = {"key": float(seen.key.max()), "value": float(seen.value.max())}
    for side, value in largest.items():
        if not value < float("inf"):
            raise RunError(f"{side}s of layer {number} are not finite", "use --compute-dtype float32")
    return largest
