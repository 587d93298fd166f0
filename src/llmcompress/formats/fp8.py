"""Checkpoints of 8-bit floats as vendors ship them (DeepSeek, Qwen, MiniMax, Mistral): read, not written.

A linear M with weight [out, in] is

    M.weight            F8_E4M3 [out, in]
    M.weight_scale_inv  F32     [ceil(out/128), ceil(in/128)]  multiplies its block, whatever its name says

with `weight_block_size` in quantization_config; the last blocks may not be full. Without it a scale is that of the
whole matrix or of its row, and may be called `weight_scale`, or `qscale_weight` by Mistral. Scales of inputs
(`input_scale`, `activation_scale`, `qscale_act`) are left out: what is read are the weights. `fbgemm_fp8` has a scale
for every row.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import Config, Reader, Specs
from llmcompress.formats.float8_tensors import Tile, float8_shape, read_float8
from llmcompress.formats.read_only import ReadOnlyFormat

if TYPE_CHECKING:
    from llmcompress.grids.coded import Coded

_METHODS = ("fp8", "fbgemm_fp8")


class Fp8(ReadOnlyFormat):
    """8-bit floats with a scale for each block, row or matrix."""

    name = "fp8"
    summary = "8-bit floats with scales of blocks, rows or matrices, as DeepSeek, Qwen and Mistral ship them; read only"
    marker = ("weight_scale_inv", "weight_scale", "qscale_weight")

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
