"""Progressive groups as QServe multiplies them (QoQ, W4A8), in a layout of our own that only llmcompress reads.

A linear M with weight [out, in] in groups of g becomes

    M.qweight      I32  [out, in/8]   byte i of a word: code i of eight in its low bits, code 4 + i in its high ones
    M.scale_row    F16  [out]         s0
    M.scale_group  U8   [out, in/g]   s1, 1 ... 16
    M.zero_group   U8   [out, in/g]   0 ... 15

with W[n, k] = (code[n, k] - zero_group[n, k/g]) * scale_group[n, k/g] * scale_row[n], the first two factors together
within -127 ... 127. Inputs are rounded to int8 token by token, or not at all, which config.json says of each module.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from llmcompress.errors import CheckpointError, RunError
from llmcompress.formats.base import Config, Entry, Reader, Specs
from llmcompress.formats.entry_checks import Refusal, stored_type
from llmcompress.formats.packed_format import PackedFormat, Part, matrix_shape
from llmcompress.grids.base import INPUT_SPECS, Spec
from llmcompress.grids.progressive import ProgressiveSpec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.inputs import Rounding
    from llmcompress.grids.progressive import ProgressiveGrid

INPUTS = "int8-token"
_LANES = 8


class Qoq(PackedFormat):
    """Codes of whole numbers of rows."""

    name = "qoq"
    summary = "4-bit codes of 8-bit integers with inputs in int8 (QServe's W4A8); read by llmcompress alone"
    holds = ("progressive",)
    marker = "scale_group"
    quant_method = "llmcompress-qoq"
    required = ("qweight", "scale_row", "scale_group", "zero_group")
    tells_inputs = True

    def misfit(self, entry: Entry, grid: Spec) -> Refusal | None:
        if entry.inputs is not None and entry.inputs.name != INPUTS:
            return (
                f"format {self.name} cannot say that inputs are rounded to {entry.inputs.name} ({entry.module})",
                f"use --activations {INPUTS} or none",
            )
        if entry.permuted:
            return (
                f"format {self.name} has no place for groups in activation order ({entry.module})",
                "use --actorder static, or --format dense",
            )
        return None

    def parts(self, entry: Entry, grid: Spec) -> list[Part]:
        rows, width = entry.out_features, entry.in_features
        groups = grid.groups(width)
        return [
            ("qweight", "I32", (rows, width // _LANES)),
            ("scale_row", "F16", (rows,)),
            ("scale_group", "U8", (rows, groups)),
            ("zero_group", "U8", (rows, groups)),
        ]

    def packed(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        import torch

        from llmcompress.grids.progressive import LARGEST
        from llmcompress.packing.lanes import pack_lanes

        grid = cast("ProgressiveGrid", coded.grid)
        if int(grid.whole(coded.codes).abs().max()) > LARGEST:
            raise RunError(f"codes of {entry.module} leave the protective range")
        return {
            "qweight": pack_lanes(coded.codes),
            "scale_row": stored_type(entry, grid.row_scale[:, 0], "F16"),
            "scale_group": grid.multiple.to(torch.uint8),
            "zero_group": grid.zero.to(torch.uint8),
        }

    def settings(self, entries: Sequence[Entry], config: Config) -> dict[str, Any]:
        modules = {
            entry.module: {
                "group_size": entry.grid.group_size,
                "inputs": None if entry.inputs is None else entry.inputs.name,
            }
            for entry in entries
            if entry.grid is not None
        }
        return {"modules": modules}

    def shape(self, module: str, specs: Specs, read: Reader, config: Config) -> tuple[int, int] | None:
        words = matrix_shape(specs, f"{module}.qweight")
        if words is None or specs[f"{module}.qweight"].dtype != "I32":
            return None
        return words[0], words[1] * _LANES

    def unpacked(self, module: str, tensors: "list[Tensor]", read: Reader, settings: Config) -> "Coded":
        import torch

        from llmcompress.grids.coded import Coded
        from llmcompress.grids.progressive import LARGEST, LARGEST_MULTIPLE, ProgressiveGrid
        from llmcompress.grids.scales import natural_groups
        from llmcompress.packing.lanes import unpack_lanes

        words, row_scale, multiple, zero = tensors
        spec = ProgressiveSpec(int(settings["modules"][module]["group_size"]))
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

    def inputs(self, module: str, read: Reader, config: Config) -> "Rounding | None":
        from llmcompress.grids.inputs import InputGrid

        said = config["quantization_config"]["modules"][module]["inputs"]
        if said not in (None, INPUTS):
            raise CheckpointError(f"inputs of {module} are rounded to {said!r}, which format {self.name} does not know")
        return None if said is None else InputGrid(INPUT_SPECS[said])


FORMAT = Qoq()
