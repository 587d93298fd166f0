"""Schemes of compressed-tensors checkpoints: how config.json says what codes a module has and how inputs are rounded.

A scheme is stored in one of three ways, by `kind`:

    pack-quantized    packed integers; inputs in 16 bits, or rounded beside less than 8 bits of weights
    int-quantized     weights I8 and inputs of 8 bits: what engines multiply as they are
    float-quantized   weights F8_E4M3 by row, block or matrix; inputs likewise, or in 16 bits

or by the name of its grid. Schemes of others are read as well: 8-bit floats by groups, integers of 8 bits by groups.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import Entry
from llmcompress.grids.base import INPUT_SPECS, PER_ROW, InputSpec, Spec
from llmcompress.grids.float8 import Float8Spec
from llmcompress.grids.float8_tensor import Float8TensorSpec
from llmcompress.grids.grid_type import grid_types
from llmcompress.grids.integer import IntegerSpec
from llmcompress.grids.tiled_floats import TiledFloatSpec

PACKED, INTEGERS, FLOATS, MIXED = "pack-quantized", "int-quantized", "float-quantized", "mixed-precision"
_OTHERS = ("naive-quantized",)  # codes that are not packed, as others call them


@dataclass(frozen=True)
class Scheme:
    """How codes of a grid are told.

    number: what QuantizationArgs call their type. packed, plain: how they are stored, the second where weights of 8
    bits meet rounded inputs. inputs: those that engines multiply them by, the best first; others: another way out.
    more: what QuantizationArgs say beside. own: the tensors are those of the grid (`Spec.parts`), which the kind alone
    names.
    """

    number: str
    packed: str
    plain: str
    inputs: tuple[str, ...] = ()
    others: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)
    own: bool = False


HOLDS: Mapping[str, Scheme] = {
    "int": Scheme("int", PACKED, INTEGERS, ("int8-token", "int8-tensor"), ", or --type fp8 --bits 8"),
    "fp8": Scheme("float", FLOATS, FLOATS, ("fp8-token", "fp8-tensor")),
    "fp8-block": Scheme("float", FLOATS, FLOATS, ("fp8-group",)),
    "fp8-tensor": Scheme("float", FLOATS, FLOATS, ("fp8-tensor", "fp8-token"), more={"strategy": "tensor"}),
    "mxfp8": Scheme(
        "float", "mxfp8-quantized", "mxfp8-quantized", ("mxfp8",), more={"scale_dtype": "torch.uint8"}, own=True
    ),
    "mxfp4": Scheme("float", "mxfp4-pack-quantized", "", ("mxfp4",), more={"scale_dtype": "torch.uint8"}, own=True),
    "nvfp4": Scheme(
        "float",
        "nvfp4-pack-quantized",
        "",
        ("nvfp4",),
        more={"scale_dtype": "torch.float8_e4m3fn", "strategy": "tensor_group"},
        own=True,
    ),
}
"""The grids that a checkpoint can hold, by name."""

READ = (PACKED, INTEGERS, FLOATS, MIXED, *_OTHERS, *(scheme.packed for scheme in HOLDS.values() if scheme.own))
"""What a config may call the whole."""


def _args(bits: int, number: str, strategy: str, size: int | None, dynamic: bool | str, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": number, "strategy": strategy, "group_size": size, "dynamic": dynamic, **more
    }  # fmt: skip


_INPUTS: Mapping[str, Mapping[str, Any]] = {
    "int8-token": _args(8, "int", "token", None, True),
    "int8-tensor": _args(8, "int", "tensor", None, False),
    "fp8-token": _args(8, "float", "token", None, True),
    "fp8-tensor": _args(8, "float", "tensor", None, False),
    "fp8-group": _args(8, "float", "group", 128, True),
    "mxfp8": _args(8, "float", "group", 32, True, scale_dtype="torch.uint8"),
    "mxfp4": _args(4, "float", "group", 32, True, scale_dtype="torch.uint8"),
    "nvfp4": _args(4, "float", "tensor_group", 16, "local", scale_dtype="torch.float8_e4m3fn"),
}
"""What QuantizationArgs say of rounded inputs, which are symmetric."""


def kind(grid: Spec, inputs: InputSpec | None) -> str:
    """How a scheme is stored."""
    scheme = HOLDS[grid.type]
    return scheme.plain if grid.bits == 8 and inputs is not None else scheme.packed


def scale_type(entry: Entry) -> str:
    """The type of the stored scales of a matrix, of its inputs too: the model's, or a wider one that was asked for."""
    return str(entry.options.get("scale_type", entry.source.dtype))


