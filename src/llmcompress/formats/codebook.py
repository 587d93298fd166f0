"""Codebooks of rows, in a layout of our own that only llmcompress reads.

A linear M with weight [out, in] and 2^b values for each row becomes

    M.weight_packed  I32  [out, ceil(in*b/32)]   row n: codes as a little-endian bit stream along `in`
    M.codebook       F16  [out, 2^b]             W[n, k] = codebook[n, code[n, k]]
    M.weight_shape   I64  [2]                    out, in
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmcompress.errors import CheckpointError, RunError
from llmcompress.formats.base import Entry, Reader, TensorSpec
from llmcompress.formats.entry_checks import Refusal, check_codes, common_refusal, rounded_inputs
from llmcompress.formats.scheme_tensors import words_for
from llmcompress.grids.codebook import CodebookSpec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.inputs import Rounding

METHOD = "llmcompress-codebook"


class Codebook:
    """Tables of rows, to measure what they gain; implements `Format`."""

    name = "codebook"
    summary = "a table of 4, 8 or 16 values for each row; read by llmcompress alone"
    holds = ("codebook",)
    marker = "codebook"

    def refuses(self, entries: Sequence[Entry], config: Mapping[str, Any]) -> Refusal | None:
        return common_refusal(self.name, entries, config, self.holds) or rounded_inputs(self.name, entries)

    def layout(self, entry: Entry) -> list[TensorSpec]:
        if entry.grid is None:
            return [entry.source]
        rows, width = entry.out_features, entry.in_features
        return [
            TensorSpec(f"{entry.module}.weight_packed", "I32", (rows, words_for(width, entry.grid.bits))),
            TensorSpec(f"{entry.module}.codebook", "F16", (rows, entry.grid.levels)),
            TensorSpec(f"{entry.module}.weight_shape", "I64", (2,)),
        ]

    def encode(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        import torch

        from llmcompress.packing.bits import pack

        check_codes(entry, coded)
        if coded.grid.table is None:
            raise RunError(f"{entry.module} was coded on {coded.grid.spec.name}, which has no tables")
        return {
            f"{entry.module}.weight_packed": pack(coded.codes, coded.grid.spec.bits),
            f"{entry.module}.codebook": coded.grid.table.to(torch.float16).contiguous(),
            f"{entry.module}.weight_shape": torch.tensor([entry.out_features, entry.in_features], dtype=torch.int64),
        }

    def config(self, entries: Sequence[Entry], config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        bits = {entry.module: entry.grid.bits for entry in entries if entry.grid is not None}
        return {"config.json": {"quantization_config": {"quant_method": METHOD, "modules": bits}}}

    def recognises(self, config: Mapping[str, Any]) -> bool:
        settings = config.get("quantization_config")
        return isinstance(settings, Mapping) and settings.get("quant_method") == METHOD

    def shape(
        self, module: str, specs: Mapping[str, TensorSpec], read: Reader, config: Mapping[str, Any]
    ) -> tuple[int, int] | None:
        stored = specs.get(f"{module}.weight_shape")
        if stored is None or stored.shape != (2,):
            raise CheckpointError(f"{module}.weight_shape does not hold the two extents of a matrix")
        rows, width = (int(extent) for extent in read(f"{module}.weight_shape"))
        words = specs.get(f"{module}.weight_packed")
        if words is None or words.shape[0] != rows or not 0 < width <= 32 * words.shape[-1]:
            raise CheckpointError(f"{module}.weight_packed does not hold {rows} x {width} codes")
        return rows, width

    def decode(self, module: str, read: Reader, config: Mapping[str, Any]) -> "Coded | None":
        import torch

        from llmcompress.grids.codebook import CodebookGrid
        from llmcompress.grids.coded import Coded
        from llmcompress.packing.bits import unpack

        try:
            table, words, shape = (read(f"{module}.{part}") for part in ("codebook", "weight_packed", "weight_shape"))
        except KeyError:
            return None
        rows, width = (int(extent) for extent in shape)
        spec = CodebookSpec(table.shape[-1].bit_length() - 1)
        if tuple(table.shape) != (rows, spec.levels) or tuple(words.shape) != (rows, words_for(width, spec.bits)):
            raise CheckpointError(f"tensors of {module} do not have the shapes of {spec.name}")
        return Coded(unpack(words, spec.bits, width), CodebookGrid(spec, width, table.to(torch.float32)))

    def inputs(self, module: str, read: Reader, config: Mapping[str, Any]) -> "Rounding | None":
        return None


FORMAT = Codebook()
