"""Checkpoints of 8-bit floats as vendors ship them (DeepSeek, Qwen, MiniMax, Mistral); written in blocks alone.

A linear M with weight [out, in] is

    M.weight            F8_E4M3 [out, in]
    M.weight_scale_inv  F32     [ceil(out/128), ceil(in/128)]  multiplies its block, whatever its name says

with `weight_block_size` in quantization_config; the last blocks may not be full. Engines then round the inputs too,
each 128 of a token with a scale of their own. Without it a scale is that of the whole matrix or of its row, and may be
called `weight_scale`, or `qscale_weight` by Mistral. Fixed scales of inputs
(`input_scale`, `activation_scale`, `qscale_act`) are left out: what is read are the weights. `fbgemm_fp8` has a scale
for every row.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import Config, Entry, Reader, Specs
from llmcompress.formats.entry_checks import HEADS, Refusal, grids, left_alone, stored_scale
from llmcompress.formats.float8_tensors import Tile, float8_shape, read_float8, tiles
from llmcompress.formats.packed_format import PackedFormat, Part
from llmcompress.grids.base import INPUT_SPECS, Spec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.inputs import InputGrid

_METHODS = ("fp8", "fbgemm_fp8")


_INPUTS = INPUT_SPECS["fp8-group"]


class Fp8(PackedFormat):
    """8-bit floats with a scale for each block, row or matrix."""

    name = "fp8"
    summary = (
        "8-bit floats in blocks of 128 x 128, inputs rounded; read by vLLM, SGLang and transformers; "
        "of others also by rows or matrices"
    )
    holds = ("fp8-block",)
    quant_method = "fp8"
    required = ("weight", "weight_scale_inv")
    marker = ("weight_scale_inv", "weight_scale", "qscale_weight")
    tells_inputs = True

    def misfit(self, entry: Entry, grid: Spec) -> Refusal | None:
        if entry.inputs != _INPUTS:
            return (
                f"engines round the inputs of format fp8 in groups of 128, and those of {entry.module} would not be",
                "use --activations fp8-group, or --format compressed-tensors",
            )
        if entry.in_features % 128:
            return f"groups of 128 do not divide the {entry.in_features} inputs of {entry.module}", "skip it with --set"
        if entry.transposed:
            return f"{entry.module} is a Conv1D, which no reader of fp8 quantises", "use --format dense"
        return None

    def parts(self, entry: Entry, grid: Spec) -> list[Part]:
        shape = entry.out_features, entry.in_features
        return [("weight", "F8_E4M3", shape), ("weight_scale_inv", "F32", tiles(shape, grid.tile or (1, 1)))]

    def packed(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        import torch

        return {
            "weight": coded.codes.view(torch.float8_e4m3fn),
            "weight_scale_inv": stored_scale(entry, coded, "F32"),
        }

    def settings(self, entries: Sequence[Entry], config: Config) -> dict[str, Any]:
        alone = [name for entry in left_alone(entries) for name in entry.names]
        if all(entry.block for entry in entries if entry.grid is not None):
            alone += [name for name in HEADS[:1] if name not in alone]  # a tied head has no tensor, and is a Linear
        return {
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(grids(entries)[0].tile or ()),
            "modules_to_not_convert": alone,
        }

    def recognises(self, config: Config) -> bool:
        settings = config.get("quantization_config")
        return isinstance(settings, Mapping) and settings.get("quant_method") in _METHODS

    def shape(self, module: str, specs: Specs, read: Reader, config: Config) -> tuple[int, int] | None:
        scale = next(name for name in self.marker if f"{module}.{name}" in specs)
        return float8_shape(module, specs, scale, block_size(config["quantization_config"]))

    def decode(self, module: str, read: Reader, config: Config) -> "Coded | None":
        for name in self.marker:
            try:
                scale = read(f"{module}.{name}")
            except KeyError:
                continue
            return read_float8(module, read(f"{module}.weight"), scale, block_size(config["quantization_config"]))
        return None

    def inputs(self, module: str, read: Reader, config: Config) -> "InputGrid | None":
        from llmcompress.grids.inputs import InputGrid

        settings = config["quantization_config"]
        dynamic = settings.get("activation_scheme") == "dynamic"
        return InputGrid(_INPUTS) if dynamic and block_size(settings) == (128, 128) else None


def block_size(settings: Config) -> Tile | None:
    """Rows and columns of the blocks that share a scale; None where config.json speaks of none. CheckpointError."""
    said = settings.get("weight_block_size")
    if said is None:
        return None
    whole = isinstance(said, list) and all(isinstance(extent, int) and not isinstance(extent, bool) for extent in said)
    if not whole or len(said) != 2 or min(said) < 1:
        raise CheckpointError(f"config.json says weight_block_size is {said!r}, which are no two extents of a block")
    return said[0], said[1]


FORMAT = Fp8()
