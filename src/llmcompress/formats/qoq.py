"""Progressive groups as QServe multiplies them (QoQ, W4A8), in a layout of our own that only llmcompress reads.

A linear M with weight [out, in] in groups of g becomes

    M.qweight      I32  [out, in/8]   byte i of a word: code i of eight in its low bits, code 4 + i in its high ones
    M.scale_row    F16  [out]         s0
    M.scale_group  U8   [out, in/g]   s1, 1 ... 16
    M.zero_group   U8   [out, in/g]   0 ... 15

with W[n, k] = (code[n, k] - zero_group[n, k/g]) * scale_group[n, k/g] * scale_row[n], the first two factors together
within -127 ... 127. Inputs are rounded to int8 token by token, or not at all, which config.json says of each module.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from llmcompress.errors import CheckpointError, RunError
from llmcompress.formats.base import Entry, Reader, TensorSpec
from llmcompress.formats.entry_checks import Refusal, check_codes, common_refusal, stored_type
from llmcompress.grids.base import INPUT_SPECS
from llmcompress.grids.progressive import ProgressiveSpec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.inputs import Rounding
    from llmcompress.grids.progressive import ProgressiveGrid

METHOD = "llmcompress-qoq"
INPUTS = "int8-token"
_LANES = 8


class Qoq:
    """Codes of whole numbers of rows; implements `Format`."""

    name = "qoq"
    summary = "4-bit codes of 8-bit integers with inputs in int8 (QServe's W4A8); read by llmcompress alone"
    holds = ("progressive",)
    marker = "scale_group"

    def refuses(self, entries: Sequence[Entry], config: Mapping[str, Any]) -> Refusal | None:
        if refusal := common_refusal(self.name, entries, config, self.holds):
            return refusal
        for entry in entries:
            if entry.inputs is not None and entry.inputs.name != INPUTS:
                return (
                    f"format {self.name} cannot say that inputs are rounded to {entry.inputs.name} ({entry.module})",
                    f"use --activations {INPUTS} or none",
                )
            if entry.grid is not None and entry.permuted:
                return (
                    f"format {self.name} has no place for groups in activation order ({entry.module})",
                    "use --actorder static, or --format dense",
                )
        return None

    def layout(self, entry: Entry) -> list[TensorSpec]:
        if entry.grid is None:
            return [entry.source]
        rows, width = entry.out_features, entry.in_features
        groups = entry.grid.groups(width)
        return [
            TensorSpec(f"{entry.module}.qweight", "I32", (rows, width // _LANES)),
            TensorSpec(f"{entry.module}.scale_row", "F16", (rows,)),
            TensorSpec(f"{entry.module}.scale_group", "U8", (rows, groups)),
            TensorSpec(f"{entry.module}.zero_group", "U8", (rows, groups)),
        ]

    def encode(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        import torch

        from llmcompress.grids.progressive import LARGEST
        from llmcompress.packing.lanes import pack_lanes

        check_codes(entry, coded)
        grid = cast("ProgressiveGrid", coded.grid)
        if int(grid.whole(coded.codes).abs().max()) > LARGEST:
            raise RunError(f"codes of {entry.module} leave the protective range")
        return {
            f"{entry.module}.qweight": pack_lanes(coded.codes),
            f"{entry.module}.scale_row": stored_type(entry, grid.row_scale[:, 0].contiguous(), "F16"),
            f"{entry.module}.scale_group": grid.multiple.to(torch.uint8).contiguous(),
            f"{entry.module}.zero_group": grid.zero.to(torch.uint8).contiguous(),
        }

    def config(self, entries: Sequence[Entry], config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        modules = {
            entry.module: {
                "group_size": entry.grid.group_size,
                "inputs": None if entry.inputs is None else entry.inputs.name,
            }
            for entry in entries
            if entry.grid is not None
        }
        return {"config.json": {"quantization_config": {"quant_method": METHOD, "modules": modules}}}

    def recognises(self, config: Mapping[str, Any]) -> bool:
        settings = config.get("quantization_config")
        return isinstance(settings, Mapping) and settings.get("quant_method") == METHOD

    def shape(
        self, module: str, specs: Mapping[str, TensorSpec], read: Reader, config: Mapping[str, Any]
    ) -> tuple[int, int] | None:
        words = specs.get(f"{module}.qweight")
        if words is None or words.dtype != "I32" or len(words.shape) != 2:
            return None
        return words.shape[0], words.shape[1] * _LANES

    def decode(self, module: str, read: Reader, config: Mapping[str, Any]) -> "Coded | None":
        import torch

        from llmcompress.grids.coded import Coded
        from llmcompress.grids.progressive import LARGEST, LARGEST_MULTIPLE, ProgressiveGrid
        from llmcompress.grids.scales import natural_groups
        from llmcompress.packing.lanes import unpack_lanes

        try:
            words, row_scale = read(f"{module}.qweight"), read(f"{module}.scale_row")
            multiple, zero = read(f"{module}.scale_group"), read(f"{module}.zero_group")
        except KeyError:
            return None
        spec = ProgressiveSpec(int(config["quantization_config"]["modules"][module]["group_size"]))
        rows, width = words.shape[0], words.shape[1] * _LANES
        shape = (rows, spec.groups(width))
        if width % spec.group_size or row_scale.shape != (rows,) or not multiple.shape == zero.shape == shape:
            raise CheckpointError(f"tensors of {module} do not have the shapes of {spec.name}")
        if int(multiple.min()) < 1 or int(multiple.max()) > LARGEST_MULTIPLE or int(zero.max()) >= spec.levels:
            raise CheckpointError(f"{module} has scales or zero points that {spec.name} does not have")
        index = natural_groups(spec, width)
        scale, multiple, zero = (part.to(torch.float32) for part in (row_scale.unsqueeze(1), multiple, zero))
        grid = ProgressiveGrid(spec, scale, multiple, zero, index)
        codes = unpack_lanes(words)
        if int(grid.whole(codes).abs().max()) > LARGEST:
            raise CheckpointError(f"codes of {module} leave the range of int8")
        return Coded(codes, grid)

    def inputs(self, module: str, read: Reader, config: Mapping[str, Any]) -> "Rounding | None":
        from llmcompress.grids.inputs import InputGrid

        said = config["quantization_config"]["modules"][module]["inputs"]
        if said not in (None, INPUTS):
            raise CheckpointError(f"inputs of {module} are rounded to {said!r}, which format {self.name} does not know")
        return None if said is None else InputGrid(INPUT_SPECS[said])


FORMAT = Qoq()
