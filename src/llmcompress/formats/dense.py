"""Decoded weights in the source's type: any loader reads them, nothing is saved but the noise of the codes shows.

The decoded value scale * (code - zero_point) is rounded once, to the type the matrix had; everything else is copied.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmcompress.errors import RunError
from llmcompress.formats import kv_cache
from llmcompress.formats.base import Config, Entry, Format, TensorSpec
from llmcompress.formats.entry_checks import Refusal, check_codes, rounded_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded


class DenseFormat(Format):
    """Checkpoints that look like their source."""

    name = "dense"
    head_codes = True
    embedding_codes = True
    summary = "decoded weights in the source's type, for any loader; as large as the source"
    holds = None
    room = "F32"
    marker = "weight"

    def refuses(self, entries: Sequence[Entry], config: Config) -> Refusal | None:
        for entry in entries:
            if entry.grid is not None and entry.source.dtype not in ("F16", "BF16", "F32", "F64"):
                return (
                    f"{entry.source.name} is stored as {entry.source.dtype}, which cannot hold decoded weights",
                    "convert the model to float16 or bfloat16 first",
                )
        return rounded_inputs(self.name, entries) or kv_cache.refusal(self.name, entries)

    def layout(self, entry: Entry) -> list[TensorSpec]:
        return [entry.source]

    def encode(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        import torch

        check_codes(entry, coded)
        types = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
        weight = coded.decode().to(types[entry.source.dtype])
        if not bool(torch.isfinite(weight).all()):
            raise RunError(f"decoded values of {entry.module} overflow {entry.source.dtype}")
        return {entry.source.name: (weight.t() if entry.transposed else weight).contiguous()}

    def config(self, entries: Sequence[Entry], config: Config) -> dict[str, dict[str, Any]]:
        return {"config.json": {}}

    def recognises(self, config: Config) -> bool:
        return "quantization_config" not in config


FORMAT = DenseFormat()
