"""Which layers llama.cpp takes to have a sliding window, or no rotary positions, where no key says it."""

from collections.abc import Callable

from llmcompress.formats.gguf.hyper import Hyper


def every(period: int) -> Callable[[Hyper], str | None]:
    """An objection unless every such layer has full attention, and all others have a window."""

    def objection(hyper: Hyper) -> str | None:
        kinds = hyper.config.get("layer_types")
        if kinds is None or kinds == [_kind(layer, period) for layer in range(hyper.layers)]:
            return None
        return f"config.json: layer_types has another order than llama.cpp's, full attention in every {period}th layer"

    return objection


def unrotated(period: int) -> Callable[[Hyper], str | None]:
    """An objection unless every such layer goes without rotary positions."""

    def objection(hyper: Hyper) -> str | None:
        rotated = hyper.config.get("no_rope_layers")
        if rotated is None or rotated == [int((layer + 1) % period != 0) for layer in range(hyper.layers)]:
            return None
        return f"config.json: no_rope_layers is {rotated}, llama.cpp rotates in all but every {period}th layer"

    return objection


def _kind(layer: int, period: int) -> str:
    return "full_attention" if (layer + 1) % period == 0 else "sliding_attention"
