"""LLM.int8() with outlier channels chosen on calibration text, in a layout of our own that only llmcompress reads.

A linear M with weight [out, in], k of whose input channels stay in 16 bits, becomes

    M.weight          I8   [out, in]   W = code * SCB / 127; zero in outlier channels
    M.SCB             F32  [out]       the absmax of a row without its outliers
    M.outlier_index   I32  [k]         the outlier channels, ascending, then -1 in places that are free
    M.outlier_weight  F16  [out, k]    their weights, zero in places that are free

Inputs are meant to be rounded to int8 token by token, absmax / 127 a step, but for the outlier channels.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import Entry, Reader, TensorSpec
from llmcompress.formats.entry_checks import Refusal, check_codes, common_refusal, rounded_inputs
from llmcompress.grids.int8 import Int8Spec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.inputs import Rounding
    from llmcompress.grids.int8 import Int8Grid

METHOD = "llmcompress-int8-outliers"


class Int8Outliers:
    """Codes beside outliers, which bitsandbytes has no place for; implements `Format`."""

    name = "int8-outliers"
    summary = "int8 beside outlier channels in 16 bits; read by llmcompress alone"
    holds = ("int8",)
    marker = "outlier_index"

    def refuses(self, entries: Sequence[Entry], config: Mapping[str, Any]) -> Refusal | None:
        if refusal := common_refusal(self.name, entries, config, self.holds):
            return refusal
        if refusal := rounded_inputs(self.name, entries):
            return refusal
        for entry in entries:
            if entry.grid is not None and not 0 < entry.grid.outliers < entry.in_features:
                return (
                    f"{entry.grid.outliers} of the {entry.in_features} inputs of {entry.module} are to be outliers",
                    "use --outliers with a smaller --outlier-count, or --format bitsandbytes without",
                )
        return None

    def layout(self, entry: Entry) -> list[TensorSpec]:
        if entry.grid is None:
            return [entry.source]
        rows, width, count = entry.out_features, entry.in_features, entry.grid.outliers
        return [
            TensorSpec(f"{entry.module}.weight", "I8", (rows, width)),
            TensorSpec(f"{entry.module}.SCB", "F32", (rows,)),
            TensorSpec(f"{entry.module}.outlier_index", "I32", (count,)),
            TensorSpec(f"{entry.module}.outlier_weight", "F16", (rows, count)),
        ]

    def encode(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        import torch

        check_codes(entry, coded)
        grid = cast("Int8Grid", coded.grid)
        return {
            f"{entry.module}.weight": (coded.codes.to(torch.int16) - grid.spec.middle).to(torch.int8),
            f"{entry.module}.SCB": grid.absmax[:, 0].contiguous(),
            f"{entry.module}.outlier_index": grid.index.to(torch.int32),
            f"{entry.module}.outlier_weight": grid.outliers.to(torch.float16).contiguous(),
        }

    def config(self, entries: Sequence[Entry], config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        kept = {entry.module: entry.grid.outliers for entry in entries if entry.grid is not None}
        return {"config.json": {"quantization_config": {"quant_method": METHOD, "modules": kept}}}

    def recognises(self, config: Mapping[str, Any]) -> bool:
        settings = config.get("quantization_config")
        return isinstance(settings, Mapping) and settings.get("quant_method") == METHOD

    def shape(
        self, module: str, specs: Mapping[str, TensorSpec], read: Reader, config: Mapping[str, Any]
    ) -> tuple[int, int] | None:
        weight = specs.get(f"{module}.weight")
        return (weight.shape[0], weight.shape[1]) if weight is not None and len(weight.shape) == 2 else None

    def decode(self, module: str, read: Reader, config: Mapping[str, Any]) -> "Coded | None":
        import torch

        from llmcompress.grids.coded import Coded
        from llmcompress.grids.int8 import Int8Grid

        try:
            index, outliers = read(f"{module}.outlier_index").to(torch.int64), read(f"{module}.outlier_weight")
            weight, absmax = read(f"{module}.weight"), read(f"{module}.SCB").to(torch.float32)
        except KeyError:
            return None
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

    def inputs(self, module: str, read: Reader, config: Mapping[str, Any]) -> "Rounding | None":
        import torch

        from llmcompress.grids.int8_inputs import BesideOutliers

        index = read(f"{module}.outlier_index").to(torch.int64)
        return BesideOutliers(index[index >= 0])


FORMAT = Int8Outliers()