def scale_shape(grid: Spec, rows: int, width: int) -> tuple[int, ...]:
    """The shape of the stored scales of a matrix [rows, width]."""
    if HOLDS[grid.type].more.get("strategy") == "tensor":
        return (1,)
    return (rows if grid.tile is None else -(-rows // grid.tile[0])), grid.groups(width)


def unholdable(entry: Entry, grid: Spec) -> tuple[str, str] | None:
    """Why no loader multiplies these codes by these inputs, and the way out; None if they go together."""
    inputs = entry.inputs
    if inputs is None:
        return None
    scheme = HOLDS[grid.type]
    if inputs.name not in scheme.inputs:
        return (
            f"weights on {grid.name} and inputs of {inputs.name} are not multiplied by any engine ({entry.module})",
            f"use --activations {scheme.inputs[0] if scheme.inputs else 'none'}{scheme.others}",
        )
    if inputs.group is not None and entry.in_features % inputs.group:
        return (
            f"groups of {inputs.group} do not divide the {entry.in_features} inputs of {entry.module}",
            "use --activations none",
        )
    if grid.affine and grid.bits == 8 and (grid.group_size != PER_ROW or not grid.symmetric):
        return (
            f"beside inputs of {inputs.name}, weights of 8 bits have one symmetric scale per row, "
            f"and those of {entry.module} would be on {grid.name}",
            "use --group-size -1 --sym, or --activations none",
        )
    return None


def weights_said(grid: Spec, order: str | None) -> dict[str, Any]:
    """QuantizationArgs of weights; the library refuses keys it does not know."""
    size = None if grid.group_size == PER_ROW else grid.group_size
    shared: dict[str, Any] = {"strategy": "group" if size else "channel", "group_size": size}
    if grid.tile is not None:
        shared = {"strategy": "block", "group_size": None, "block_structure": list(grid.tile)}
    return {
        "num_bits": grid.bits,
        "type": HOLDS[grid.type].number,
        "symmetric": grid.symmetric,
        **shared,
        "dynamic": False,
        "actorder": order,
        **HOLDS[grid.type].more,
    }


def inputs_said(inputs: InputSpec | None) -> dict[str, Any] | None:
    """QuantizationArgs of inputs."""
    return None if inputs is None else {"symmetric": True, **_INPUTS[inputs.name]}


def input_part(inputs: InputSpec | None, dtype: str) -> tuple[str, str] | None:
    """The name and type of the tensor that holds what is fixed of rounded inputs; None where nothing is.

    dtype: of scales.
    """
    if inputs is None or inputs.dynamic:
        return None
    return ("input_scale", dtype) if inputs.group is None else ("input_global_scale", "F32")


def scheme_of(module: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config group of one module: a target that names it, else a pattern that matches, else the class Linear.

    Where there is one group alone, whatever is stored as codes is of it: other classes may stand in its targets.
    """

    def rank(target: str) -> int:
        if target == module:
            return 0
        if target.startswith("re:"):
            return 1 if re.match(target[3:], module) else 3
        return 2 if target == "Linear" else 3

    coding: list[Mapping[str, Any]] = [scheme for scheme in settings["config_groups"].values() if scheme.get("weights")]
    if len(coding) == 1:
        return coding[0]
    ranked = [(rank(target), scheme) for scheme in coding for target in scheme["targets"]]
    best: tuple[int, Mapping[str, Any]] = min(ranked, key=lambda pair: pair[0], default=(3, {}))
    if best[0] == 3:
        raise CheckpointError(f"no config group of quantization_config names {module}, which is quantised")
    return best[1]


def grid_of(module: str, settings: Mapping[str, Any]) -> Spec:
    """The grid of one module; one scale for a whole matrix of integers is as good as one per row."""
    scheme = scheme_of(module, settings)
    weights, stored = scheme["weights"], scheme.get("format", settings.get("format"))
    for name, held in HOLDS.items():
        if held.own and stored in (held.packed, None, MIXED) and _says(weights, held, grid_types()[name].specs()[0]):
            return grid_types()[name].specs()[0]
    said, strategy, bits = weights.get("type", "int"), weights.get("strategy"), int(weights["num_bits"])
    symmetric = bool(weights.get("symmetric", True))
    if said == "float" and bits == 8 and strategy in ("block", "group") and symmetric:
        rows, columns = (1, weights["group_size"]) if strategy == "group" else _block(weights["block_structure"])
        return TiledFloatSpec(int(rows), int(columns))
    if said not in ("int", "float") or strategy not in ("group", "channel", "tensor"):
        raise CheckpointError(f"{module} is stored in a scheme other than codes by block, group, channel or tensor")
    size = int(weights["group_size"]) if strategy == "group" else PER_ROW
    if (said, strategy, bits, symmetric) == ("float", "tensor", 8, True):
        return Float8TensorSpec()
    return IntegerSpec(bits, size, symmetric) if said == "int" else Float8Spec(bits, size, symmetric)


def _says(weights: Mapping[str, Any], held: Scheme, grid: Spec) -> bool:
    """Whether QuantizationArgs tell a grid that has tensors of its own."""
    said = (weights.get("type"), weights.get("num_bits"), weights.get("group_size"), weights.get("symmetric", True))
    return said == (held.number, grid.bits, grid.group_size, True)


def _block(said: Any) -> tuple[int, int]:
    """Rows and columns of a block; older files write them as text."""
    rows, columns = said.split("x") if isinstance(said, str) else said
    return int(rows), int(columns)


def reordered(module: str, settings: Mapping[str, Any]) -> bool:
    """Whether groups of a module follow the activation order, so that an index of theirs is stored."""
    return scheme_of(module, settings)["weights"].get("actorder") in ("group", True)


def inputs_of(module: str, settings: Mapping[str, Any]) -> InputSpec | None:
    """How the inputs of one module are rounded; None if they are not, or by groups in a way that nothing here does."""
    said = scheme_of(module, settings).get("input_activations")
    if said is None:
        return None
    found = {"type": "int", "dynamic": False, "group_size": None, "symmetric": True, **said}
    for name, wanted in _INPUTS.items():
        if all(found.get(key) == value for key, value in {"symmetric": True, **wanted}.items()):
            return INPUT_SPECS[name]
    if found.get("strategy") in ("group", "tensor_group"):
        return None
    raise CheckpointError(f"inputs of {module} are rounded in a way other than 8 bits by token, or fixed for all")
