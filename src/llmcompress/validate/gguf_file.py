"""A GGUF file as a second reader takes it: which one is meant, and its values as the gguf package decodes them."""

import math
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcompress.errors import CheckpointError
from llmcompress.store.gguf_header import GgufHeader
from llmcompress.store.gguf_model import tensor_bytes
from llmcompress.store.output_file import is_single

_AT_ONCE = 1 << 20  # values
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that is meant by `path`: itself, or the model in a directory without config.json; None for none.

    CheckpointError if a directory holds several models.
    """
    if not path.is_dir():
        return path if is_single(path) else None
    found = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
    if len({_SHARD.sub("", file.name) for file in found}) > 1:
        raise CheckpointError(f"{path} holds several GGUF files", f"name one of them, such as {found[0]}")
    return found[0] if found else None


def rows_of(header: GgufHeader, name: str) -> int:
    """Rows of a tensor seen as a matrix whose rows are its last extent: those of all experts together."""
    return math.prod(header.tensors[name].shape[:-1])


def decoded(header: GgufHeader, name: str, begin: int, end: int) -> NDArray[np.float32]:
    """Rows `begin` to `end` of a tensor seen as a matrix, float32 [end - begin, width]; CheckpointError if gguf cannot.

    Damaged scales may give infinities and NaN.
    """
    import gguf

    tensor = header.tensors[name]
    raw = tensor_bytes(header, name).reshape(rows_of(header, name), -1)[begin:end]
    kind = gguf.GGMLQuantizationType(tensor.type_id)
    width = (tensor.shape or (1,))[-1]
    out = np.empty((end - begin, width), np.float32)
    step = max(1, _AT_ONCE // width)
    with np.errstate(all="ignore"):
        for at in range(0, end - begin, step):
            try:
                out[at : at + step] = gguf.quants.dequantize(raw[at : at + step], kind)
            except NotImplementedError:
                raise CheckpointError(
                    f"{tensor.file}: tensor {name} has type {tensor.type}, which gguf cannot decode"
                ) from None
    return out
