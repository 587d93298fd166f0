"""Tensors of bitsandbytes (`bitsandbytes`): how each grid is stored, and matrices read back."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from llmcompress.errors import CheckpointError, RunError
from llmcompress.formats.base import Entry, Reader
from llmcompress.formats.packed_format import Part
from llmcompress.grids.int8 import Int8Spec
from llmcompress.grids.nf4 import Nf4Spec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.int8 import Int8Grid
    from llmcompress.grids.nf4 import Nf4Grid

STATE = "quant_state.bitsandbytes__nf4"
TYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_OFFSET_DIGITS = 26  # what a number takes in JSON at most; the rest of it is spaces, so that sizes are known beforehand


class Tensors(Protocol):
    """How matrices on one grid are stored; names are those behind the module's."""

    def parts(self, entry: Entry) -> list[Part]:
        """The tensors of a matrix."""

    def packed(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        """Those tensors, by name."""

    def settings(self, entry: Entry) -> dict[str, Any]:
        """What config.json says about 4 bits; nothing for 8."""


class Int8Tensors:
    """Rows of LLM.int8()."""

    def parts(self, entry: Entry) -> list[Part]:
        rows, width = entry.out_features, entry.in_features
        return [("weight", "I8", (rows, width)), ("SCB", "F32", (rows,)), ("weight_format", "U8", ())]

    def packed(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        import torch

        grid = cast("Int8Grid", coded.grid)
        return {
            "weight": (coded.codes.to(torch.int16) - grid.spec.middle).to(torch.int8),
            "SCB": grid.absmax[:, 0],
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }

    def settings(self, entry: Entry) -> dict[str, Any]:
        return {}


class Nf4Tensors:
    """NF4, its absmax as it is or quantised again."""

    def parts(self, entry: Entry) -> list[Part]:
        grid, rows, width = cast("Nf4Spec", entry.grid), entry.out_features, entry.in_features
        blocks = rows * grid.groups(width)
        parts: list[Part] = [
            ("weight", "U8", (rows * width // 2, 1)),
            ("weight.absmax", "U8" if grid.double else "F32", (blocks,)),
            ("weight.quant_map", "F32", (grid.levels,)),
        ]
        if grid.double:
            parts.append(("weight.nested_absmax", "F32", (-(-blocks // grid.nested),)))
            parts.append(("weight.nested_quant_map", "F32", (256,)))
        return [*parts, (f"weight.{STATE}", "U8", (len(packed_state(entry, 0.0)),))]

    def packed(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        import torch

        from llmcompress.grids.nf4 import dynamic_map

        grid, pairs, offset = cast("Nf4Grid", coded.grid), coded.codes.reshape(-1, 2), 0.0
        tensors = {"weight": (pairs[:, :1] << 4) | pairs[:, 1:]}
        if grid.code is None:
            tensors |= {"weight.absmax": grid.absmax.reshape(-1), "weight.quant_map": grid.table}
        else:
            nested, offset = nested_absmax(entry, grid)
            tensors |= {"weight.absmax": grid.code.reshape(-1), "weight.quant_map": grid.table}
            tensors |= {"weight.nested_absmax": nested, "weight.nested_quant_map": dynamic_map().clone()}
        return tensors | {f"weight.{STATE}": torch.tensor(list(packed_state(entry, offset)), dtype=torch.uint8)}

    def settings(self, entry: Entry) -> dict[str, Any]:
        return {
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": cast("Nf4Spec", entry.grid).double,
            "bnb_4bit_compute_dtype": TYPES[entry.source.dtype],
            "bnb_4bit_quant_storage": "uint8",
        }


def packed_state(entry: Entry, offset: float) -> bytes:
    """What bitsandbytes calls the packed state: JSON, filled up with spaces to the same length for any offset."""
    grid = cast("Nf4Spec", entry.grid)
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": grid.group_size,
        "dtype": TYPES[entry.source.dtype],
        "shape": [entry.out_features, entry.in_features],
    }
    if not grid.double:
        return json.dumps(state).encode()
    state |= {"nested_blocksize": grid.nested, "nested_dtype": "float32", "nested_offset": offset}
    spare = _OFFSET_DIGITS - len(json.dumps(offset))
    return (json.dumps(state) + " " * spare).encode()


def nested_absmax(entry: Entry, grid: "Nf4Grid") -> "tuple[Tensor, float]":
    """nested_absmax and the offset of a whole matrix; RunError if they are not the same throughout it."""
    import torch

    assert grid.nested is not None
    assert grid.common is not None
    flat = grid.nested.reshape(-1)
    nested = flat[torch.arange(0, flat.numel(), grid.spec.nested, device=flat.device)]
    spread = nested.repeat_interleave(grid.spec.nested)[: flat.numel()]
    if not bool((spread == flat).all()) or not bool((grid.common == grid.common[0]).all()):
        raise RunError(f"scales of {entry.module} were quantised together with those of another matrix")
    return nested, float(grid.common[0, 0])


def read_state(module: str, read: Reader) -> Mapping[str, Any]:
    """What the packed state of a module says; CheckpointError if it is no object."""
    state = json.loads(bytes(read(f"{module}.weight.{STATE}").tolist()))
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{module}.weight.{STATE} holds no object")
    return state


def decode_int8(module: str, weight: "Tensor", scales: "Tensor") -> "Coded":
    """The matrix of signed codes int8 [out, in] and an absmax of each row [out]; CheckpointError."""
    import torch

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.int8 import Int8Grid

    if weight.dtype != torch.int8 or weight.dim() != 2 or scales.shape != weight.shape[:1]:
        raise CheckpointError(f"{module} is not stored in rows of int8 with a scale each")
    rows, width = weight.shape
    none = torch.empty(0, dtype=torch.int64)
    grid = Int8Grid(Int8Spec(), width, scales.to(torch.float32).unsqueeze(1), none, torch.empty(rows, 0))
    return Coded((weight.to(torch.int16) + grid.spec.middle).to(torch.uint8), grid)


def decode_nf4(module: str, read: Reader, absmax: "Tensor") -> "Coded":
    """The matrix of a module on NF4 whose absmax is float32, or codes if quantised in its turn; CheckpointError."""
    import torch

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.nf4 import LEVELS, dynamic_map, restored

    state = read_state(module, read)
    rows, width = (int(extent) for extent in state["shape"])
    double = "nested_blocksize" in state
    spec = Nf4Spec(double)
    sizes = (state["quant_type"], state["blocksize"], state.get("nested_blocksize", spec.nested))
    if sizes != ("nf4", spec.group_size, spec.nested) or width % spec.group_size:
        raise CheckpointError(f"{module} is not stored as nf4 in blocks of {spec.group_size} within rows")
    if not torch.equal(read(f"{module}.weight.quant_map").to(torch.float32), torch.tensor(LEVELS)):
        raise CheckpointError(f"{module}.weight.quant_map holds other levels than those of nf4")
    packed = read(f"{module}.weight")
    shape = (rows, width // spec.group_size)
    if packed.dtype != torch.uint8 or packed.numel() * 2 != rows * width or absmax.numel() != shape[0] * shape[1]:
        raise CheckpointError(f"tensors of {module} do not have the shapes of {spec.name}")
    if double:
        if not torch.allclose(read(f"{module}.weight.nested_quant_map").to(torch.float32), dynamic_map(), atol=1e-7):
            raise CheckpointError(f"{module}.weight.nested_quant_map is not the dynamic map")
        nested = read(f"{module}.weight.nested_absmax").to(torch.float32)
        if nested.shape != (-(-absmax.numel() // spec.nested),) or absmax.dtype != torch.uint8:
            raise CheckpointError(f"tensors of {module} do not have the shapes of {spec.name}")
        spread = nested.repeat_interleave(spec.nested)[: absmax.numel()].view(shape)
        offset = torch.full((rows, 1), float(state["nested_offset"]))
        grid = restored(spec, code=absmax.view(shape), nested=spread, offset=offset)
    else:
        grid = restored(spec, absmax=absmax.to(torch.float32).view(shape))
    codes = torch.stack([packed.reshape(-1) >> 4, packed.reshape(-1) & 15], dim=1).view(rows, width)
    return Coded(codes, grid)
