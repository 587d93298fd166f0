"""A quantised checkpoint of a known format, read as if it had never been quantised: reading a weight decodes it.

The package `formats` alone knows which formats there are and what their files hold.
"""

import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from llmcompress.arch import find
from llmcompress.arch.spec import ArchSpec
from llmcompress.engine.source.stacked_codes import with_experts_apart
from llmcompress.errors import CheckpointError, RecipeError
from llmcompress.formats.base import FLOAT_TYPES, Format, Stack, TensorSpec
from llmcompress.formats.kv_cache import PARTS
from llmcompress.grids.base import Spec
from llmcompress.grids.coded import Coded
from llmcompress.grids.inputs import Rounding
from llmcompress.ledger import Ledger
from llmcompress.recipe import stored_formats
from llmcompress.store.checkpoint import DTYPES, Checkpoint, StoredRows
from llmcompress.store.expert_stacks import Cut
from llmcompress.store.headers import ModelHeaders, Stored, with_settings

# the errors that a wrong config can cause
_DAMAGED = (ArithmeticError, AttributeError, LookupError, RecipeError, TypeError, ValueError, re.error)
STACKED = "BF16"  # the type of decoded stacks
_SMALL_FLOATS = "F8_"  # how the names of types begin that are values only together with a scale
_AT_ONCE = 1 << 20  # weights decoded at once, so that what decoding needs beside its result stays small


@dataclass(frozen=True)
class DecodedHeaders(ModelHeaders):
    """The headers of the decoded model, float32. stored: the headers of its files. packed: modules stored as codes.

    transposed: the packed modules whose unquantised weights are [in, out]. stacks: tensors of several matrices that are
    stored as codes, by the names that they have once they are decoded. pieces: packed modules that are cut out of such
    a tensor, with its name and the number of the matrix in it.
    """

    stored: ModelHeaders
    format: Format
    packed: frozenset[str]
    transposed: frozenset[str]
    stacks: Mapping[str, Stack]
    pieces: Mapping[str, tuple[str, int, Cut]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes


def decoded_headers(stored: ModelHeaders, spec: ArchSpec | None = None) -> ModelHeaders:
    """The headers of a quantised model once it is decoded; `stored` itself where no known format recognises the model.

    spec: the declaration of a family that `arch` does not know. CheckpointError if the tensors do not fit the format.
    """
    stored = with_settings(stored)
    found = _format_of(stored)
    if found is None:
        return stored
    stored = with_experts_apart(stored, found)
    spec = spec or find(str(stored.config.get("model_type")))
    specs = {name: item.spec for name, item in stored.tensors.items()}
    marked = _marked(found, specs)
    packed = frozenset(marked.values())
    transposed = _transposed(packed, spec)
    reader = Checkpoint(stored)
    stacks = found.stacks(specs, stored.config)
    stacked = {stack.parts[0]: (name, stack) for name, stack in stacks.items()}
    used = {part for stack in stacks.values() for part in stack.parts}
    tensors: dict[str, Stored] = {}
    for name, item in stored.tensors.items():
        if name in stacked:
            whole, stack = stacked[name]
            tensors[whole] = Stored(TensorSpec(whole, STACKED, stack.shape), item.file, item.begin, item.end)
        elif name in used:
            continue
        elif name in marked:
            module, _ = _owner(name)
            rows, columns = _shape(found, module, specs, reader)
            shape = (columns, rows) if module in transposed else (rows, columns)
            weight = TensorSpec(f"{module}.weight", "F32", shape)
            tensors[weight.name] = Stored(weight, item.file, item.begin, item.end)
        elif _outlives(name, packed):
            tensors[name] = item
    _check_decoded(stored, found, packed or stacks, tensors)
    wrapper = None if stored.wrapper is None else _without_settings(stored.wrapper, found)
    return DecodedHeaders(
        stored.path,
        _without_settings(stored.config, found),
        tensors,
        stored.files,
        stored,
        found,
        packed,
        transposed,
        stacks,
        wrapper=wrapper,
    )


def _without_settings(config: Mapping[str, Any], found: Format) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in found.keys}


