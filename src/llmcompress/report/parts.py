"""The bytes of a model by what they are of: embedding, head, attention, feed-forward, norms."""

import re
from collections.abc import Mapping
from pathlib import Path

from llmcompress.errors import CheckpointError
from llmcompress.store.gguf_model import read_gguf
from llmcompress.store.headers import read_headers
from llmcompress.validate.gguf_file import gguf_in

_EMBEDDING, _HEAD, _OTHER = "embedding", "head", "other"
_NAMES = {
    "norms": r"norm|(^|[._])ln_",
    _HEAD: r"(^|\.)(lm_head|embed_out)\.|^output\.",
    _EMBEDDING: r"embed|(^|\.)(wte|wpe)\.|^token_|^position_embd",
    "feed-forward": r"mlp|ffn|feed_forward|expert|moe|(^|\.)(fc[12]|w[123]|dense_\w+)\.",
    "attention": r"attn|attention|mixer|ssm|rwkv|[qkvo]_proj|query_key_value",
}
"""What the names of tensors have in them, of safetensors and GGUF alike; the first that fits counts."""
_ORDER = (_EMBEDDING, _HEAD, "attention", "feed-forward", "norms", _OTHER)


def part_of(tensor: str) -> str:
    """The part of a model that a tensor of this name belongs to."""
    return next((part for part, pattern in _NAMES.items() if re.search(pattern, tensor)), _OTHER)


def parts_of(output: Path) -> dict[str, int]:
    """Bytes of each part of an output that is there, in the order of a model; empty where its weights are not."""
    try:
        file = gguf_in(output)
        sizes = _safetensors(output) if file is None else _gguf(file)
    except CheckpointError:
        return {}
    found = dict.fromkeys(_ORDER, 0)
    for name, nbytes in sizes.items():
        found[part_of(name)] += nbytes
    if not found[_HEAD]:  # the embedding is the head too
        found = {"embedding and head" if part == _EMBEDDING else part: count for part, count in found.items()}
    return {part: count for part, count in found.items() if count}


def _safetensors(output: Path) -> Mapping[str, int]:
    return {name: stored.spec.nbytes for name, stored in read_headers(output).tensors.items()}


def _gguf(file: Path) -> Mapping[str, int]:
    return {name: tensor.nbytes for name, tensor in read_gguf(file).tensors.items()}
