"""Ready token ids: a safetensors file with `input_ids` [n, length], as `llmcompress calib pack` writes it."""

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from llmcompress.calib.base import Source, TokenRequest, fingerprint
from llmcompress.calib.documents import unreadable
from llmcompress.errors import CalibrationError

if TYPE_CHECKING:
    from torch import Tensor

KEY = "input_ids"
SUFFIX = ".safetensors"


class Ids(Source):
    """The first rows of a file of token ids, and of each row the first tokens where a shorter length is asked for."""

    name = "ids"
    needs_tokenizer = False
    accepts = f"a {SUFFIX} file of token ids, as written by 'llmcompress calib pack'"

    path: Path = Field(description=f"{SUFFIX} file with {KEY} [n, length]")

    @classmethod
    def detects(cls, path: Path) -> bool:
        return path.is_file() and path.suffix.lower() == SUFFIX

    def tokens(self, request: TokenRequest) -> "Tensor":
        import torch

        ids = _read(self.path)
        count, length = ids.shape
        if count < request.samples:
            raise CalibrationError(
                f"{self.path} holds {count} rows, {request.samples} were asked for",
                f"use --samples {count}, or pack more" if count else "pack the file again",
            )
        if length < request.length:
            raise CalibrationError(
                f"the rows of {self.path} have {length} tokens, {request.length} were asked for",
                f"use --length {length}, or pack longer rows",
            )
        asked = ids[: request.samples, : request.length].to(torch.int64).contiguous()
        low, high = int(asked.min()), int(asked.max())
        if low < 0 or high >= request.vocab_size:
            raise CalibrationError(
                f"{self.path} holds token {low if low < 0 else high}, but the model has tokens 0 to "
                f"{request.vocab_size - 1}",
                "the file was packed with another model's tokenizer; pack it again",
            )
        return asked


def _read(path: Path) -> "Tensor":
    """`input_ids` [n, length] of some integer type, equal to the hash in the file where it has one."""
    import torch
    from safetensors import SafetensorError, safe_open

    again = "write it with 'llmcompress calib pack'"
    try:
        with safe_open(str(path), framework="pt") as file:
            if KEY not in file.keys():  # noqa: SIM118 (not a dict)
                raise CalibrationError(f"{path} has no tensor {KEY!r}; it has {', '.join(sorted(file.keys()))}", again)
            ids: Tensor = file.get_tensor(KEY)
            stated = (file.metadata() or {}).get("sha256")
    except OSError as error:
        raise unreadable(path, error) from None
    except SafetensorError as error:
        raise CalibrationError(f"{path} is not a whole safetensors file: {error}", again) from None
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex() or ids.dim() != 2:
        kind = str(ids.dtype).removeprefix("torch.")
        raise CalibrationError(f"{KEY} in {path} is {kind} {list(ids.shape)}, not integers [n, length]", again)
    if stated is not None and stated != fingerprint(ids):
        raise CalibrationError(f"{path} is damaged: its ids do not match the hash written with them", again)
    return ids


SOURCE = Ids