def in_own_type(headers: ModelHeaders) -> ModelHeaders:
    """The same headers, decoded matrices in the type that the model has: that of most tensors that are no codes."""
    if not isinstance(headers, DecodedHeaders):
        return headers
    weights = {f"{module}.weight" for module in headers.packed}
    kinds = Counter(item.spec.dtype for name, item in headers.tensors.items() if name not in weights)
    dtype = max(FLOAT_TYPES, key=lambda kind: kinds[kind])
    tensors = {
        name: replace(item, spec=replace(item.spec, dtype=dtype)) if name in weights else item
        for name, item in headers.tensors.items()
    }
    return replace(headers, tensors=tensors)


def _check_decoded(stored: ModelHeaders, found: Format, packed: Collection[str], tensors: Mapping[str, Stored]) -> None:
    """CheckpointError unless something is packed, and nothing that is left needs a scale to be a value."""
    if not packed:
        raise CheckpointError(
            f"{stored.path} is already quantised ({found.name}), by its config.json, and no tensor is stored so",
            "fetch the files again",
        )
    for name, item in tensors.items():
        if item.spec.dtype.startswith(_SMALL_FLOATS):
            raise CheckpointError(f"{stored.path}: {name} is {item.spec.dtype}, and no scale of it is stored beside it")


def _marked(found: Format, names: Iterable[str]) -> dict[str, str]:
    """The module of every tensor by whose name the format marks that a module is packed."""
    markers = (found.marker,) if isinstance(found.marker, str) else found.marker
    return {name: name[: -len(mark) - 1] for mark in markers for name in names if name.endswith(f".{mark}")}


def _transposed(modules: Iterable[str], spec: ArchSpec | None) -> frozenset[str]:
    """The modules whose weights a declaration says to be [in, out]."""
    conv1d = tuple(f".{linear.path}" for linear in spec.linears if linear.conv1d) if spec is not None else ()
    return frozenset(module for module in modules if conv1d and module.endswith(conv1d))


def _outlives(name: str, packed: Container[str]) -> bool:
    """Whether the decoded model has a tensor of that name: not where it is a part of a code, or a scale of a cache."""
    module, kind = _owner(name)
    return (module not in packed or kind == "bias") and kind not in PARTS


def _owner(name: str) -> tuple[str, str]:
    """The module of a tensor, and the name of the tensor below the module. Parts of a weight belong to its module."""
    module, inside, part = name.partition(".weight.")
    if inside:
        return module, f"weight.{part}"
    module, _, kind = name.rpartition(".")
    return module, kind


def note_decoded(headers: DecodedHeaders, coded: Container[str], ledger: Ledger) -> None:
    """Note how many packed modules are decoded and rounded anew: all that are not `coded`.

    Scales of cached keys and values are left out of the result, which is noted as well.
    """
    if count := sum(module not in coded for module in headers.packed):
        ledger.note(
            "requantised", f"{count} matrices", f"{headers.format.name} in the source, decoded and rounded anew"
        )
    if stacks := [name for name in headers.stacks if name in headers.tensors]:
        ledger.note("requantised", f"{len(stacks)} stacks of experts", f"{headers.format.name} in the source, decoded")
    if scales := [name for name in headers.stored.tensors if name.endswith(PARTS)]:
        ledger.note("kv_cache", f"{len(scales)} scales", "what the source says of cached keys and values is left out")


