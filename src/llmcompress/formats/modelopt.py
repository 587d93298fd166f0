"""Checkpoints of NVIDIA's ModelOpt: NVFP4, and to be read also FP8 and the MX types.

What a linear M with weight [out, in] is stored as is told by the types of its tensors:

    NVFP4   M.weight U8 [out, in/2], M.weight_scale F8_E4M3 [out, in/16], M.weight_scale_2 F32 []
    MXFP4   M.weight U8 [out, in/2], M.weight_scale U8 [out, in/32]
    MXFP8   M.weight F8_E4M3 [out, in], M.weight_scale U8 [out, in/32]
    FP8     M.weight F8_E4M3 [out, in], M.weight_scale F32: one, one a row, or [ceil(out/128), 1, ceil(in/128), 1]

All scales multiply, `weight_scale_2` too, where compressed-tensors has a divisor. Two codes lie in a byte, the first in
the low bits. Settings stand in config.json (`quant_method: modelopt`) or in hf_quant_config.json beside it; both are
written. Where inputs are rounded to NVFP4, M.input_scale F32 [] is to their scales what weight_scale_2 is to those of
M; where they are not, the algorithm is called W4A16_NVFP4, since engines would wait for that tensor.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import Config, Entry, Reader, Specs
from llmcompress.formats.entry_checks import HEADS, Refusal, left_alone, quantised
from llmcompress.formats.float8_tensors import Tile, float8_shape, read_float8, scale_values
from llmcompress.formats.packed_format import PackedFormat, Part, matrix_shape
from llmcompress.grids.base import INPUT_SPECS, Spec
from llmcompress.grids.mxfp4 import Mxfp4Spec
from llmcompress.grids.nvfp4 import Nvfp4Spec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.inputs import InputGrid

SETTINGS = "hf_quant_config.json"
_PRODUCER = {"name": "modelopt", "version": "0.47.0"}  # engines know the layout by this name
_NVFP4 = ("NVFP4", "W4A16_NVFP4")
_BLOCK = (128, 128)
_MX = (1, 32)


class ModelOpt(PackedFormat):
    """What `export_hf_checkpoint` of ModelOpt writes."""

    name = "modelopt"
    summary = "nvfp4 as NVIDIA's ModelOpt writes it, also with rounded inputs; read by vLLM, SGLang and TensorRT-LLM"
    holds = ("nvfp4",)
    quant_method = "modelopt"
    required = ("weight", "weight_scale")
    marker = "weight_scale"
    tells_inputs = True

    def refuses(self, entries: Sequence[Entry], config: Config) -> Refusal | None:
        if refusal := super().refuses(entries, config):
            return refusal
        rounded = {entry.inputs for entry, _ in quantised(entries)}
        if len(rounded) > 1:
            return "format modelopt has one algorithm for all modules", "give all matrices the same --activations"
        return None

    def misfit(self, entry: Entry, grid: Spec) -> Refusal | None:
        if entry.inputs not in (None, INPUT_SPECS["nvfp4"]):
            return (
                f"no algorithm of ModelOpt has inputs of {entry.inputs.name} beside {grid.name} ({entry.module})",
                "use --activations nvfp4 or none",
            )
        if entry.transposed:
            return f"{entry.module} is a Conv1D, which no reader of modelopt quantises", "use --format dense"
        return None

    def parts(self, entry: Entry, grid: Spec) -> list[Part]:
        rows, width = entry.out_features, entry.in_features
        inputs: list[Part] = [] if entry.inputs is None else [("input_scale", "F32", ())]
        return [
            ("weight", "U8", (rows, width // 2)),
            ("weight_scale", "F8_E4M3", (rows, grid.groups(width))),
            ("weight_scale_2", "F32", ()),
            *inputs,
        ]

    def packed(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        own = coded.grid.packed(coded.codes)
        divisors = {"weight_scale_2": own["weight_global_scale"], "input_scale": coded.input_scale}
        factors = {name: 1 / divisor.reshape(()) for name, divisor in divisors.items() if divisor is not None}
        return {"weight": own["weight_packed"], "weight_scale": own["weight_scale"], **factors}

    def config(self, entries: Sequence[Entry], config: Config) -> dict[str, dict[str, Any]]:
        files = super().config(entries, config)
        said = files["config.json"]["quantization_config"]
        quantization = {
            "quant_algo": said["quant_algo"],
            "kv_cache_quant_algo": None,
            "group_size": Nvfp4Spec.group_size,
            "exclude_modules": said["ignore"],
        }
        return {**files, SETTINGS: {"producer": _PRODUCER, "quantization": quantization}}

    def settings(self, entries: Sequence[Entry], config: Config) -> dict[str, Any]:
        rounded = any(entry.inputs is not None for entry in entries)
        args = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": Nvfp4Spec.group_size}
        alone = [name for entry in left_alone(entries) for name in entry.names]
        if all(entry.block for entry, _ in quantised(entries)) and HEADS[0] not in alone:
            alone.append(HEADS[0])  # a tied head has no tensor, and is a Linear
        group = {"input_activations": args if rounded else None, "weights": args, "targets": ["Linear"]}
        return {
            "quant_algo": _NVFP4[not rounded],
            "config_groups": {"group_0": group},
            "ignore": alone,
            "producer": _PRODUCER,
        }

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
        return Nvfp4Spec() if _algorithm(module, config) in _NVFP4 else None

    def inputs(self, module: str, read: Reader, config: Config) -> "InputGrid | None":
        """Those of NVFP4 alone: of other algorithms the weights are read."""
        from llmcompress.grids.inputs import InputGrid

        if _algorithm(module, config) != "NVFP4":
            return None
        try:
            factor = scale_values(module, read(f"{module}.input_scale")).reshape(-1)
        except KeyError:
            return None
        if factor.numel() != 1 or not bool(factor > 0):
            raise CheckpointError(f"{module}.input_scale is not one positive number")
        return InputGrid(INPUT_SPECS["nvfp4"], 1 / factor)

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


def _algorithm(module: str, config: Config) -> Any:
    settings = config["quantization_config"]
    layers: Any = settings.get("quantized_layers")
    said = layers.get(module, {}) if isinstance(layers, Mapping) else settings
    return said.get("quant_algo")


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
