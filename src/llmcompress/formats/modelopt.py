"""Checkpoints of NVIDIA's ModelOpt: NVFP4, FP8 and MXFP8, one for all modules or several, and MXFP4 to be read.

A linear M with weight [out, in] is stored as its algorithm says:

    NVFP4, W4A16_NVFP4         M.weight U8 [out, in/2], M.weight_scale F8_E4M3 [out, in/16], M.weight_scale_2 F32 []
    FP8                        M.weight F8_E4M3 [out, in], M.weight_scale F32 []
    FP8_PER_CHANNEL_PER_TOKEN  M.weight F8_E4M3 [out, in], M.weight_scale F32 [out]
    fp8_pb_wo                  M.weight F8_E4M3 [out, in], M.weight_scale F32 [ceil(out/128), 1, in/128, 1]
    MXFP8                      M.weight F8_E4M3 [out, in], M.weight_scale U8 [out, in/32]
    (MXFP4)                    M.weight U8 [out, in/2], M.weight_scale U8 [out, in/32]

All scales multiply, `weight_scale_2` too, where compressed-tensors has a divisor. Two codes lie in a byte, the first in
the low bits. Settings stand in config.json (`quant_method: modelopt`) or in hf_quant_config.json beside it; both are
written. Modules that differ are MIXED_PRECISION, with the algorithm of each under `quantized_layers`. An algorithm also
says how inputs are rounded. Where something of that is fixed it is M.input_scale F32 []: of FP8 the scale of all
inputs, of NVFP4 to their scales what weight_scale_2 is to those of M. Engines would wait for that tensor where inputs
stay as they are, so that NVFP4 is W4A16_NVFP4 then, and FP8 has no such algorithm. Names of algorithms are read in any
case, and written in ModelOpt's: TensorRT-LLM knows fp8_pb_wo in small letters alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from llmcompress.errors import CheckpointError
from llmcompress.formats import kv_cache
from llmcompress.formats.base import Config, Entry, Reader, Specs
from llmcompress.formats.entry_checks import HEADS, Refusal, left_alone, quantised, stored_scale
from llmcompress.formats.float8_tensors import Tile, float8_shape, read_float8, scale_values
from llmcompress.formats.packed_format import PackedFormat, Part, matrix_shape
from llmcompress.grids.base import INPUT_SPECS, PER_ROW, InputSpec, Spec
from llmcompress.grids.float8 import Float8Spec
from llmcompress.grids.float8_tensor import Float8TensorSpec
from llmcompress.grids.mxfp4 import Mxfp4Spec
from llmcompress.grids.mxfp8 import Mxfp8Spec
from llmcompress.grids.nvfp4 import Nvfp4Spec
from llmcompress.grids.tiled_floats import TiledFloatSpec
from llmcompress.store.headers import SETTINGS

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.inputs import InputGrid

_PRODUCER = {"name": "modelopt", "version": "0.47.0"}  # engines know the layout by this name
_BLOCK = (128, 128)
_MX = (1, 32)
_MIXED = "MIXED_PRECISION"


@dataclass(frozen=True)
class Algorithm:
    """A grid and how inputs are rounded beside it. said: what `config_groups` say of weights beyond their width."""

    grid: Spec
    inputs: InputSpec | None
    said: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> Mapping[str, int]:
        """The `group_size` that engines look for, where they do."""
        return {"group_size": self.grid.group_size} if self.grid.group_size != PER_ROW else {}

    @property
    def group(self) -> dict[str, Any]:
        """What `config_groups` say."""
        shared = {"num_bits": self.grid.bits, "type": "float", **({} if self.said else self.size)}
        dynamic = self.inputs is not None and self.inputs.dynamic
        inputs = None if self.inputs is None else {"dynamic": dynamic, **shared}
        return {"input_activations": inputs, "weights": {"dynamic": False, **shared, **self.said}}


ALGORITHMS: Mapping[str, Algorithm] = {
    "NVFP4": Algorithm(Nvfp4Spec(), INPUT_SPECS["nvfp4"]),
    "W4A16_NVFP4": Algorithm(Nvfp4Spec(), None),
    "FP8": Algorithm(Float8TensorSpec(), INPUT_SPECS["fp8-tensor"]),
    "FP8_PER_CHANNEL_PER_TOKEN": Algorithm(Float8Spec(), INPUT_SPECS["fp8-token"], {"strategy": "channel"}),
    "FP8_PB_WO": Algorithm(
        TiledFloatSpec(*_BLOCK), INPUT_SPECS["fp8-group"], {"strategy": "block", "block_structure": list(_BLOCK)}
    ),
    "MXFP8": Algorithm(Mxfp8Spec(), INPUT_SPECS["mxfp8"]),
}
"""The algorithms that are written, by the name that engines know, in capitals."""
_WRITTEN = {"FP8_PB_WO": "fp8_pb_wo"}  # where ModelOpt itself has no capitals


class ModelOpt(PackedFormat):
    """What `export_hf_checkpoint` of ModelOpt writes."""

    name = "modelopt"
    summary = "nvfp4, fp8 and mxfp8 with rounded inputs as ModelOpt writes them; read by vLLM, SGLang and TensorRT-LLM"
    holds = tuple(dict.fromkeys(algorithm.grid.type for algorithm in ALGORITHMS.values()))
    scales = "F32"
    quant_method = "modelopt"
    required = ("weight", "weight_scale")
    marker = "weight_scale"
    tells_inputs = True

    def misfit(self, entry: Entry, grid: Spec) -> Refusal | None:
        if _named(entry, grid) is None:
            asked = "16 bits" if entry.inputs is None else entry.inputs.name
            known = [how.inputs.name if how.inputs else "none" for how in ALGORITHMS.values() if how.grid == grid]
            return (
                f"no algorithm of ModelOpt has inputs of {asked} beside {grid.name} ({entry.module})",
                f"use --activations {' or '.join(known)}",
            )
        if entry.inputs is not None and entry.inputs.group and entry.in_features % entry.inputs.group:
            return (
                f"groups of {entry.inputs.group} do not divide the {entry.in_features} inputs of {entry.module}",
                "leave it out: --set 'PATTERN: {skip: true}'",
            )
        if entry.transposed:
            return f"{entry.module} is a Conv1D, which no reader of modelopt quantises", "use --format dense"
        return None

    def parts(self, entry: Entry, grid: Spec) -> list[Part]:
        rows, width = entry.out_features, entry.in_features
        inputs: list[Part] = [] if entry.inputs is None or entry.inputs.dynamic else [("input_scale", "F32", ())]
        own = grid.parts(rows, width)
        if "weight_packed" in own:
            codes, scale = own["weight_packed"], own["weight_scale"]
            return [("weight", *codes), ("weight_scale", *scale), ("weight_scale_2", "F32", ()), *inputs]
        if own:
            return [*((name, *about) for name, about in own.items()), *inputs]
        return [("weight", "F8_E4M3", (rows, width)), ("weight_scale", "F32", _scales(grid, rows, width)), *inputs]

    def packed(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        import torch

        spec = coded.grid.spec
        if not spec.parts(1, 1):
            scale = stored_scale(entry, coded, "F32", _scales(spec, *coded.codes.shape))
            fixed = {} if coded.input_scale is None else {"input_scale": coded.input_scale.reshape(())}
            return {"weight": coded.codes.view(torch.float8_e4m3fn), "weight_scale": scale, **fixed}
        own = coded.grid.packed(coded.codes)
        if "weight_packed" not in own:
            return own
        divisors = {"weight_scale_2": own["weight_global_scale"], "input_scale": coded.input_scale}
        factors = {name: 1 / divisor.reshape(()) for name, divisor in divisors.items() if divisor is not None}
        return {"weight": own["weight_packed"], "weight_scale": own["weight_scale"], **factors}

    def config(self, entries: Sequence[Entry], config: Config) -> dict[str, dict[str, Any]]:
        files = super().config(entries, config)
        said = files["config.json"]["quantization_config"]
        one = ALGORITHMS.get(said["quant_algo"].upper())
        quantization = {
            "quant_algo": said["quant_algo"],
            "kv_cache_quant_algo": kv_cache.modelopt_scheme(entries)[0],
            **({} if one is None else one.size),
            "exclude_modules": said["ignore"],
            **{key: said[key] for key in ("quantized_layers",) if key in said},
        }
        return {**files, SETTINGS: {"producer": _PRODUCER, "quantization": quantization}}

    def settings(self, entries: Sequence[Entry], config: Config) -> dict[str, Any]:
        modules: dict[str, list[str]] = {}
        for entry, grid in quantised(entries):
            modules.setdefault(_named(entry, grid) or "", []).extend(entry.names)
        alone = [name for entry in left_alone(entries) for name in entry.names]
        if all(entry.block for entry, _ in quantised(entries)) and HEADS[0] not in alone:
            alone.append(HEADS[0])  # a tied head has no tensor, and is a Linear
        one = next(iter(modules)) if len(modules) == 1 else None
        groups = {
            f"group_{number}": {**ALGORITHMS[name].group, "targets": ["Linear"] if one else modules[name]}
            for number, name in enumerate(modules)
        }
        _, cached = kv_cache.modelopt_scheme(entries)
        layers = {
            module: {"quant_algo": _WRITTEN.get(name, name), **ALGORITHMS[name].size}
            for name in modules
            for module in modules[name]
        }
        return {
            "quant_algo": _WRITTEN.get(one, one) if one else _MIXED,
            "config_groups": groups,
            "ignore": alone,
            "producer": _PRODUCER,
            **({} if cached is None else {"kv_cache_scheme": cached}),
            **({} if one else {"quantized_layers": layers}),
        }

    def recognises(self, config: Config) -> bool:
        settings = config.get("quantization_config")
        return isinstance(settings, Mapping) and str(settings.get("quant_method")).startswith("modelopt")

    def shape(self, module: str, specs: Specs, read: Reader, config: Config) -> tuple[int, int] | None:
        if f"{module}.pre_quant_scale" in specs:
            raise CheckpointError(f"{module} has a pre_quant_scale of its inputs, which is not known here")
        weight, scale = specs.get(f"{module}.weight"), specs[f"{module}.weight_scale"]
        if weight is None or weight.dtype != "U8":
            said = _algorithm(module, config)
            tile = _tile(said, () if weight is None else weight.shape, scale.shape, scale.dtype == "U8")
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
        found = ALGORITHMS.get(_algorithm(module, config))
        return None if found is None else found.grid

    def inputs(self, module: str, read: Reader, config: Config) -> "InputGrid | None":
        """Of algorithms that are not written the weights are read alone."""
        from llmcompress.grids.inputs import InputGrid

        found = ALGORITHMS.get(_algorithm(module, config))
        if found is None or found.inputs is None or found.inputs.dynamic:
            return None if found is None or found.inputs is None else InputGrid(found.inputs)
        try:
            factor = scale_values(module, read(f"{module}.input_scale")).reshape(-1)
        except KeyError:
            return None
        if factor.numel() != 1 or not bool(factor > 0):
            raise CheckpointError(f"{module}.input_scale is not one positive number")
        return InputGrid(found.inputs, factor if found.inputs.group is None else 1 / factor)

    def decode(self, module: str, read: Reader, config: Config) -> "Coded | None":
        import torch

        try:
            scale = read(f"{module}.weight_scale")
        except KeyError:
            return None
        weight = read(f"{module}.weight")
        if weight.dtype != torch.uint8:
            powers, said = scale.dtype == torch.uint8, _algorithm(module, config)
            tile = _tile(said, tuple(weight.shape), tuple(scale.shape), powers)
            coded = read_float8(module, weight, scale, tile, one=said == "FP8")
            return _mxfp8(weight, scale) if powers and weight.shape[1] % _MX[1] == 0 else coded
        values = scale_values(module, scale)
        if scale.dtype == torch.uint8:
            return _mxfp4(weight, scale)
        factor = scale_values(module, read(f"{module}.weight_scale_2"))
        return _nvfp4(weight, values, factor)


def _named(entry: Entry, grid: Spec) -> str | None:
    """The algorithm of a matrix; None if there is none."""
    return next((name for name, how in ALGORITHMS.items() if (how.grid, how.inputs) == (grid, entry.inputs)), None)


def _scales(grid: Spec, rows: int, width: int) -> tuple[int, ...]:
    """The shape of scales F32 of a matrix [rows, width] of 8-bit floats."""
    if grid.joins_matrices:
        return ()
    return (rows,) if grid.tile is None else (-(-rows // grid.tile[0]), 1, grid.groups(width), 1)


def _algorithm(module: str, config: Config) -> str:
    """The algorithm that settings name for a module, empty where they name none."""
    settings = config.get("quantization_config", {})
    layers: Any = settings.get("quantized_layers")
    said = layers.get(module, {}) if isinstance(layers, Mapping) else settings
    return str(said.get("quant_algo") or "").upper()


def _tile(algorithm: str, shape: tuple[int, ...], scale: tuple[int, ...], bytes_: bool) -> Tile | None:
    """Rows and columns of the tiles that share a scale; None for one scale, or one a row. bytes_: powers of two."""
    if bytes_:
        return _MX
    whole = prod(scale) == 1 and algorithm != "FP8_PB_WO"
    return None if whole or scale in (shape[:1], (*shape[:1], 1)) else _BLOCK


def _nvfp4(weight: "Tensor", small: "Tensor", factor: "Tensor") -> "Coded":
    from llmcompress.grids.coded import Coded
    from llmcompress.grids.e2m1 import unpaired
    from llmcompress.grids.nvfp4 import FactoredGrid

    factor = factor.reshape(1)
    return Coded(unpaired(weight), FactoredGrid(Nvfp4Spec(), small, 1 / factor, factor))


def _mxfp4(weight: "Tensor", scale: "Tensor") -> "Coded":
    from llmcompress.grids.mxfp4 import GRID

    return GRID.unpacked(Mxfp4Spec(), {"weight_packed": weight, "weight_scale": scale})


def _mxfp8(weight: "Tensor", scale: "Tensor") -> "Coded":
    from llmcompress.grids.mxfp8 import GRID

    return GRID.unpacked(Mxfp8Spec(), {"weight": weight, "weight_scale": scale})


FORMAT = ModelOpt()
