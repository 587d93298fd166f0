"""GGUF: one file with weights in llama.cpp's types, tokenizer and all else that a runtime needs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmcompress.formats import kv_cache
from llmcompress.formats.base import Config, Entry, Format, TensorSpec
from llmcompress.formats.entry_checks import Refusal, check_codes, rounded_inputs
from llmcompress.grids.grid_type import gguf_specs

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded


class Gguf(Format):
    """Files for llama.cpp. What stands around the matrices is decided in `engine/gguf.py`."""

    name = "gguf"
    summary = "one file for llama.cpp and all that reads its files, with the tokenizer in it"
    holds = frozenset(spec.type for spec in gguf_specs().values())
    marker = ""

    def refuses(self, entries: Sequence[Entry], config: Config) -> Refusal | None:
        for entry in entries:
            if entry.grid is not None and entry.grid.gguf_type is None:
                return (
                    f"format gguf cannot hold {entry.grid.name} ({entry.module})",
                    "use `llmcompress gguf --type Q4_K_M`, or another type of GGUF",
                )
        return rounded_inputs(self.name, entries) or kv_cache.refusal(self.name, entries)

    def layout(self, entry: Entry) -> list[TensorSpec]:
        if entry.grid is None:
            return [entry.source]
        return [TensorSpec(entry.source.name, str(entry.grid.gguf_type), (entry.out_features, entry.in_features))]

    def encode(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        from llmcompress.packing.ggml import pack

        check_codes(entry, coded)
        return {entry.source.name: pack(coded)}

    def config(self, entries: Sequence[Entry], config: Config) -> dict[str, dict[str, Any]]:
        return {}


FORMAT = Gguf()
