"""Checkpoints of NVIDIA's ModelOpt: NVFP4, FP8 and the MX types, read and not written.

What a linear M with weight [out, in] is stored as is told by the types of its tensors:

    NVFP4   M.weight U8 [out, in/2], M.weight_scale F8_E4M3 [out, in/16], M.weight_scale_2 F32 []
    MXFP4   M.weight U8 [out, in/2], M.weight_scale U8 [out, in/32]
    MXFP8   M.weight F8_E4M3 [out, in], M.weight_scale U8 [out, in/32]
    FP8     M.weight F8_E4M3 [out, in], M.weight_scale F32: one, one a row, or [ceil(out/128), 1, ceil(in/128), 1]

All scales multiply, `weight_scale_2` too, where compressed-tensors has a divisor. Two codes lie in a byte, the first in
the low bits. Settings stand in config.json (`quant_method: modelopt`) or in hf_quant_config.json beside it.
"""

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import Config, Reader, Specs
from llmcompress.formats.float8_tensors import Tile, float8_shape, read_float8, scale_values
from llmcompress.formats.packed_format import matrix_shape
from llmcompress.formats.read_only import ReadOnlyFormat
from llmcompress.grids.base import Spec
from llmcompress.grids.mxfp4 import Mxfp4Spec
from llmcompress.grids.nvfp4 import Nvfp4Spec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded

_NVFP4 = ("NVFP4", "W4A16_NVFP4")
_BLOCK = (128, 128)
_MX = (1, 32)


class ModelOpt(ReadOnlyFormat):
    """What `export_hf_checkpoint` of ModelOpt writes."""

    name = "modelopt"
    summary = "nvfp4, fp8, mxfp4 and mxfp8 as NVIDIA's ModelOpt writes them; read only"
    marker = "weight_scale"

    def recognises(self, config: Config) -> bool:
        settings = config.get("quantization_config")
        return isinstance(settings, Mapping) and str(settings.get("quant_method")).startswith("modelopt")

    def shape(self, module: str, specs: Specs, read: Reader, config: Config) -> tuple[int, int] | None:
        if f"{module}.pre_quant_scale" in specs:
            raise CheckpointError(f"{module} has a pre_quant_scale of its inputs, which is not known here")
        weight, scale = specs.get(f"{module}.weight"), specs[f"{module}.weight_scale"]
        if weight is None or weight.dtype != "U8":
            tile = _tile(() if weight is None else weight.shape, scale.shape, scale.dtype == "U8")
            return float8_shape(module, specs, "weight_scale", tile)
        packed = matrix_shape(specs, f"{module}.weight")
        small = {"F8_E4M3": Nvfp4Spec(), "U8": Mxfp4Spec()}.get(scale.dtype)
        if packed is None or small is None:
            raise CheckpointError(f"{module} is stored as U8 with scales {scale.dtype}, which is not known here")
        rows, width = packed[0], 2 * packed[1]
        if width % small.group_size or scale.shape != (rows, small.groups(width)):
            raise CheckpointError(
                f"{module}.weight_scale is {list(scale.shape)}, which are not the scales of {rows} x {width} weights "
                f"on {small.name}"
            )
        factor = specs.get(f"{module}.weight_scale_2")
        if small.joins_matrices and (factor is None or factor.shape not in ((), (1,))):
            raise CheckpointError(f"{module} has no weight_scale_2 that is one number")
        return rows, width

    def grid(self, module: str, config: Config) -> Spec | None:
        settings = config["quantization_config"]
        layers: Any = settings.get("quantized_layers")
        said = layers.get(module, {}) if isinstance(layers, Mapping) else settings
        return Nvfp4Spec() if said.get("quant_algo") in _NVFP4 else None

    def decode(self, module: str, read: Reader, config: Config) -> "Coded | None":
        import torch

        try:
            scale = read(f"{module}.weight_scale")
        except KeyError:
            return None
        weight = read(f"{module}.weight")
        if weight.dtype != torch.uint8:
            tile = _tile(tuple(weight.shape), tuple(scale.shape), scale.dtype == torch.uint8)
            return read_float8(module, weight, scale, tile)
        values = scale_values(module, scale)
        if scale.dtype == torch.uint8:
            return _mxfp4(weight, scale)
        factor = scale_values(module, read(f"{module}.weight_scale_2"))
        return _nvfp4(weight, values, factor)


def _tile(shape: tuple[int, ...], scale: tuple[int, ...], bytes_: bool) -> Tile | None:
    """Rows and columns of the tiles that share a scale; None for one scale, or one a row. bytes_: powers of two."""
    if bytes_:
        return _MX
    return None if prod(scale) == 1 or scale in (shape[:1], (*shape[:1], 1)) else _BLOCK


def _nvfp4(weight: "Tensor", small: "Tensor", factor: "Tensor") -> "Coded":
    from llmcompress.grids.coded import Coded
    from llmcompress.grids.e2m1 import unpaired
    from llmcompress.grids.nvfp4 import FactoredGrid

    factor = factor.reshape(1)
    return Coded(unpaired(weight), FactoredGrid(Nvfp4Spec(), small, 1 / factor, factor))


def _mxfp4(weight: "Tensor", scale: "Tensor") -> "Coded":
    from llmcompress.grids.mxfp4 import GRID

    return GRID.unpacked(Mxfp4Spec(), {"weight_packed": weight, "weight_scale": scale})


FORMAT = ModelOpt()
