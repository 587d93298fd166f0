"""What a GGUF file says of itself, from its header alone: no tensor is read, no torch needed."""

import math
from collections.abc import Mapping
from typing import Any

from llmcompress.store.gguf_header import GgufArray, GgufHeader

_SPECIAL = ("tokenizer.ggml.", "_token_id")
_IMATRIX = "quantize.imatrix."


def facts(header: GgufHeader) -> dict[str, Any]:
    """Facts by name, ready for JSON; None for what the file does not say."""
    arch = scalar(header, "general.architecture")
    stored = sum(tensor.nbytes for tensor in header.tensors.values())
    parameters = sum(math.prod(tensor.shape) for tensor in header.tensors.values())
    return {
        "path": str(header.path),
        "gguf_version": header.version,
        "architecture": arch,
        "name": scalar(header, "general.name"),
        "file_type": _file_type(scalar(header, "general.file_type")),
        "layers": scalar(header, f"{arch}.block_count"),
        "hidden_size": scalar(header, f"{arch}.embedding_length"),
        "context_length": scalar(header, f"{arch}.context_length"),
        "vocab_size": _count(header, "tokenizer.ggml.tokens"),
        "tied_embeddings": "output.weight" not in header.tensors,
        "files": len(header.files),
        "bytes": sum(file.stat().st_size for file in header.files),
        "tensors": len(header.tensors),
        "parameters": parameters,
        "bits_per_weight": round(8 * stored / parameters, 4) if parameters else None,
        "types": _types(header),
        "tokenizer": _tokenizer(header),
        "imatrix": {
            key.removeprefix(_IMATRIX): scalar(header, key) for key in header.fields if key.startswith(_IMATRIX)
        },
        "alignment": header.alignment,
    }


def scalar(header: GgufHeader, key: str) -> int | float | str | None:
    """The value of a key; None where there is none, or an array."""
    field = header.fields.get(key)
    return None if field is None or isinstance(field.value, GgufArray) else field.value


def _count(header: GgufHeader, key: str) -> int | None:
    field = header.fields.get(key)
    return field.value.count if field is not None and isinstance(field.value, GgufArray) else None


def _file_type(number: int | float | str | None) -> str | None:
    from gguf import LlamaFileType

    try:
        name: str = LlamaFileType(number).name
    except ValueError:
        return None if number is None else f"unknown ({number})"
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")


def _types(header: GgufHeader) -> Mapping[str, Mapping[str, int]]:
    """Tensors and bytes of each tensor type."""
    found: dict[str, dict[str, int]] = {}
    for tensor in header.tensors.values():
        entry = found.setdefault(tensor.type, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += tensor.nbytes
    return dict(sorted(found.items()))


def _tokenizer(header: GgufHeader) -> Mapping[str, Any]:
    begin, end = _SPECIAL
    special = {
        key.removeprefix(begin).removesuffix(end): scalar(header, key)
        for key in header.fields
        if key.startswith(begin) and key.endswith(end)
    }
    return {
        "model": scalar(header, f"{begin}model"),
        "pre": scalar(header, f"{begin}pre"),
        "special_ids": special,
        "add_bos": scalar(header, f"{begin}add_bos_token"),
        "add_eos": scalar(header, f"{begin}add_eos_token"),
        "chat_template": "tokenizer.chat_template" in header.fields,
    }
