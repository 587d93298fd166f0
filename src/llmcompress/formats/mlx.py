"""MLX checkpoints, as mlx-lm loads them on Apple's machines (mlx 0.32, mlx-lm 0.32).

A linear M with weight [out, in], codes of b bits in groups of g inputs, becomes

    M.weight  U32 [out, in*b/32]   row n: the codes of output n as a little-endian bit stream along `in`
    M.scales  [out, in/g]          in the model's type; U8 for MXFP4 and MXFP8, the exponent with a bias of 127, and for
                                   NVFP4, an E4M3 float
    M.biases  [out, in/g]          in the model's type; none for these three

    W[n, k] = scales[n, k/g] * q[n, k] + biases[n, k/g]

config.json says bits, group size and mode under `quantization`, and again under the name of a module that has others.
Integers without zero points lie here as well, with biases of -2^(b-1) scales; `symmetric` says so, which mlx-lm does
not look at. Rotations are said in the older spelling as well.

Experts are written one by one, and mlx-lm stacks them. What it writes itself is read too: B.switch_mlp.gate_proj, whose
tensors have an axis of experts before the others, stands for all B.experts.N.gate_proj (of Mixtral B.experts.N.w1).
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import Config, Entry, Reader, Specs
from llmcompress.formats.entry_checks import Refusal, grids, quantised, stored_scale, stored_type
from llmcompress.formats.packed_format import PackedFormat, Part, matrix_shape
from llmcompress.grids.base import Spec
from llmcompress.grids.integer import IntegerSpec
from llmcompress.grids.mxfp4 import Mxfp4Spec
from llmcompress.grids.mxfp8 import Mxfp8Spec
from llmcompress.grids.nvfp4_plain import PlainNvfp4Spec
from llmcompress.grids.offset import SIZES, OffsetSpec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded

_AFFINE = "affine"
_MODES: dict[str, Spec] = {"mxfp4": Mxfp4Spec(), "mxfp8": Mxfp8Spec(), "nvfp4": PlainNvfp4Spec()}  # without biases
_FLOATS = {spec.type: mode for mode, spec in _MODES.items()}
_STACKED = ".switch_mlp."  # in the name of the module that holds a matrix of all experts of a block
_NUMBERED = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
EXPERTS: Mapping[str, Mapping[str, str]] = {
    "mixtral": _NUMBERED,
    "olmoe": {},
    "phimoe": _NUMBERED,
    "qwen2_moe": {},
    "qwen3_moe": {},
}
"""Families whose experts mlx-lm stacks and changes nothing else: names of matrices that differ, its own and on disk."""


class MlxFormat(PackedFormat):
    """The checkpoint family of mlx-lm."""

    name = "mlx"
    head_codes = True
    embedding_codes = True
    summary = "integers of 2, 3, 4, 5, 6, 8 bits with offsets or symmetric, mxfp4, mxfp8, nvfp4-plain; read by mlx-lm"
    holds = ("int", "offset", *_FLOATS)
    marker = "scales"
    scale_name = "scales"
    keys = ("quantization_config", "quantization")
    quant_method = "mlx"
    required = ("weight", "scales")

    def refuses(self, entries: Sequence[Entry], config: Config) -> Refusal | None:
        if factored := next((entry for entry, grid in quantised(entries) if grid.type == "nvfp4"), None):
            return f"mlx has no factor of a matrix, as nvfp4 has ({factored.module})", "use --type nvfp4-plain"
        if refusal := super().refuses(entries, config):
            return refusal
        if len({grid.symmetric for _, grid in quantised(entries) if grid.type not in _FLOATS}) > 1:
            return (
                "an mlx checkpoint says once for all modules whether integers are symmetric",
                "use --type offset for all of them",
            )
        return None

    def misfit(self, entry: Entry, grid: Spec) -> Refusal | None:
        if grid.type == "int" and not grid.symmetric:
            return (
                f"format mlx has offsets and no zero points, as {grid.name} has ({entry.module})",
                "use --type offset, which is finer, or --sym",
            )
        if grid.type == "int" and grid.group_size not in SIZES:
            return (
                f"mlx has groups of {', '.join(map(str, sorted(SIZES)))}, not {grid.name} ({entry.module})",
                f"use --group-size {SIZES[0]}",
            )
        if entry.transposed:
            return (
                f"mlx-lm turns {entry.module} around when it loads it, and codes would not turn with it",
                "leave it in its source type, or use --format dense",
            )
        return None

    def parts(self, entry: Entry, grid: Spec) -> list[Part]:
        rows, width = entry.out_features, entry.in_features
        codes, groups = ("weight", "U32", (rows, width * grid.bits // 32)), (rows, grid.groups(width))
        if grid.type in _FLOATS:
            return [codes, ("scales", "U8", groups)]
        return [codes, ("scales", entry.source.dtype, groups), ("biases", entry.source.dtype, groups)]

    def packed(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        import torch

        from llmcompress.packing.bits import pack

        grid, spec = coded.grid, coded.grid.spec
        words = pack(coded.codes, spec.bits).contiguous().view(torch.uint32)
        if spec.type in _FLOATS:
            return {"weight": words, "scales": grid.packed(coded.codes)["weight_scale"].view(torch.uint8)}
        start = grid.offset if grid.offset is not None else -spec.middle * grid.scale
        stored = stored_scale(entry, coded, entry.source.dtype)
        return {"weight": words, "scales": stored, "biases": stored_type(entry, start, entry.source.dtype)}

    def config(self, entries: Sequence[Entry], config: Config) -> dict[str, dict[str, Any]]:
        files = super().config(entries, config)
        settings = files["config.json"]["quantization_config"]
        said = {key: value for key, value in settings.items() if key != "quant_method"}
        return {"config.json": {"quantization": said, "quantization_config": settings, **_older_spelling(config)}}

    def settings(self, entries: Sequence[Entry], config: Config) -> dict[str, Any]:
        coded, common = quantised(entries), grids(entries)[0]
        symmetric = {"symmetric": True} if any(grid.type == "int" for _, grid in coded) else {}
        own = {entry.module: _settings(grid) for entry, grid in coded if grid != common}
        return {**_settings(common), **symmetric, **own}

    def recognises(self, config: Config) -> bool:
        """Ours, and what mlx-lm writes, which names no method."""
        settings = config.get("quantization_config")
        said = isinstance(settings, Mapping) and "quant_method" not in settings
        return super().recognises(config) or (said and settings == config.get("quantization"))

    def shape(self, module: str, specs: Specs, read: Reader, config: Config) -> tuple[int, int] | None:
        words, scales = matrix_shape(specs, f"{module}.weight"), matrix_shape(specs, f"{module}.scales")
        if words is None or scales is None:
            return None
        return words[0], words[1] * 32 // _spec(module, config["quantization_config"]).bits

    def grid(self, module: str, config: Config) -> Spec | None:
        return _spec(module, config["quantization_config"])

    def experts(self, module: str, config: Config) -> str | None:
        block, stacked, leaf = module.rpartition(_STACKED)
        if not stacked:
            return None
        names = EXPERTS.get(str(config.get("model_type")))
        if names is None:
            raise CheckpointError(
                f"{module} holds experts as mlx-lm stacks them, which is read of {', '.join(EXPERTS)} alone",
                "start from the original model",
            )
        return f"{block}.experts.{{e}}.{names.get(leaf, leaf)}"

    def unpacked(self, module: str, tensors: "list[Tensor]", read: Reader, settings: Config) -> "Coded":
        import torch

        from llmcompress.grids.chosen_scales import BIAS
        from llmcompress.grids.coded import Coded
        from llmcompress.grids.grid_type import type_of
        from llmcompress.grids.scales import natural_groups
        from llmcompress.packing.bits import unpack

        words, scales = tensors
        spec = _spec(module, settings)
        width = words.shape[1] * 32 // spec.bits
        if words.dtype != torch.uint32 or tuple(scales.shape) != (words.shape[0], spec.groups(width)):
            raise CheckpointError(f"tensors of {module} do not have the shapes of {spec.name}")
        codes = unpack(words.view(torch.int32), spec.bits, width)
        if spec.type in _FLOATS:
            if scales.dtype != torch.uint8:
                raise CheckpointError(f"{module}.scales are no bytes, as those of {spec.name} are")
            parts = {"exponent": scales.to(torch.float32) - BIAS, "small": scales.view(torch.float8_e4m3fn)}
            grid = type_of(spec).restored(spec, width, parts)
            if not bool(grid.scale.isfinite().all()):
                raise CheckpointError(f"{module}.scales are not finite")
            return Coded(codes, grid)
        biases, scale = read(f"{module}.biases").to(torch.float32), scales.to(torch.float32)
        if biases.shape != scale.shape:
            raise CheckpointError(f"{module}.biases is not of the shape of its scales")
        if not spec.symmetric:
            return Coded(codes, type_of(spec).restored(spec, width, {"scale": scale, "start": biases}))
        if not torch.equal(biases, -spec.middle * scale):
            raise CheckpointError(f"{module}.biases are not those of symmetric integers, as config.json says")
        zero = torch.full_like(scale, float(spec.middle))
        parts = {"scale": scale, "zero": zero, "group_index": natural_groups(spec, width)}
        return Coded(codes, type_of(spec).restored(spec, width, parts))


def _older_spelling(config: Config) -> dict[str, Any]:
    """Rotations as transformers wrote them before version 5: mlx-lm knows this spelling, and has defaults without."""
    said = config.get("rope_parameters")
    if not isinstance(said, Mapping) or "rope_theta" not in said:
        return {}
    older = {key: said[key] for key in ("rope_theta", "partial_rotary_factor") if key in said}
    if said.get("rope_type", "default") != "default":
        older["rope_scaling"] = {key: value for key, value in said.items() if key != "rope_theta"}
    return {key: value for key, value in older.items() if config.get(key) is None}


def _settings(grid: Spec) -> dict[str, Any]:
    """What config.json says of a grid."""
    return {"group_size": grid.group_size, "bits": grid.bits, "mode": _FLOATS.get(grid.type, _AFFINE)}


def _spec(module: str, settings: Mapping[str, Any]) -> Spec:
    """The grid of one module: its own settings, else those of the stack that it lies in, else those of all."""
    own = settings.get(module, settings.get(_stack(module)))
    merged = {**settings, **(own if isinstance(own, Mapping) else {})}
    mode = merged.get("mode", _AFFINE)
    if mode in _MODES:
        return _MODES[mode]
    if mode != _AFFINE:
        raise CheckpointError(f"{module} has the mode {mode!r} of mlx, which is not read")
    bits, size = int(merged["bits"]), int(merged["group_size"])
    return IntegerSpec(bits, size) if merged.get("symmetric", False) else OffsetSpec(bits, size)


def _stack(module: str) -> str:
    """What mlx-lm calls the stack of a matrix of an expert; other names stay as they are."""
    found = re.fullmatch(r"(.*)\.experts\.[0-9]+\.(\w+)", module)
    stacks = {name: stack for stack, name in _NUMBERED.items()}
    return module if found is None else f"{found[1]}{_STACKED}{stacks.get(found[2], found[2])}"


FORMAT = MlxFormat()
