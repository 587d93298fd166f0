"""auto-round checkpoints, as the package auto-round reads them, transformers with it, vLLM (as `inc`) and SGLang.

The tensors of a linear are those of symmetric GPTQ without its g_idx (`packing_format` auto_round:auto_gptq, zero
points less one). config.json has settings for all modules, and in `extra_config` those of each module that differs, so
that widths may be mixed; a module with 16 bits there stays as it is. Asymmetric grids have another packing,
auto_round:auto_awq, for which the package falls back to empty weights on a CPU: it is neither written nor read.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmcompress.errors import CheckpointError
from llmcompress.formats import gptq
from llmcompress.formats.base import Config, Entry, Reader, Specs
from llmcompress.formats.entry_checks import Refusal, grids, left_alone, quantised, treatments
from llmcompress.formats.packed_format import PackedFormat, Part
from llmcompress.grids.base import Spec
from llmcompress.grids.integer import IntegerSpec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded

BITS = (2, 3, 4, 5, 6, 8)
WORD = 32  # readers make room for whole words of 32 values on both sides
_PACKING = "auto_round:auto_gptq"
_WHOLE = {"bits": 16, "act_bits": 16}


class AutoRound(PackedFormat):
    """The checkpoint family of Intel's auto-round."""

    name = "auto-round"
    summary = "2 to 8 bits, also mixed, symmetric; read by auto-round, transformers with it, vLLM and SGLang"
    holds = ("int",)
    marker = "qweight"
    affine = True
    quant_method = "auto-round"
    required = ("qweight", "qzeros", "scales")
    scales = "F16"
    scale_name = "scales"

    def misfit(self, entry: Entry, grid: Spec) -> Refusal | None:
        if not grid.symmetric or grid.bits not in BITS:
            return (
                f"format auto-round holds symmetric integers, not {grid.name} ({entry.module})",
                "use --sym, or --format compressed-tensors",
            )
        if entry.permuted:
            return (
                f"auto-round has no place for groups in activation order ({entry.module})",
                "use --actorder static, or --format gptq",
            )
        if entry.transposed:
            return f"{entry.module} is a Conv1D, which no reader of auto-round was seen to take", "use --format gptq"
        if not entry.block:
            return (
                f"readers of auto-round were not seen to take codes outside of decoder layers ({entry.module})",
                "leave it in its source type, or use --format gptq",
            )
        if entry.in_features % WORD or entry.out_features % WORD:
            return (
                f"auto-round needs multiples of {WORD} on both sides, and {entry.module} is "
                f"{entry.out_features} x {entry.in_features}",
                "leave it in its source type (skip: true), or use --format compressed-tensors",
            )
        return None

    def parts(self, entry: Entry, grid: Spec) -> list[Part]:
        return [part for part in gptq.FORMAT.parts(entry, grid) if part[0] in self.required]

    def packed(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        return {name: part for name, part in gptq.FORMAT.packed(entry, coded).items() if name in self.required}

    def settings(self, entries: Sequence[Entry], config: Config) -> dict[str, Any]:
        common = grids(entries)[0]
        own = {
            name: _WHOLE if grid is None else {"bits": grid.bits, "group_size": grid.group_size, "sym": True}
            for name, grid in treatments(entries).items()
            if grid != common
        }
        outside = {entry.module: _WHOLE for entry in left_alone(entries) if not entry.block}
        blocks = dict.fromkeys(re.split(r"\.\d+\.", entry.module)[0] for entry, _ in quantised(entries))
        return {
            "bits": common.bits,
            "group_size": common.group_size,
            "sym": True,
            "data_type": "int",
            "packing_format": _PACKING,
            "block_name_to_quantize": ",".join(blocks),
            "extra_config": {**outside, **own},
        }

    def recognises(self, config: Config) -> bool:
        known = super().recognises(config)
        return known and config["quantization_config"].get("packing_format", _PACKING) == _PACKING

    def shape(self, module: str, specs: Specs, read: Reader, config: Config) -> tuple[int, int] | None:
        told = {"quantization_config": _as_gptq(module, config["quantization_config"])}
        return gptq.FORMAT.shape(module, specs, read, told)

    def grid(self, module: str, config: Config) -> Spec | None:
        return _spec(module, config["quantization_config"])

    def unpacked(self, module: str, tensors: "list[Tensor]", read: Reader, settings: Config) -> "Coded":
        return gptq.FORMAT.unpacked(module, tensors, read, _as_gptq(module, settings))


def _spec(module: str, settings: Mapping[str, Any]) -> IntegerSpec:
    """The grid of one module, by its own settings, those of the first pattern that its name holds, or the common ones.

    CheckpointError for what is no symmetric grid of integers.
    """
    extra = settings.get("extra_config") or {}
    own = extra.get(module)
    if own is None:
        own = next((said for rule, said in extra.items() if _holds(module, rule)), {})
    merged = {"group_size": 128, "sym": True, "data_type": "int", **settings, **own}
    if merged["data_type"] != "int" or not merged["sym"]:
        raise CheckpointError(f"{module} is no symmetric grid of integers in {_PACKING}")
    return IntegerSpec(int(merged["bits"]), int(merged["group_size"]), True)


def _as_gptq(module: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a module in the words of gptq."""
    spec = _spec(module, settings)
    return {"bits": spec.bits, "group_size": spec.group_size, "sym": True, "checkpoint_format": "gptq"}


def _holds(module: str, rule: str) -> bool:
    try:
        return re.search(rule, module) is not None
    except re.error:  # the name of a module, and no pattern
        return False


FORMAT = AutoRound()
