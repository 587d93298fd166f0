"""Tensors of bitsandbytes (`bitsandbytes`): how each grid is stored, and matrices read back."""

import json
from collections.abc import Mapping
from math import gcd
from typing import TYPE_CHECKING, Any, Protocol, cast

from llmcompress.errors import CheckpointError, RunError
from llmcompress.formats.base import Entry, Reader
from llmcompress.formats.packed_format import Part
from llmcompress.grids.int8 import Int8Spec
from llmcompress.grids.nf4 import Nf4Spec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.block_tables import BlockTableGrid
    from llmcompress.grids.coded import Coded
    from llmcompress.grids.int8 import Int8Grid
    from llmcompress.grids.nf4 import Nf4Grid

KINDS = ("nf4", "fp4")  # of 4 bits
_STATE = "quant_state.bitsandbytes__"
STATE = f"{_STATE}nf4"
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
    """What the packed state of a module says; CheckpointError if it is no object, or of no kind that is known here."""
    state = json.loads(bytes(_state(module, read).tolist()))
    if not isinstance(state, Mapping) or state.get("quant_type") not in KINDS:
        raise CheckpointError(f"the quant_state of {module} holds no object that tells one of {', '.join(KINDS)}")
    return state


def _state(module: str, read: Reader) -> "Tensor":
    for kind in KINDS[:-1]:
        try:
            return read(f"{module}.weight.{_STATE}{kind}")
        except KeyError:
            continue
    return read(f"{module}.weight.{_STATE}{KINDS[-1]}")


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


def decode_4bit(module: str, read: Reader, absmax: "Tensor") -> "Coded":
    """The matrix of a module in 4 bits whose absmax is float32, or codes if quantised in its turn; CheckpointError.

    NF4 in blocks of 64 within rows is the grid of our own; any other is one that is read alone.
    """
    import torch

    from llmcompress.grids.coded import Coded

    state = read_state(module, read)
    rows, width = (int(extent) for extent in state["shape"])
    size = int(state["blocksize"])
    packed = read(f"{module}.weight").reshape(-1).view(torch.uint8)
    blocks = -(-rows * width // size)
    if packed.numel() * 2 != rows * width or absmax.numel() != blocks:
        raise CheckpointError(
            f"tensors of {module} do not have the shapes of {rows} x {width} codes in blocks of {size}"
        )
    codes = torch.stack([packed >> 4, packed & 15], dim=1).view(rows, width)
    table = read(f"{module}.weight.quant_map").to(torch.float32)
    if table.shape != (16,) or not bool(table.isfinite().all()):
        raise CheckpointError(f"{module}.weight.quant_map does not hold 16 numbers")
    own = _own_grid(module, read, state, absmax, table)
    return Coded(codes, own if own is not None else _other_grid(module, read, state, absmax, table))


def _own_grid(
    module: str, read: Reader, state: Mapping[str, Any], absmax: "Tensor", table: "Tensor"
) -> "Nf4Grid | None":
    """The grid of a matrix that could have been written here; None for any other."""
    import torch

    from llmcompress.grids.nf4 import LEVELS, dynamic_map, restored

    rows, width = (int(extent) for extent in state["shape"])
    double = "nested_blocksize" in state
    spec = Nf4Spec(double)
    sizes = (state["quant_type"], state["blocksize"], state.get("nested_blocksize", spec.nested))
    if sizes != ("nf4", spec.group_size, spec.nested) or width % spec.group_size:
        return None
    if not torch.equal(table, torch.tensor(LEVELS)):
        raise CheckpointError(f"{module}.weight.quant_map holds other levels than those of nf4")
    shape = (rows, width // spec.group_size)
    if not double:
        return restored(spec, absmax=absmax.to(torch.float32).view(shape))
    known = read(f"{module}.weight.nested_quant_map").to(torch.float32)
    if known.shape != (256,) or not torch.allclose(known, dynamic_map(), atol=1e-7):
        raise CheckpointError(f"{module}.weight.nested_quant_map is not the dynamic map")
    spread = _nested(module, read, state, absmax).view(shape)
    offset = torch.full((rows, 1), float(state["nested_offset"]))
    return restored(spec, code=absmax.view(shape), nested=spread, offset=offset)


def _other_grid(
    module: str, read: Reader, state: Mapping[str, Any], absmax: "Tensor", table: "Tensor"
) -> "BlockTableGrid":
    """The grid of a matrix of any table, in blocks of any size."""
    import torch

    from llmcompress.grids.block_tables import BlockTableGrid, BlockTableSpec

    rows, width = (int(extent) for extent in state["shape"])
    size, scale = int(state["blocksize"]), absmax
    if "nested_blocksize" in state:
        values = read(f"{module}.weight.nested_quant_map").to(torch.float32)
        if values.shape != (256,):
            raise CheckpointError(f"{module}.weight.nested_quant_map does not hold 256 numbers")
        nested = _nested(module, read, state, absmax)
        scale = values[absmax.reshape(-1).long()] * nested + float(state["nested_offset"])
    group = gcd(size, width)
    at = torch.arange(0, rows * width, group) // size
    spread = scale.to(torch.float32).reshape(-1)[at].view(rows, width // group)
    if not bool(spread.isfinite().all()):
        raise CheckpointError(f"{module} has scales that are not finite")
    return BlockTableGrid(BlockTableSpec(str(state["quant_type"]), group), table, spread)


def _nested(module: str, read: Reader, state: Mapping[str, Any], absmax: "Tensor") -> "Tensor":
    """The absmax of the nested block of each block [blocks]; CheckpointError."""
    import torch

    size = int(state["nested_blocksize"])
    nested = read(f"{module}.weight.nested_absmax").to(torch.float32)
    if size < 1 or nested.shape != (-(-absmax.numel() // size),) or absmax.dtype != torch.uint8:
        raise CheckpointError(f"{module}.weight.nested_absmax does not fit {absmax.numel()} blocks")
    return nested.repeat_interleave(size)[: absmax.numel()]
