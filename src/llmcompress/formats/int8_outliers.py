"""LLM.int8() with outlier channels chosen on calibration text, in a layout of our own that only llmcompress reads.

A linear M with weight [out, in], k of whose input channels stay in 16 bits, becomes

    M.weight          I8   [out, in]   W = code * SCB / 127; zero in outlier channels
    M.SCB             F32  [out]       the absmax of a row without its outliers
    M.outlier_index   I32  [k]         the outlier channels, ascending, then -1 in places that are free
    M.outlier_weight  F16  [out, k]    their weights, zero in places that are free

Inputs are meant to be rounded to int8 token by token, absmax / 127 a step, but for the outlier channels.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import Config, Entry, Reader, Specs
from llmcompress.formats.entry_checks import Refusal
from llmcompress.formats.packed_format import PackedFormat, Part, matrix_shape
from llmcompress.grids.base import Spec
from llmcompress.grids.int8 import Int8Spec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.inputs import Rounding
    from llmcompress.grids.int8 import Int8Grid


class Int8Outliers(PackedFormat):
    """Codes beside outliers, which bitsandbytes has no place for."""

    name = "int8-outliers"
    summary = "int8 beside outlier channels in 16 bits; read by llmcompress alone"
    holds = ("int8",)
    marker = "outlier_index"
    quant_method = "llmcompress-int8-outliers"
    required = ("outlier_index", "outlier_weight", "weight", "SCB")

    def misfit(self, entry: Entry, grid: Spec) -> Refusal | None:
        if 0 < grid.outliers < entry.in_features:
            return None
        return (
            f"{grid.outliers} of the {entry.in_features} inputs of {entry.module} are to be outliers",
            "use --outliers with a smaller --outlier-count, or --format bitsandbytes without",
        )

    def parts(self, entry: Entry, grid: Spec) -> list[Part]:
        rows, width, count = entry.out_features, entry.in_features, grid.outliers
        return [
            ("weight", "I8", (rows, width)),
            ("SCB", "F32", (rows,)),
            ("outlier_index", "I32", (count,)),
            ("outlier_weight", "F16", (rows, count)),
        ]

    def packed(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        import torch

        grid = cast("Int8Grid", coded.grid)
        return {
            "weight": (coded.codes.to(torch.int16) - grid.spec.middle).to(torch.int8),
            "SCB": grid.absmax[:, 0],
            "outlier_index": grid.index.to(torch.int32),
            "outlier_weight": grid.outliers.to(torch.float16),
        }

    def settings(self, entries: Sequence[Entry], config: Config) -> dict[str, Any]:
        return {"modules": {entry.module: entry.grid.outliers for entry in entries if entry.grid is not None}}

    def shape(self, module: str, specs: Specs, read: Reader, config: Config) -> tuple[int, int] | None:
        return matrix_shape(specs, f"{module}.weight")

    def unpacked(self, module: str, tensors: "list[Tensor]", read: Reader, settings: Config) -> "Coded":
        import torch

        from llmcompress.grids.coded import Coded
        from llmcompress.grids.int8 import Int8Grid

        index, outliers, weight, absmax = tensors
        index, absmax = index.to(torch.int64), absmax.to(torch.float32)
        rows, width = weight.shape
        if (
            weight.dtype != torch.int8
            or index.dim() != 1
            or outliers.shape != (rows, index.numel())
            or absmax.shape != (rows,)
        ):
            raise CheckpointError(f"tensors of {module} do not have the shapes of int8 beside outliers")
        if bool((index < -1).any()) or bool((index >= width).any()):
            raise CheckpointError(f"{module}.outlier_index names a channel that does not exist")
        spec = Int8Spec(index.numel())
        grid = Int8Grid(spec, width, absmax.unsqueeze(1), index, outliers.to(torch.float32))
        return Coded((weight.to(torch.int16) + spec.middle).to(torch.uint8), grid)

    def inputs(self, module: str, read: Reader, config: Config) -> "Rounding | None":
        import torch

        from llmcompress.grids.int8_inputs import BesideOutliers

        index = read(f"{module}.outlier_index").to(torch.int64)
        return BesideOutliers(index[index >= 0])


FORMAT = Int8Outliers()
