"""GPTQ checkpoints, as GPTQModel, transformers (with optimum), vLLM, SGLang and llama.cpp's converter read them.

A linear M with weight [out, in] on an int-b grid with G groups becomes

    M.qweight  I32 [ceil(in*b/32), out]   column n: the codes of output n as a little-endian bit stream along `in`
    M.qzeros   I32 [G, ceil(out*b/32)]    row g: the zero points of group g as a bit stream along `out`
    M.scales   F16 [G, out]
    M.g_idx    I32 [in]                   the group of each input channel

    W[n, k] = scales[g_idx[k], n] * (q[k, n] - z[g_idx[k], n])

with b + (16 + b)/group_size bits per weight besides g_idx. Checkpoint format "gptq" (v1) stores z - 1 in qzeros,
"gptq_v2" stores z. Symmetric grids are written as v1, which every engine takes. Asymmetric ones are written as v2:
decoders of v1 add one to a packed word without masking, so that a zero point of 0 spills into its neighbour.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmcompress import __version__
from llmcompress.errors import CheckpointError
from llmcompress.formats.base import Config, Entry, Reader, Specs
from llmcompress.formats.entry_checks import (
    HEADS,
    Refusal,
    affine_grid,
    grids,
    left_alone,
    named,
    quantised,
    stored_scale,
    treatments,
)
from llmcompress.formats.packed_format import PackedFormat, Part, matrix_shape
from llmcompress.formats.scheme_tensors import words_for
from llmcompress.grids.base import Spec
from llmcompress.grids.integer import IntegerSpec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded

BITS = (2, 3, 4, 8)


class GptqFormat(PackedFormat):
    """The checkpoint family of AutoGPTQ and GPTQModel."""

    name = "gptq"
    head_codes = True
    summary = "2, 3, 4, 8 bits; read by GPTQModel, transformers, vLLM, SGLang and llama.cpp's converter"
    holds = ("int",)
    marker = "qweight"
    affine = True
    quant_method = "gptq"
    required = ("qweight", "qzeros", "scales")
    room = "F16"
    scale_name = "scales"

    def refuses(self, entries: Sequence[Entry], config: Config) -> Refusal | None:
        coded = quantised(entries)
        for entry, grid in coded:
            if grid.type not in self.holds:
                return (
                    f"format gptq holds integers, not {grid.name} ({entry.module})",
                    "use --format compressed-tensors, or --type int",
                )
        if refusal := super().refuses(entries, config):
            return refusal
        if len({grid.symmetric for _, grid in coded}) > 1:
            asymmetric = [entry.module for entry, grid in coded if not grid.symmetric]
            return (
                f"a gptq checkpoint is symmetric or asymmetric as a whole, and only {named(asymmetric)} is asymmetric",
                "use the same for all modules, or --format compressed-tensors",
            )
        return None

    def misfit(self, entry: Entry, grid: Spec) -> Refusal | None:
        if grid.bits not in BITS:
            return (
                f"format gptq cannot hold {grid.name} ({entry.module})",
                "gptq holds 2, 3, 4 and 8 bits; --format dense holds every grid",
            )
        # every reader unpacks 3-bit words in threes, 32 values at a time; words of other widths may be part empty
        if grid.bits == 3 and (entry.in_features % 32 or entry.out_features % 32):
            return (
                f"3-bit gptq needs multiples of 32 on both sides, and {entry.module} is "
                f"{entry.out_features} x {entry.in_features}",
                "use 2 or 4 bits for this module, or --format dense",
            )
        if not entry.block and entry.module.rpartition(".")[2] not in HEADS:
            return (
                f"no engine reads gptq codes outside of decoder layers and head ({entry.module})",
                "leave it in its source type",
            )
        return None

    def parts(self, entry: Entry, grid: Spec) -> list[Part]:
        width, rows, bits = entry.in_features, entry.out_features, grid.bits
        groups = grid.groups(width)
        return [
            ("qweight", "I32", (words_for(width, bits), rows)),
            ("qzeros", "I32", (groups, words_for(rows, bits))),
            ("scales", "F16", (groups, rows)),
            ("g_idx", "I32", (width,)),
        ]

    def packed(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        import torch

        from llmcompress.packing.bits import pack

        grid, spec = affine_grid(entry, coded), coded.grid.spec
        zeros = grid.zero.t().to(torch.int64)
        if spec.symmetric:  # checkpoint format v1
            zeros = zeros - 1
        return {
            "qweight": pack(coded.codes, spec.bits).t(),
            "qzeros": pack(zeros, spec.bits),
            "scales": stored_scale(entry, coded, "F16").t(),
            "g_idx": grid.group_index.to(torch.int32),
        }

    def config(self, entries: Sequence[Entry], config: Config) -> dict[str, dict[str, Any]]:
        files = super().config(entries, config)
        return {**files, "quantize_config.json": files["config.json"]["quantization_config"]}

    def settings(self, entries: Sequence[Entry], config: Config) -> dict[str, Any]:
        coded = quantised(entries)
        common, *others = grids(entries)
        version = "gptq" if common.symmetric else "gptq_v2"
        settings: dict[str, Any] = {
            "bits": common.bits,
            "group_size": common.group_size,
            "sym": common.symmetric,
            "desc_act": any(entry.permuted for entry, _ in coded),
            "static_groups": any(entry.options.get("static_groups", False) for entry, _ in coded),
        }
        for key in ("true_sequential", "damp_percent"):
            values = [entry.options[key] for entry, _ in coded if key in entry.options]
            if values and (key != "damp_percent" or 0 < values[0] < 1):  # transformers refuses others
                settings[key] = values[0]
        settings |= {
            "lm_head": any(not entry.block for entry, _ in coded),
            "checkpoint_format": version,
            "format": version,
            "pack_dtype": "int32",
        }
        # GPTQModel, vLLM and SGLang go by `dynamic`, transformers by the list of modules: whoever needs one needs both
        if others or any(entry.linear for entry in left_alone(entries)):
            settings["dynamic"] = _dynamic(entries, common)
            settings["modules_in_block_to_quantize"] = [[entry.module for entry, _ in coded]]
        settings["meta"] = {"quantizer": [f"llmcompress:{__version__}"]}
        return settings

    def shape(self, module: str, specs: Specs, read: Reader, config: Config) -> tuple[int, int] | None:
        words, scales = matrix_shape(specs, f"{module}.qweight"), matrix_shape(specs, f"{module}.scales")
        if words is None or scales is None:
            return None
        index = specs.get(f"{module}.g_idx")
        spec = _spec(module, config["quantization_config"])
        width = words[0] * 32 // spec.bits if index is None or not index.shape else index.shape[0]
        return scales[1], width

    def grid(self, module: str, config: Config) -> Spec | None:
        settings = config["quantization_config"]
        return None if settings.get("desc_act") else _spec(module, settings)

    def unpacked(self, module: str, tensors: "list[Tensor]", read: Reader, settings: Config) -> "Coded":
        """Both zero-point conventions, any order of groups, settings of its own through `dynamic`."""
        import torch

        from llmcompress.grids.coded import Coded
        from llmcompress.grids.integer import IntegerGrid
        from llmcompress.packing.bits import unpack

        words, zeros, scales = tensors
        spec = _spec(module, settings)
        rows = scales.shape[1]
        try:
            index = read(f"{module}.g_idx").to(torch.int64)
        except KeyError:  # some writers leave out the natural order
            index = torch.arange(words.shape[0] * 32 // spec.bits) // spec.width(words.shape[0] * 32 // spec.bits)
        width = index.numel()
        shapes = (tuple(words.shape), tuple(zeros.shape), scales.shape[0])
        groups = spec.groups(width)
        if shapes != ((words_for(width, spec.bits), rows), (groups, words_for(rows, spec.bits)), groups):
            raise CheckpointError(f"tensors of {module} do not have the shapes of {spec.name}")
        if int(index.min()) < 0 or int(index.max()) >= groups:
            raise CheckpointError(f"{module}.g_idx names a group that does not exist")
        points = unpack(zeros, spec.bits, rows).to(torch.float32)
        if _version(settings) == "gptq":
            points = (points + 1) % spec.levels
        grid = IntegerGrid(spec, scales.t().to(torch.float32).contiguous(), points.t().contiguous(), index)
        return Coded(unpack(words.t().contiguous(), spec.bits, width), grid)


def _dynamic(entries: Sequence[Entry], common: Spec) -> dict[str, dict[str, Any]]:
    """Rules by regular expression: first what stays unquantised, then what has settings of its own."""
    treatment = treatments(entries)
    skipped: dict[str, dict[str, Any]] = {
        f"-:^{re.escape(name)}$": {} for name, grid in treatment.items() if grid is None
    }
    return skipped | {
        f"+:^{re.escape(name)}$": {"bits": grid.bits, "group_size": grid.group_size}
        for name, grid in treatment.items()
        if grid is not None and grid != common
    }


def _spec(module: str, settings: Mapping[str, Any]) -> IntegerSpec:
    """The grid of one module: the first rule of `dynamic` that matches, else the common settings."""
    own: Mapping[str, Any] = {}
    for rule, overrides in (settings.get("dynamic") or {}).items():
        if not rule.startswith("-:") and re.match(rule.removeprefix("+:"), module):
            own = overrides
            break
    merged = {**settings, **own}
    return IntegerSpec(int(merged["bits"]), int(merged.get("group_size", 128)), bool(merged.get("sym", True)))


def _version(settings: Mapping[str, Any]) -> str:
    return str(settings.get("checkpoint_format") or settings.get("format") or "gptq")


FORMAT = GptqFormat()
