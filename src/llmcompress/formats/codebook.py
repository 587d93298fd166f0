"""Codebooks of rows, in a layout of our own that only llmcompress reads.

A linear M with weight [out, in] and 2^b values for each row becomes

    M.weight_packed  I32  [out, ceil(in*b/32)]   row n: codes as a little-endian bit stream along `in`
    M.codebook       F16  [out, 2^b]             W[n, k] = codebook[n, code[n, k]]
    M.weight_shape   I64  [2]                    out, in
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmcompress.errors import CheckpointError, RunError
from llmcompress.formats.base import Config, Entry, Reader, Specs
from llmcompress.formats.packed_format import PackedFormat, Part, stored_extents
from llmcompress.formats.scheme_tensors import words_for
from llmcompress.grids.base import Spec
from llmcompress.grids.codebook import CodebookSpec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded


class Codebook(PackedFormat):
    """Tables of rows, to measure what they gain."""

    name = "codebook"
    summary = "a table of 4, 8 or 16 values for each row; read by llmcompress alone"
    holds = ("codebook",)
    marker = "codebook"
    quant_method = "llmcompress-codebook"
    required = ("codebook", "weight_packed", "weight_shape")

    def parts(self, entry: Entry, grid: Spec) -> list[Part]:
        rows, width = entry.out_features, entry.in_features
        return [
            ("weight_packed", "I32", (rows, words_for(width, grid.bits))),
            ("codebook", "F16", (rows, grid.levels)),
            ("weight_shape", "I64", (2,)),
        ]

    def packed(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        import torch

        from llmcompress.packing.bits import pack

        if coded.grid.table is None:
            raise RunError(f"{entry.module} was coded on {coded.grid.spec.name}, which has no tables")
        return {
            "weight_packed": pack(coded.codes, coded.grid.spec.bits),
            "codebook": coded.grid.table.to(torch.float16),
            "weight_shape": torch.tensor([entry.out_features, entry.in_features], dtype=torch.int64),
        }

    def settings(self, entries: Sequence[Entry], config: Config) -> dict[str, Any]:
        return {"modules": {entry.module: entry.grid.bits for entry in entries if entry.grid is not None}}

    def shape(self, module: str, specs: Specs, read: Reader, config: Config) -> tuple[int, int] | None:
        rows, width = stored_extents(module, specs, read)
        words = specs.get(f"{module}.weight_packed")
        if words is None or words.shape[0] != rows or not 0 < width <= 32 * words.shape[-1]:
            raise CheckpointError(f"{module}.weight_packed does not hold {rows} x {width} codes")
        return rows, width

    def unpacked(self, module: str, tensors: "list[Tensor]", read: Reader, settings: Config) -> "Coded":
        import torch

        from llmcompress.grids.codebook import CodebookGrid
        from llmcompress.grids.coded import Coded
        from llmcompress.packing.bits import unpack

        table, words, shape = tensors
        rows, width = (int(extent) for extent in shape)
        spec = CodebookSpec(table.shape[-1].bit_length() - 1)
        if tuple(table.shape) != (rows, spec.levels) or tuple(words.shape) != (rows, words_for(width, spec.bits)):
            raise CheckpointError(f"tensors of {module} do not have the shapes of {spec.name}")
        return Coded(unpack(words, spec.bits, width), CodebookGrid(spec, width, table.to(torch.float32)))


FORMAT = Codebook()
