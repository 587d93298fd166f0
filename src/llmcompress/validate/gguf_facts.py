"""Facts about a GGUF file from its header alone: no tensor is read, and torch is not needed."""

import math
from collections.abc import Mapping
from typing import Any

from llmcompress.store.gguf_header import GgufArray, GgufHeader, scalar_value

_SPECIAL = ("tokenizer.ggml.", "_token_id")
_IMATRIX = "quantize.imatrix."


def gguf_facts(header: GgufHeader) -> dict[str, Any]:
    """Facts by name, ready for JSON; None for a fact that the header does not state."""
    arch = scalar_value(header, "general.architecture")
    stored = header.nbytes
    parameters = sum(math.prod(tensor.shape) for tensor in header.tensors.values())
    return {
        "path": str(header.path),
        "gguf_version": header.version,
        "architecture": arch,
        "name": scalar_value(header, "general.name"),
        "file_type": _file_type(scalar_value(header, "general.file_type")),
        "layers": scalar_value(header, f"{arch}.block_count"),
        "hidden_size": scalar_value(header, f"{arch}.embedding_length"),
        "context_length": scalar_value(header, f"{arch}.context_length"),
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
            key.removeprefix(_IMATRIX): scalar_value(header, key) for key in header.fields if key.startswith(_IMATRIX)
        },
        "alignment": header.alignment,
    }


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
        key.removeprefix(begin).removesuffix(end): scalar_value(header, key)
        for key in header.fields
        if key.startswith(begin) and key.endswith(end)
    }
    return {
        "model": scalar_value(header, f"{begin}model"),
        "pre": scalar_value(header, f"{begin}pre"),
        "special_ids": special,
        "add_bos": scalar_value(header, f"{begin}add_bos_token"),
        "add_eos": scalar_value(header, f"{begin}add_eos_token"),
        "chat_template": "tokenizer.chat_template" in header.fields,
    }
