"""Models whose first layers are dense and whose others hold experts; llama.cpp is told the number of the first."""

from collections.abc import Callable

from llmcompress.formats.gguf.hyper import Hyper
from llmcompress.formats.gguf.keys import Key, u32

SOFTMAX, SIGMOID = 1, 2
"""How scores of experts are made of a router's outputs, as llama.cpp numbers it."""

_FIELDS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


def dense(hyper: Hyper) -> int:
    """How many layers are dense before the first with experts."""
    kinds = hyper.config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return kinds.index("sparse") if "sparse" in kinds else len(kinds)
    return next((int(hyper.config[field]) for field in _FIELDS if hyper.config.get(field) is not None), 0)


def then(
    always: tuple[str, ...], first: tuple[str, ...], later: tuple[str, ...]
) -> Callable[[Hyper, int], tuple[str, ...]]:
    """The roles of a layer: `always`, with `first` in dense layers and `later` in those with experts."""
    return lambda hyper, layer: (*always, *(first if layer < dense(hyper) else later))


def key(arch: str, hyper: Hyper) -> Key:
    return u32(f"{arch}.leading_dense_block_count", dense(hyper))


def objection(hyper: Hyper) -> str | None:
    """Why llama.cpp would take other layers for dense ones, or None."""
    kinds = hyper.config.get("mlp_layer_types")
    if isinstance(kinds, list) and "dense" in kinds[dense(hyper) :]:
        return "config.json: mlp_layer_types has a dense layer after one with experts, which llama.cpp does not know"
    return None
