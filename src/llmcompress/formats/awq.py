"""AWQ checkpoints of version GEMM, as AutoAWQ began them and GPTQModel, transformers, vLLM and SGLang read them.

A linear M with weight [out, in] on an int-4 grid with G groups becomes

    M.qweight  I32 [in, out/8]   row k: the codes of input k, eight outputs to a word (packing/awq.py)
    M.qzeros   I32 [G, out/8]    row g: the zero points of group g, packed alike
    M.scales   F16 [G, out]

    W[n, k] = scales[k // group_size, n] * (q[k, n] - z[k // group_size, n])

The config has one width and one group size for all modules. What is left out is listed in `modules_to_not_convert`
for transformers, vLLM and SGLang, and in `dynamic` for GPTQModel, which knows no other list.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import Config, Entry, Reader, Specs
from llmcompress.formats.entry_checks import (
    Refusal,
    affine_grid,
    grids,
    left_alone,
    quantised,
    stored_scale,
    treatments,
)
from llmcompress.formats.packed_format import PackedFormat, Part, matrix_shape
from llmcompress.grids.base import Spec
from llmcompress.grids.integer import IntegerSpec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded

BITS = 4
OUTPUTS = 32  # AutoAWQ's allocator and kernels on a CPU take multiples of it
SCALED_ACTIVATIONS = frozenset(
    ("RefinedWebModel", "bloom", "falcon", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "starcoder2")
)
"""Model types in which transformers expects scales of an activation (act.scales) from every awq checkpoint."""
_HEAD = "lm_head"


class Awq(PackedFormat):
    """The checkpoint family of AutoAWQ."""

    name = "awq"
    summary = "4 bits; read by vLLM, SGLang, transformers and GPTQModel"
    holds = ("int",)
    marker = "qweight"
    affine = True
    quant_method = "awq"
    required = ("qweight", "qzeros", "scales")
    room = "F16"
    scale_name = "scales"

    def refuses(self, entries: Sequence[Entry], config: Config) -> Refusal | None:
        misfit = next((pair for pair in quantised(entries) if pair[1].type not in self.holds), None)
        if misfit is not None:
            return _cannot_hold(*misfit)
        if refusal := super().refuses(entries, config):
            return refusal
        if config.get("model_type") in SCALED_ACTIVATIONS:
            return (
                f"of {config['model_type']} transformers expects scales of activations in an awq checkpoint, and "
                "computes nothing but NaN without them",
                "use --format compressed-tensors",
            )
        common = grids(entries)[0]
        for entry, grid in quantised(entries):
            if grid.bits != BITS:
                return _cannot_hold(entry, grid)
            if grid != common:
                return (
                    f"an awq checkpoint has one grid, not both {common.name} and {grid.name} ({entry.module})",
                    "use the same for all modules, or --format compressed-tensors",
                )
            if refusal := _misfit(entry):
                return refusal
        return None

    def parts(self, entry: Entry, grid: Spec) -> list[Part]:
        width, rows = entry.in_features, entry.out_features
        groups = grid.groups(width)
        return [
            ("qweight", "I32", (width, rows // 8)),
            ("qzeros", "I32", (groups, rows // 8)),
            ("scales", "F16", (groups, rows)),
        ]

    def packed(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        import torch

        from llmcompress.packing.awq import pack_awq

        grid = affine_grid(entry, coded)
        return {
            "qweight": pack_awq(coded.codes.t()),
            "qzeros": pack_awq(grid.zero.t().to(torch.int64)),
            "scales": stored_scale(entry, coded, "F16").t(),
        }

    def settings(self, entries: Sequence[Entry], config: Config) -> dict[str, Any]:
        common = grids(entries)[0]
        skipped = [name for name, grid in treatments(entries).items() if grid is None]
        outside = [entry.module for entry in left_alone(entries) if not entry.block and entry.module not in skipped]
        if _HEAD not in outside:  # a tied one has no tensor, and loaders may see a linear in it
            outside.append(_HEAD)
        settings: dict[str, Any] = {
            "bits": common.bits,
            "group_size": common.group_size,
            "zero_point": not common.symmetric,
            "version": "gemm",
            "modules_to_not_convert": skipped + outside,
        }
        if skipped:
            settings["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in skipped}
        return settings

    def recognises(self, config: Config) -> bool:
        known = super().recognises(config)
        return known and str(config["quantization_config"].get("version", "gemm")).lower() == "gemm"

    def shape(self, module: str, specs: Specs, read: Reader, config: Config) -> tuple[int, int] | None:
        words = matrix_shape(specs, f"{module}.qweight")
        return None if words is None else (words[1] * 8, words[0])

    def grid(self, module: str, config: Config) -> Spec | None:
        return _spec(config["quantization_config"])

    def unpacked(self, module: str, tensors: "list[Tensor]", read: Reader, settings: Config) -> "Coded":
        import torch

        from llmcompress.grids.coded import Coded
        from llmcompress.grids.integer import IntegerGrid
        from llmcompress.grids.scales import natural_groups
        from llmcompress.packing.awq import unpack_awq

        words, zeros, scales = tensors
        spec = _spec(settings)
        width, rows = words.shape[0], words.shape[1] * 8
        groups = spec.groups(width)
        shapes = tuple(zeros.shape), tuple(scales.shape)
        if width != groups * spec.width(width) or shapes != ((groups, rows // 8), (groups, rows)):
            raise CheckpointError(f"tensors of {module} do not have the shapes of {spec.name}")
        points = unpack_awq(zeros).t().to(torch.float32).contiguous()
        if spec.symmetric and bool((points != spec.middle).any()):
            raise CheckpointError(f"{module} has zero points, and zero_point is false")
        scale = scales.t().to(torch.float32).contiguous()
        codes = unpack_awq(words).t().contiguous()
        return Coded(codes, IntegerGrid(spec, scale, points, natural_groups(spec, width)))


def _cannot_hold(entry: Entry, grid: Spec) -> Refusal:
    return (
        f"format awq cannot hold {grid.name} ({entry.module})",
        "awq holds 4 bits; --format compressed-tensors also 2 and 8, --format dense every grid",
    )


def _misfit(entry: Entry) -> Refusal | None:
    """What of one matrix has no place in the format."""
    if entry.permuted:
        return (
            f"awq has no place for groups in activation order ({entry.module})",
            "use --actorder static, or --format gptq",
        )
    if entry.transposed:
        return f"{entry.module} is a Conv1D, which no reader of awq quantises", "use --format gptq or dense"
    if not entry.block:
        return (
            f"readers of awq leave out what lies outside of decoder layers ({entry.module})",
            "leave it in its source type, or use --format gptq",
        )
    if entry.out_features % OUTPUTS:
        return (
            f"awq needs a multiple of {OUTPUTS} outputs, and {entry.module} has {entry.out_features}",
            "leave it in its source type (skip: true), or use --format compressed-tensors",
        )
    return None


def _spec(settings: Mapping[str, Any]) -> IntegerSpec:
    """The grid of all modules. AutoAWQ's own names of the settings differ from those of transformers."""
    bits, size = settings.get("bits", settings.get("w_bit", BITS)), settings.get("group_size")
    if int(bits) != BITS:
        raise CheckpointError(f"quantization_config speaks of {bits} bits, and awq words hold codes of {BITS}")
    size = settings.get("q_group_size", 128) if size is None else size
    return IntegerSpec(BITS, int(size), not settings.get("zero_point", True))


FORMAT = Awq()
