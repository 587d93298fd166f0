"""compressed-tensors checkpoints of the kind `pack-quantized`: packed integer weights, activations in 16 bits.

A linear M with weight [out, in] on an int-b grid with G groups becomes

    M.weight_packed      I32   [out, ceil(in*b/32)]   row n: codes + 2^(b-1) as a little-endian bit stream along `in`
    M.weight_scale       model [out, G]               in the type the weight had
    M.weight_shape       I64   [2]                    out, in
    M.weight_zero_point  I32   [ceil(out*b/32), G]    asymmetric only: zero points + 2^(b-1), a bit stream along `out`

The format speaks of signed codes and signed zero points; stored with their offset they are our unsigned ones.
Only widths that fill a word without straddling are written (2, 4, 8 bits): versions of the library up to 0.17 and from
0.18 on pack the others differently, and neither reads the other's. Groups in activation order are refused since 0.19.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmcompress.errors import CheckpointError
from llmcompress.formats import kv_cache
from llmcompress.formats.base import Entry, Reader, TensorSpec
from llmcompress.formats.checks import (
    Refusal,
    common_refusal,
    integer_grid,
    left_alone,
    quantised,
    stored_scale,
)
from llmcompress.grids.base import PER_ROW, GridSpec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded

BITS = (2, 4, 8)
KIND = "pack-quantized"
SCHEMA = "0.19.0"  # informational: the version of the library whose schema the config follows


class CompressedTensors:
    """What llm-compressor writes and vLLM prefers; implements `Format`."""

    name = "compressed-tensors"
    summary = "2, 4, 8 bits; read by vLLM, SGLang, transformers and llama.cpp's converter"
    marker = "weight_packed"

    def refuses(self, entries: Sequence[Entry], config: Mapping[str, Any]) -> Refusal | None:
        if refusal := common_refusal(self.name, entries, config):
            return refusal
        for entry, grid in quantised(entries):
            if grid.bits not in BITS:
                return (
                    f"format compressed-tensors cannot hold {grid.name} ({entry.module})",
                    "it holds 2, 4 and 8 bits, --format gptq also 3, --format dense every grid",
                )
            if entry.permuted:
                return (
                    f"compressed-tensors no longer knows groups in activation order ({entry.module})",
                    "use static groups, or --format gptq",
                )
            if entry.transposed:
                return (
                    f"{entry.module} is a Conv1D, which no reader of compressed-tensors quantises",
                    "use --format gptq or dense",
                )
            if entry.source.dtype not in ("F16", "BF16", "F32"):
                return (
                    f"{entry.source.name} is stored as {entry.source.dtype}, which cannot hold scales",
                    "convert the model to float16 or bfloat16 first",
                )
        return None

    def layout(self, entry: Entry) -> list[TensorSpec]:
        if entry.grid is None:
            return [entry.source]
        width, rows, bits = entry.in_features, entry.out_features, entry.grid.bits
        groups = entry.grid.groups(width)
        specs = [
            TensorSpec(f"{entry.module}.weight_packed", "I32", (rows, _words(width, bits))),
            TensorSpec(f"{entry.module}.weight_scale", entry.source.dtype, (rows, groups)),
            TensorSpec(f"{entry.module}.weight_shape", "I64", (2,)),
        ]
        if not entry.grid.symmetric:  # next to symmetric weights vLLM takes it for a stray tensor
            specs.append(TensorSpec(f"{entry.module}.weight_zero_point", "I32", (_words(rows, bits), groups)))
        return specs

    def encode(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        import torch

        from llmcompress.packing.bits import pack

        grid, bits = integer_grid(entry, coded), coded.grid.spec.bits
        tensors = {
            f"{entry.module}.weight_packed": pack(coded.codes, bits),
            f"{entry.module}.weight_scale": stored_scale(entry, coded, entry.source.dtype).contiguous(),
            f"{entry.module}.weight_shape": torch.tensor([entry.out_features, entry.in_features], dtype=torch.int64),
        }
        if not grid.spec.symmetric:
            packed = pack(grid.zero.t().to(torch.int64), bits)
            tensors[f"{entry.module}.weight_zero_point"] = packed.t().contiguous()
        return tensors

    def config(self, entries: Sequence[Entry], config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        schemes: dict[tuple[GridSpec, str | None], list[str]] = {}
        for entry, grid in quantised(entries):
            # the library knows an order only together with groups
            ordered = entry.options.get("act_order", False) and grid.group_size != PER_ROW
            schemes.setdefault((grid, "weight" if ordered else None), []).append(entry.module)
        groups = {
            f"group_{number}": {
                "targets": ["Linear"] if len(schemes) == 1 else modules,
                "format": KIND,
                "weights": _weights(grid, order),
                "input_activations": None,
                "output_activations": None,
            }
            for number, ((grid, order), modules) in enumerate(schemes.items())
        }
        ignored = [entry.module for entry in left_alone(entries)]
        # loaders see a Linear in every head, also in a tied one that has no tensor, and would wait for its codes;
        # transformers calls the head of every family lm_head
        if all(entry.block for entry, _ in quantised(entries)):
            heads = ["embed_out", "lm_head"] if config.get("model_type") == "gpt_neox" else ["lm_head"]
            ignored += [name for name in heads if name not in ignored]
        code = kv_cache.code_of(entries)
        settings = {
            "quant_method": "compressed-tensors",
            "format": KIND,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ignored,
            "kv_cache_scheme": None if code is None else kv_cache.scheme(code),
            "global_compression_ratio": None,
            "sparsity_config": {},
            "transform_config": {},
            "version": SCHEMA,
        }
        return {"config.json": {"quantization_config": settings}}

    def recognises(self, config: Mapping[str, Any]) -> bool:
        settings = config.get("quantization_config")
        return (
            isinstance(settings, Mapping)
            and settings.get("quant_method") == "compressed-tensors"
            and settings.get("format") == KIND
        )

    def shape(
        self, module: str, specs: Mapping[str, TensorSpec], read: Reader, config: Mapping[str, Any]
    ) -> tuple[int, int] | None:
        if f"{module}.weight_packed" not in specs:
            return None
        if f"{module}.weight_g_idx" in specs:
            raise CheckpointError(
                f"{module} has groups in activation order, which are read from gptq checkpoints alone"
            )
        stored = specs.get(f"{module}.weight_shape")
        if stored is None or stored.shape != (2,):
            raise CheckpointError(f"{module}.weight_shape does not hold the two extents of a matrix")
        rows, width = (int(extent) for extent in read(f"{module}.weight_shape"))
        return rows, width

    def decode(self, module: str, read: Reader, config: Mapping[str, Any]) -> "Coded | None":
        import torch

        from llmcompress.grids.coded import Coded
        from llmcompress.grids.integer import IntegerGrid, natural_groups
        from llmcompress.packing.bits import unpack

        try:
            words, scale, shape = (read(f"{module}.weight_{part}") for part in ("packed", "scale", "shape"))
        except KeyError:
            return None
        spec = _spec(module, config["quantization_config"])
        rows, width = (int(extent) for extent in shape)
        groups = spec.groups(width)
        if tuple(words.shape) != (rows, _words(width, spec.bits)) or tuple(scale.shape) != (rows, groups):
            raise CheckpointError(f"tensors of {module} do not have the shapes of {spec.name}")
        zero = torch.full((rows, groups), float(spec.middle))
        if not spec.symmetric:
            packed = read(f"{module}.weight_zero_point")
            if tuple(packed.shape) != (_words(rows, spec.bits), groups):
                raise CheckpointError(f"zero points of {module} do not have the shape of {spec.name}")
            zero = unpack(packed.t().contiguous(), spec.bits, rows).t().to(torch.float32).contiguous()
        grid = IntegerGrid(spec, scale.to(torch.float32), zero, natural_groups(spec, width))
        return Coded(unpack(words, spec.bits, width), grid)


def _words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def _weights(grid: GridSpec, order: str | None) -> dict[str, Any]:
    """QuantizationArgs; the library refuses keys it does not know."""
    per_row = grid.group_size == PER_ROW
    return {
        "num_bits": grid.bits,
        "type": "int",
        "symmetric": grid.symmetric,
        "strategy": "channel" if per_row else "group",
        "group_size": None if per_row else grid.group_size,
        "dynamic": False,
        "actorder": order,
    }


def _spec(module: str, settings: Mapping[str, Any]) -> GridSpec:
    """The grid of one module: a target that names it, else a pattern that matches, else the class Linear."""

    def rank(target: str) -> int:
        if target == module:
            return 0
        if target.startswith("re:"):
            return 1 if re.match(target[3:], module) else 3
        return 2 if target == "Linear" else 3

    ranked: list[tuple[int, Mapping[str, Any]]] = [
        (rank(target), scheme["weights"])
        for scheme in settings["config_groups"].values()
        for target in scheme["targets"]
        if scheme.get("weights")
    ]
    best = min(ranked, key=lambda pair: pair[0], default=(3, {}))
    if best[0] == 3:
        raise CheckpointError(f"no config group of quantization_config names {module}, which is quantised")
    weights = best[1]
    if weights.get("type", "int") != "int" or weights.get("strategy") not in ("group", "channel"):
        raise CheckpointError(f"{module} is stored in a scheme other than packed integers by group or channel")
    size = weights["group_size"] if weights["strategy"] == "group" else PER_ROW
    return GridSpec(int(weights["num_bits"]), int(size), bool(weights.get("symmetric", True)))


FORMAT = CompressedTensors()