class DecodedCheckpoint(Checkpoint):
    """The tensors of a quantised checkpoint. A packed module gives its decoded weight [original shape] float32."""

    headers: DecodedHeaders

    def __init__(self, headers: DecodedHeaders) -> None:
        super().__init__(headers)
        self._stored = Checkpoint(headers.stored)

    def coded(self, module: str) -> Coded | None:
        """Codes [out, in] of a packed module, None for any other."""
        if module not in self.headers.packed:
            return None
        if module in self.headers.pieces:
            stack, number, cut = self.headers.pieces[module]
            whole = self.coded_at(stack, number)
            return None if whole is None else whole.rows(cut.rows)
        try:
            return self.headers.format.decode(module, self._part, self.headers.stored.config)
        except _DAMAGED as error:
            raise _unlike(self.headers.stored, self.headers.format, module, error) from None

    def code_grid(self, module: str, scales: str | None = None) -> Spec | None:
        return kept_grid(self.headers, module, scales)

    def inputs(self, module: str) -> Rounding | None:
        if module not in self.headers.packed:
            return None
        try:
            return self.headers.format.inputs(module, self._part, self.headers.stored.config)
        except _DAMAGED as error:
            raise _unlike(self.headers.stored, self.headers.format, module, error) from None

    def coded_at(self, name: str, number: int) -> Coded | None:
        stack = self.headers.stacks.get(name)
        if stack is None:
            return None
        return self.headers.format.decode_stacked(stack, number, lambda part: self._stored.read_at(part, number))

    def read_at(self, name: str, number: int) -> Tensor:
        if name.removesuffix(".weight") in self.headers.packed:
            return self.read(name)[number]
        coded = self.coded_at(name, number)
        if coded is None:
            return self._stored.read_at(name, number)
        return _decoded(coded).to(DTYPES[STACKED]).t().contiguous()

    def rows(self, name: str) -> StoredRows | None:
        return None if name.removesuffix(".weight") in self.headers.packed else super().rows(name)

    def read(self, name: str) -> Tensor:
        if name in self.headers.stacks:
            whole = torch.empty(self.headers.stacks[name].shape, dtype=DTYPES[STACKED])
            for number, matrix in enumerate(whole):
                matrix.copy_(self.read_at(name, number))
            return whole
        module = name.removesuffix(".weight")
        coded = self.coded(module) if name.endswith(".weight") else None
        if coded is None:
            return super().read(name)
        value = _decoded(coded)
        return value.t().contiguous() if module in self.headers.transposed else value

    def _part(self, name: str) -> Tensor:
        """A stored tensor of a packed module; KeyError tells a format that it has none of that name."""
        if name not in self._stored:
            raise KeyError(name)
        return self._stored.read(name)


def code_grid(headers: DecodedHeaders, module: str) -> Spec | None:
    """The grid that a packed module is stored on, if config.json tells it; None for any other module."""
    merged = headers.merged is not None and f"{module}.weight" in headers.merged.changes
    if module not in headers.packed or module in headers.transposed or merged:
        return None
    try:
        return headers.format.grid(module, headers.stored.config)
    except _DAMAGED as error:
        raise _unlike(headers.stored, headers.format, module, error) from None


def kept_grid(headers: DecodedHeaders, module: str, scales: str | None = None) -> Spec | None:
    """The same grid where an output may hold its scales: in types of the grid's own, of a format, or of the model.

    scales: the type of scales in the output, None for that of the model, which may hold values of another type too.
    """
    grid = code_grid(headers, module)
    if grid is None or grid.parts(1, 1) or scales is not None:
        return grid
    name = f"{module}.{headers.format.scale_name}"
    stored = headers.stored.tensors.get(name)
    if stored is None:
        return None
    own = headers.tensors[f"{module}.weight"].spec.dtype
    if stored.spec.dtype == own or stored.spec.dtype == headers.format.scales == "F32":
        return grid
    scale = Checkpoint(headers.stored).read(name)
    return grid if own in DTYPES and torch.equal(scale.to(DTYPES[own]).to(scale.dtype), scale) else None


def _decoded(coded: Coded) -> Tensor:
    """Values float32 [out, in], decoded some rows at a time."""
    count, width = coded.codes.shape
    step = max(1, _AT_ONCE // width)
    if count <= step:
        return coded.decode()
    value = torch.empty(count, width)
    for start in range(0, count, step):
        value[start : start + step] = coded.rows(slice(start, start + step)).decode()
    return value


def _format_of(stored: ModelHeaders) -> Format | None:
    if "quantization_config" not in stored.config:
        return None
    return next((item for item in stored_formats().values() if item.recognises(stored.config)), None)


def _shape(found: Format, module: str, specs: Mapping[str, TensorSpec], reader: Checkpoint) -> tuple[int, int]:
    try:
        shape = found.shape(module, specs, reader.read, reader.headers.config)
    except _DAMAGED as error:
        raise _unlike(reader.headers, found, module, error) from None
    if shape is None or min(shape) < 1:
        raise CheckpointError(f"{reader.path}: {module} lacks tensors that a {found.name} checkpoint has of a matrix")
    return shape


def _unlike(stored: ModelHeaders, found: Format, module: str, error: Exception) -> CheckpointError:
    why = f"no {error}" if isinstance(error, KeyError) else getattr(error, "message", str(error))
    return CheckpointError(f"{stored.path}: {module} is not stored as {found.name} checkpoints store matrices ({why})")
