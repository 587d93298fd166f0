"""What Gemma 2 and Gemma 3 share: which layers have a sliding window, and how queries are scaled."""

from llmcompress.formats.gguf.families import layer_patterns
from llmcompress.formats.gguf.hyper import Hyper


def objection(hyper: Hyper, every: int, wide: int) -> str | None:
    """Why llama.cpp would compute something else, or None.

    every: every such layer has full attention. wide: number of layers of the 27B model, whose queries are scaled by the
    width per head, not by the size of a head.
    """
    scalar = hyper.config.get("query_pre_attn_scalar")
    built_in = hyper.hidden // hyper.heads if hyper.layers == wide else hyper.head_dim
    if scalar is not None and scalar != built_in:
        return f"config.json: query_pre_attn_scalar is {scalar!r}, llama.cpp takes {built_in} in a model of these sizes"
    return layer_patterns.every(every)(hyper)
