"""compressed-tensors checkpoints: codes packed into words, or one a byte where inputs are rounded as well.

A linear M with weight [out, in] on an int-b grid with G groups becomes, packed (`pack-quantized`),

    M.weight_packed      I32   [out, ceil(in*b/32)]   row n: codes + 2^(b-1) as a little-endian bit stream along `in`
    M.weight_scale       model [out, G]               in the type the weight had
    M.weight_shape       I64   [2]                    out, in
    M.weight_zero_point  I32   [ceil(out*b/32), G]    asymmetric only: zero points + 2^(b-1), a bit stream along `out`

and with one scale per row, of 8 bits and with rounded inputs (`int-quantized`), or as floats (`float-quantized`),

    M.weight             I8 or F8_E4M3 [out, in]      signed codes
    M.weight_scale       model [out, 1]
    M.input_scale        model [1]                    in any kind, where inputs are rounded with a fixed scale

The format speaks of signed codes and signed zero points; packed with their offset they are our unsigned ones.
Only widths that fill a word without straddling are written (2, 4, 8 bits): versions of the library up to 0.17 and from
0.18 on pack the others differently, and neither reads the other's. Groups in activation order are refused since 0.19.
Weights of 8 bits without rounded inputs are packed, since engines refuse them unpacked.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmcompress.errors import CheckpointError
from llmcompress.formats import kv_cache
from llmcompress.formats.base import FLOAT_TYPES, Entry, Reader, TensorSpec
from llmcompress.formats.entry_checks import (
    Refusal,
    check_codes,
    common_refusal,
    left_alone,
    quantised,
    stored_type,
)
from llmcompress.formats.scheme_tensors import byte_tensors, packed_tensors, read_bytes, read_packed, words_for
from llmcompress.formats.schemes import (
    FLOATS,
    HOLDS,
    MIXED,
    PACKED,
    READ,
    grid_of,
    inputs_of,
    inputs_said,
    kind,
    unholdable,
    weights_said,
)
from llmcompress.grids.base import PER_ROW, InputSpec, Spec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.inputs import InputGrid

BITS = (2, 4, 8)
SCHEMA = "0.19.0"  # informational: the version of the library whose schema the config follows


class CompressedTensors:
    """What llm-compressor writes and vLLM prefers; implements `Format`."""

    name = "compressed-tensors"
    summary = (
        "2, 4, 8 bits and fp8, also with rounded inputs; read by vLLM, SGLang, transformers and llama.cpp's converter"
    )
    holds = HOLDS
    marker = "weight_scale"

    def refuses(self, entries: Sequence[Entry], config: Mapping[str, Any]) -> Refusal | None:
        if refusal := common_refusal(self.name, entries, config, self.holds):
            return refusal
        for entry, grid in quantised(entries):
            if grid.bits not in BITS:
                return (
                    f"format compressed-tensors cannot hold {grid.name} ({entry.module})",
                    "it holds 2, 4 and 8 bits, --format gptq also 3, --format dense every grid",
                )
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

    def layout(self, entry: Entry) -> list[TensorSpec]:
        if entry.grid is None:
            return [entry.source]
        width, rows, bits = entry.in_features, entry.out_features, entry.grid.bits
        groups, how = entry.grid.groups(width), kind(entry.grid, entry.inputs)
        scale = TensorSpec(f"{entry.module}.weight_scale", entry.source.dtype, (rows, groups))
        if how == PACKED:
            packed = TensorSpec(f"{entry.module}.weight_packed", "I32", (rows, words_for(width, bits)))
            specs = [packed, scale, TensorSpec(f"{entry.module}.weight_shape", "I64", (2,))]
        else:
            stored = "F8_E4M3" if how == FLOATS else "I8"
            specs = [TensorSpec(f"{entry.module}.weight", stored, (rows, width)), scale]
        if not entry.grid.symmetric:  # next to symmetric weights vLLM takes it for a stray tensor
            specs.append(TensorSpec(f"{entry.module}.weight_zero_point", "I32", (words_for(rows, bits), groups)))
        if entry.inputs is not None and not entry.inputs.dynamic:
            specs.append(TensorSpec(f"{entry.module}.input_scale", entry.source.dtype, (1,)))
        return specs

    def encode(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        check_codes(entry, coded)
        how = kind(coded.grid.spec, entry.inputs)
        tensors = packed_tensors(entry, coded) if how == PACKED else byte_tensors(entry, coded, how)
        if coded.input_scale is not None:
            scale = stored_type(entry, coded.input_scale, entry.source.dtype)
            tensors[f"{entry.module}.input_scale"] = scale
        return tensors

    def config(self, entries: Sequence[Entry], config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        schemes: dict[tuple[Spec, str | None, InputSpec | None], list[str]] = {}
        for entry, grid in quantised(entries):
            # the library knows an order only together with groups
            ordered = entry.options.get("act_order", False) and grid.group_size != PER_ROW
            schemes.setdefault((grid, "weight" if ordered else None, entry.inputs), []).append(entry.module)
        groups = {
            f"group_{number}": {
                "targets": ["Linear"] if len(schemes) == 1 else modules,
                "format": kind(grid, inputs),
                "weights": weights_said(grid, order),
                "input_activations": inputs_said(inputs),
                "output_activations": None,
            }
            for number, ((grid, order, inputs), modules) in enumerate(schemes.items())
        }
        kinds = {group["format"] for group in groups.values()}
        ignored = [entry.module for entry in left_alone(entries)]
        # loaders see a Linear in every head, also in a tied one that has no tensor, and would wait for its codes;
        # transformers calls the head of every family lm_head
        if all(entry.block for entry, _ in quantised(entries)):
            heads = ["embed_out", "lm_head"] if config.get("model_type") == "gpt_neox" else ["lm_head"]
            ignored += [name for name in heads if name not in ignored]
        code = kv_cache.code_of(entries)
        settings = {
            "quant_method": "compressed-tensors",
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
        return {"config.json": {"quantization_config": settings}}

    def recognises(self, config: Mapping[str, Any]) -> bool:
        settings = config.get("quantization_config")
        return (
            isinstance(settings, Mapping)
            and settings.get("quant_method") == "compressed-tensors"
            and settings.get("format") in READ
        )

    def shape(
        self, module: str, specs: Mapping[str, TensorSpec], read: Reader, config: Mapping[str, Any]
    ) -> tuple[int, int] | None:
        if f"{module}.weight_packed" not in specs:
            plain = specs.get(f"{module}.weight")
            fits = plain is not None and plain.dtype in ("I8", "F8_E4M3") and len(plain.shape) == 2
            return (plain.shape[0], plain.shape[1]) if plain is not None and fits else None
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
        try:
            scale = read(f"{module}.weight_scale")
        except KeyError:
            return None
        spec = grid_of(module, config["quantization_config"])
        try:
            words, shape = read(f"{module}.weight_packed"), read(f"{module}.weight_shape")
        except KeyError:
            return read_bytes(module, spec, read(f"{module}.weight"), scale)
        rows, width = (int(extent) for extent in shape)
        points = None if spec.symmetric else read(f"{module}.weight_zero_point")
        return read_packed(module, spec, (rows, width), words, scale, points)

    def inputs(self, module: str, read: Reader, config: Mapping[str, Any]) -> "InputGrid | None":
        import torch

        from llmcompress.grids.inputs import InputGrid

        spec = inputs_of(module, config["quantization_config"])
        if spec is None or spec.dynamic:
            return None if spec is None else InputGrid(spec)
        scale = read(f"{module}.input_scale").to(torch.float32).reshape(-1)
        if scale.numel() != 1 or not bool(scale.isfinite().all() and (scale > 0).all()):
            raise CheckpointError(f"{module}.input_scale is not one positive number")
        return InputGrid(spec, scale)


FORMAT = CompressedTensors()
