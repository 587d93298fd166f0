"""bitsandbytes checkpoints, as transformers reads them: NF4 in blocks of 64, or LLM.int8().

A linear M with weight [out, in] on NF4 becomes

    M.weight                                 U8   [out*in/2, 1]  codes along `in`, the first of two in the high bits
    M.weight.absmax                          F32  [out*in/64]    U8 if quantised in its turn
    M.weight.quant_map                       F32  [16]           the levels
    M.weight.nested_absmax                   F32  [blocks/256]   doubly quantised only, rounded up
    M.weight.nested_quant_map                F32  [256]          likewise: the values of absmax's codes
    M.weight.quant_state.bitsandbytes__nf4   U8   [bytes]        JSON: shape, types, sizes of blocks, offset of absmax

and by LLM.int8()

    M.weight         I8   [out, in]   W = code * SCB / 127
    M.SCB            F32  [out]
    M.weight_format  U8   []          0: rows

Blocks are counted through the whole matrix. Ours lie within rows, so 64 must divide `in`; others' are read in any size,
and FP4 beside NF4.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import Config, Entry, Reader, Specs
from llmcompress.formats.bitsandbytes_tensors import (
    TYPES,
    Int8Tensors,
    Nf4Tensors,
    Tensors,
    decode_4bit,
    decode_int8,
    read_state,
)
from llmcompress.formats.entry_checks import Refusal, left_alone
from llmcompress.formats.packed_format import PackedFormat, Part
from llmcompress.grids.base import Spec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.inputs import Rounding


class BitsAndBytes(PackedFormat):
    """What `load_in_4bit` and `load_in_8bit` of transformers save."""

    name = "bitsandbytes"
    summary = "nf4 and int8; read by transformers with bitsandbytes"
    holds: Mapping[str, Tensors] = {"nf4": Nf4Tensors(), "int8": Int8Tensors()}
    marker = ("weight.absmax", "SCB")
    quant_method = "bitsandbytes"

    def refuses(self, entries: Sequence[Entry], config: Config) -> Refusal | None:
        if refusal := super().refuses(entries, config):
            return refusal
        grids = {entry.grid for entry in entries if entry.grid is not None}
        if len(grids) > 1:
            names = " and ".join(sorted({grid.name for grid in grids}))
            return f"a bitsandbytes checkpoint has one type as a whole, not {names}", "use one type for all modules"
        return None

    def misfit(self, entry: Entry, grid: Spec) -> Refusal | None:
        if grid.outliers:
            return (
                f"bitsandbytes finds outliers at run time and stores none ({entry.module})",
                "leave --outliers out, or use --format int8-outliers",
            )
        if entry.transposed:
            return f"{entry.module} is a Conv1D, whose codes bitsandbytes does not read back", "use --format dense"
        if entry.source.dtype not in TYPES:
            return (
                f"{entry.source.name} is stored as {entry.source.dtype}, in which bitsandbytes computes nothing",
                "convert the model to float16 or bfloat16 first",
            )
        if not entry.block:
            return f"{entry.module} is a head, which loaders leave unquantised", "leave it in its source type"
        return None

    def parts(self, entry: Entry, grid: Spec) -> list[Part]:
        return self.holds[grid.type].parts(entry)

    def packed(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        return self.holds[coded.grid.spec.type].packed(entry, coded)

    def settings(self, entries: Sequence[Entry], config: Config) -> dict[str, Any]:
        coded = [entry for entry in entries if entry.grid is not None]
        skipped = [name for entry in left_alone(entries) for name in entry.names]
        heads = ["embed_out", "lm_head"] if config.get("model_type") == "gpt_neox" else ["lm_head"]
        skipped += [name for name in heads if name not in skipped]  # also a tied one, which has no tensor
        own = {} if coded[0].grid is None else self.holds[coded[0].grid.type].settings(coded[0])
        settings: dict[str, Any] = {
            "load_in_4bit": bool(own),
            "load_in_8bit": not own,
            "llm_int8_threshold": 6.0,
            "llm_int8_skip_modules": skipped,
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
        }
        return settings | own

    def shape(self, module: str, specs: Specs, read: Reader, config: Config) -> tuple[int, int] | None:
        weight = specs.get(f"{module}.weight")
        if weight is None:
            return None
        if f"{module}.SCB" in specs:
            return (weight.shape[0], weight.shape[1]) if len(weight.shape) == 2 else None

        def held(name: str) -> "Tensor":
            return read(specs[name].name)

        rows, width = (int(extent) for extent in read_state(module, held)["shape"])
        if 2 * weight.nbytes != rows * width:
            raise CheckpointError(f"{module}.weight does not hold {rows} x {width} codes")
        return rows, width

    def decode(self, module: str, read: Reader, config: Config) -> "Coded | None":
        def part(name: str) -> "Tensor | None":
            try:
                return read(f"{module}.{name}")
            except KeyError:
                return None

        if (scales := part("SCB")) is not None:
            return decode_int8(module, read(f"{module}.weight"), scales)
        if (absmax := part("weight.absmax")) is not None:
            return decode_4bit(module, read, absmax)
        return None

    def inputs(self, module: str, read: Reader, config: Config) -> "Rounding | None":
        from llmcompress.grids.int8_inputs import ByThreshold

        settings = config["quantization_config"]
        return ByThreshold(float(settings.get("llm_int8_threshold", 6.0))) if settings.get("load_in_8bit") else None


FORMAT = BitsAndBytes()
