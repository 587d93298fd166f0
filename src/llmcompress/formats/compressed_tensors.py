"""compressed-tensors checkpoints: codes packed into words, or one a byte where inputs are rounded as well.

A linear M with weight [out, in] on an int-b grid with G groups becomes, packed (`pack-quantized`),

    M.weight_packed      I32   [out, ceil(in*b/32)]   row n: codes + 2^(b-1) as a little-endian bit stream along `in`
    M.weight_scale       model [out, G]               in the type the weight had
    M.weight_shape       I64   [2]                    out, in
    M.weight_zero_point  I32   [ceil(out*b/32), G]    asymmetric only: zero points + 2^(b-1), a bit stream along `out`

and with one scale per row, of 8 bits and with rounded inputs (`int-quantized`), or as floats (`float-quantized`),

    M.weight             I8 or F8_E4M3 [out, in]      signed codes
    M.weight_scale       model [out, 1], [1] for the matrix, or [ceil(out/128), ceil(in/128)] for blocks
    M.input_scale        model [1]                    in any kind, where inputs are rounded with a fixed scale
    M.input_global_scale F32   [1]                    of NVFP4, where inputs are: a divisor, as weight_global_scale is

The format speaks of signed codes and signed zero points; packed with their offset they are our unsigned ones.
Only widths that fill a word without straddling are written (2, 4, 8 bits): versions of the library up to 0.17 and from
0.18 on pack the others differently, and neither reads the other's. Groups in activation order are refused since 0.19.
Weights of 8 bits without rounded inputs are packed, since engines refuse them unpacked.

Read are also checkpoints of others: groups in activation order (M.weight_g_idx), 8-bit floats by blocks or groups, and
codes a byte by groups and with zero points.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmcompress.errors import CheckpointError
from llmcompress.formats import kv_cache
from llmcompress.formats.base import FLOAT_TYPES, Config, Entry, Reader, Specs
from llmcompress.formats.entry_checks import HEADS, Refusal, experts_of, left_alone, quantised, stored_type
from llmcompress.formats.float8_tensors import float8_shape, read_float8
from llmcompress.formats.packed_format import PackedFormat, Part, matrix_shape, stored_extents
from llmcompress.formats.scheme_tensors import (
    byte_tensors,
    check_shapes,
    packed_tensors,
    read_bytes,
    read_packed,
    words_for,
)
from llmcompress.formats.schemes import (
    FLOATS,
    HOLDS,
    MIXED,
    PACKED,
    READ,
    grid_of,
    input_part,
    inputs_of,
    inputs_said,
    kind,
    reordered,
    scale_shape,
    scale_type,
    unholdable,
    weights_said,
)
from llmcompress.grids.base import PER_ROW, InputSpec, Spec
from llmcompress.grids.grid_type import type_of

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.inputs import InputGrid

SCHEMA = "0.19.0"  # informational: the version of the library whose schema the config follows
_EXPERTS = r"re:.*\.experts\.\d+\..*"  # the modules of which `experts_of` knows the list


class CompressedTensors(PackedFormat):
    """What llm-compressor writes and vLLM prefers."""

    name = "compressed-tensors"
    head_codes = True
    summary = (
        "2, 3, 4, 5, 6, 8 bits, fp8, fp4, also with rounded inputs; "
        "read by vLLM, SGLang, transformers and llama.cpp's converter"
    )
    holds = HOLDS
    marker = "weight_scale"
    affine = True
    quant_method = "compressed-tensors"
    required = ("weight_scale",)
    tells_inputs = True

    def misfit(self, entry: Entry, grid: Spec) -> Refusal | None:
        if refusal := unholdable(entry, grid):
            return refusal
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
        if entry.source.dtype not in FLOAT_TYPES:
            return (
                f"{entry.source.name} is stored as {entry.source.dtype}, which cannot hold scales",
                "convert the model to float16 or bfloat16 first",
            )
        return None

    def parts(self, entry: Entry, grid: Spec) -> list[Part]:
        width, rows, bits = entry.in_features, entry.out_features, grid.bits
        fixed = input_part(entry.inputs, scale_type(entry))
        inputs: list[Part] = [] if fixed is None else [(*fixed, (1,))]
        if own := grid.parts(rows, width):
            return [*((name, *about) for name, about in own.items()), *inputs]
        groups, how = grid.groups(width), kind(grid, entry.inputs)
        scale: Part = ("weight_scale", scale_type(entry), scale_shape(grid, rows, width))
        if how == PACKED:
            parts = [("weight_packed", "I32", (rows, words_for(width, bits))), scale, ("weight_shape", "I64", (2,))]
        else:
            parts = [("weight", "F8_E4M3" if how == FLOATS else "I8", (rows, width)), scale]
        if not grid.symmetric:  # next to symmetric weights vLLM takes it for a stray tensor
            parts.append(("weight_zero_point", "I32", (words_for(rows, bits), groups)))
        return parts + inputs

    def packed(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        how = kind(coded.grid.spec, entry.inputs)
        if HOLDS[coded.grid.spec.type].own:
            tensors = coded.grid.packed(coded.codes)
        else:
            tensors = packed_tensors(entry, coded) if how == PACKED else byte_tensors(entry, coded, how)
        fixed = input_part(entry.inputs, scale_type(entry))
        if coded.input_scale is not None and fixed is not None:
            tensors[fixed[0]] = stored_type(entry, coded.input_scale, fixed[1])
        return tensors

    def settings(self, entries: Sequence[Entry], config: Config) -> dict[str, Any]:
        schemes: dict[tuple[Spec, str | None, InputSpec | None], list[str]] = {}
        for entry, grid in quantised(entries):
            # the library knows an order only together with groups
            ordered = entry.options.get("act_order", False) and grid.group_size != PER_ROW
            schemes.setdefault((grid, "weight" if ordered else None, entry.inputs), []).extend(entry.names)
        targets = _targets(list(schemes.values()))
        groups = {
            f"group_{number}": {
                "targets": targets[number],
                "format": kind(grid, inputs),
                "weights": weights_said(grid, order),
                "input_activations": inputs_said(inputs),
                "output_activations": None,
            }
            for number, (grid, order, inputs) in enumerate(schemes)
        }
        kinds = {group["format"] for group in groups.values()}
        ignored = [name for entry in left_alone(entries) for name in entry.names]
        # loaders see a Linear in every head, also in a tied one that has no tensor, and would wait for its codes;
        # transformers calls the head of every family lm_head
        if all(entry.block for entry, _ in quantised(entries)):
            heads = ["embed_out", "lm_head"] if config.get("model_type") == "gpt_neox" else ["lm_head"]
            ignored += [name for name in heads if name not in ignored]
        code = kv_cache.code_of(entries)
        return {
            "format": kinds.pop() if len(kinds) == 1 else MIXED,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ignored,
            "kv_cache_scheme": None if code is None else kv_cache.scheme(code),
            "global_compression_ratio": None,
            "sparsity_config": {},
            "transform_config": {},
            "version": SCHEMA,
        }

    def recognises(self, config: Config) -> bool:
        return super().recognises(config) and config["quantization_config"].get("format") in READ

    def shape(self, module: str, specs: Specs, read: Reader, config: Config) -> tuple[int, int] | None:
        spec = grid_of(module, config["quantization_config"])
        words = specs.get(f"{module}.weight_packed")
        if words is None:
            plain = specs.get(f"{module}.weight")
            if plain is None or plain.dtype not in ("I8", "F8_E4M3"):
                return None
            if not (spec.affine or spec.parts(1, 1)):
                return float8_shape(module, specs, "weight_scale", spec.tile)
            shape = matrix_shape(specs, f"{module}.weight")
        elif words.dtype == "U8":  # bytes of a grid of its own: no row is filled up
            shape = words.shape[0], words.shape[1] * 8 // spec.bits
        else:
            shape = stored_extents(module, specs, read)
        if shape is not None:
            check_shapes(module, spec, shape, specs)
        return shape

    def grid(self, module: str, config: Config) -> Spec | None:
        settings = config["quantization_config"]
        return None if reordered(module, settings) else grid_of(module, settings)

    def unpacked(self, module: str, tensors: "list[Tensor]", read: Reader, settings: Config) -> "Coded":
        def part(name: str) -> "Tensor | None":
            try:
                return read(f"{module}.{name}")
            except KeyError:
                return None

        (scale,), spec = tensors, grid_of(module, settings)
        if own := spec.parts(1, 1):
            coded = type_of(spec).unpacked(spec, {name: read(f"{module}.{name}") for name in own})
            if not bool(coded.grid.scale.isfinite().all()):
                raise CheckpointError(f"{module} has scales that are not finite")
            return coded
        if not spec.affine:
            return read_float8(module, read(f"{module}.weight"), scale, spec.tile, one=spec.joins_matrices)
        points = None if spec.symmetric else read(f"{module}.weight_zero_point")
        words = part("weight_packed")
        if words is None:
            return read_bytes(module, spec, read(f"{module}.weight"), scale, points)
        rows, width = (int(extent) for extent in read(f"{module}.weight_shape"))
        return read_packed(module, spec, (rows, width), words, scale, points, part("weight_g_idx"))

    def inputs(self, module: str, read: Reader, config: Config) -> "InputGrid | None":
        import torch

        from llmcompress.grids.inputs import InputGrid

        spec = inputs_of(module, config["quantization_config"])
        if spec is None or spec.dynamic:
            return None if spec is None else InputGrid(spec)
        name = "input_scale" if spec.group is None else "input_global_scale"
        scale = read(f"{module}.{name}").to(torch.float32).reshape(-1)
        if scale.numel() != 1 or not bool(scale.isfinite().all() and (scale > 0).all()):
            raise CheckpointError(f"{module}.{name} is not one positive number")
        return InputGrid(spec, scale)


def _targets(groups: list[list[str]]) -> list[list[str]]:
    """What config groups name, by the modules of each.

    Experts that are all of one group are named by a pattern, by which alone transformers finds their scheme. A head is
    always named: vLLM does not take it for a Linear.
    """
    if len(groups) == 1:
        return [["Linear", *(name for name in groups[0] if name.rpartition(".")[2] in HEADS)]]
    if sum(any(map(experts_of, modules)) for modules in groups) != 1:
        return groups
    return [list(dict.fromkeys(_EXPERTS if experts_of(name) else name for name in modules)) for modules in groups]


FORMAT = CompressedTensors()
