"""What a checkpoint format is: which tensors it writes for a matrix, which grids it can hold."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from llmcompress.grids.base import InputSpec, Spec
from llmcompress.grids.grid_type import gguf_specs

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.inputs import Rounding

ITEM_SIZE = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "U32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
FLOAT_TYPES = ("F32", "F16", "BF16")  # of weights that can be worked on


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written: its name, the name of its type in safetensors or GGUF, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        spec = gguf_specs().get(self.dtype)
        if spec is not None:
            return round(prod(self.shape) * spec.bits_per_weight(self.shape[-1]) / 8)
        return prod(self.shape) * ITEM_SIZE[self.dtype]


@dataclass(frozen=True)
class Entry:
    """One tensor of the source and what becomes of it.

    source: its spec in the source checkpoint. grid: the grid its codes lie on, None if it is copied unchanged.
    inputs: how what it reads is rounded while the model runs, None for not at all.
    transposed: stored [in, out] (GPT-2's Conv1D) instead of [out, in]. block: inside a decoder layer.
    linear: the matrix of a linear layer, quantised or not (routers are, embeddings and norms are not); a format lists
    those that stay unquantised, as loaders assume that all are. Outside of layers only quantised ones need the mark,
    and those whose names look like an embedding's.
    embedding: a quantised one whose rows are looked up, whether or not it is the head as well.
    permuted: groups follow the activation order, so a group index must be stored.
    further: of a layer after the last, which predicts further tokens.
    runtime: the module path in transformers, where that may differ from the on-disk module.
    options: what the method recorded about itself, for the format's config: damp_percent (float), act_order (bool),
    static_groups (bool), true_sequential (bool), scale_type (of scales wider than the model's); each may be absent.
    """

    source: TensorSpec
    grid: Spec | None = None
    inputs: InputSpec | None = None
    transposed: bool = False
    block: bool = False
    linear: bool = False
    embedding: bool = False
    permuted: bool = False
    further: bool = False
    runtime: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return self.source.name.removesuffix(".weight")

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which loaders may look for the module in a config: on disk, and in transformers."""
        return (self.module,) if self.runtime in (None, self.module) else (self.module, self.runtime)

    @property
    def out_features(self) -> int:
        return self.source.shape[1 if self.transposed else 0]

    @property
    def in_features(self) -> int:
        return self.source.shape[0 if self.transposed else 1]


Reader = Callable[[str], "Tensor"]
"""Reads a tensor of a checkpoint by name; KeyError where there is none of that name."""

Config = Mapping[str, Any]
"""config.json, or the part of it that speaks of quantisation."""

Specs = Mapping[str, TensorSpec]
"""The specs of all tensors of a checkpoint by name."""


@dataclass(frozen=True)
class Stack:
    """Matrices [out, in] of experts that lie in one tensor of bfloat16, which holds their values exactly.

    shape: [experts, in, out]. parts: the stored tensors, each with an entry for each expert.
    """

    shape: tuple[int, int, int]
    parts: tuple[str, ...]


class Format(ABC):
    """One checkpoint format; a module of `formats` offers an instance as `FORMAT`.

    writes: whether runs can write it; others' formats may be read alone (`read_only`). affine: whether what it decodes
    may be whole numbers with scales and zero points. keys: of config.json that speak of quantisation. scales: the type
    of scales that are not a grid's own, None for that of the model. room: the type that they are stored in, where that
    holds more. scale_name: what such a tensor is called.
    Everything about what will be written is answered from entries alone, before any tensor is read.
    """

    name: str
    summary: str
    writes: bool = True
    affine: bool = False
    scales: str | None = None
    room: str | None = None
    scale_name: str = "weight_scale"
    keys: tuple[str, ...] = ("quantization_config",)
    head_codes: bool = False  # whether loaders read codes of an output head
    embedding_codes: bool = False  # whether they read codes of an embedding, also where it is the head
    holds: Container[str] | None  # names of the grids whose codes it has a place for; None: it stores decoded values
    marker: str | tuple[str, ...]  # the tensor (one of those) that quantised modules alone have: "qweight"

    @property
    def scales_of_sources(self) -> str | None:
        """The type that scales of a quantised source may have, None for that of the model."""
        return self.room or self.scales

    @abstractmethod
    def refuses(self, entries: Sequence[Entry], config: Config) -> tuple[str, str] | None:
        """(what cannot be held and why, the way out), or None."""

    @abstractmethod
    def layout(self, entry: Entry) -> list[TensorSpec]:
        """The tensors written for one entry, in the order `encode` gives them."""

    @abstractmethod
    def encode(self, entry: Entry, coded: "Coded") -> dict[str, "Tensor"]:
        """The tensors of a quantised entry; names, types and shapes are those of `layout`."""

    @abstractmethod
    def config(self, entries: Sequence[Entry], config: Config) -> dict[str, dict[str, Any]]:
        """JSON files to change or add: {"config.json": {keys to set}, "quantize_config.json": {...}}."""

    def recognises(self, config: Config) -> bool:
        """Whether a checkpoint with this config.json is of this format."""
        return False

    def shape(self, module: str, specs: Specs, read: Reader, config: Config) -> tuple[int, int] | None:
        """[out, in] of the matrix that `decode` gives, from the specs of all tensors; None if it is not quantised.

        read: for a tensor that holds a shape, and no other.
        """
        return None

    def grid(self, module: str, config: Config) -> Spec | None:
        """The grid of what `decode` or `decode_stacked` gives of a module; None where config.json does not tell it."""
        return None

    def decode(self, module: str, read: Reader, config: Config) -> "Coded | None":
        """The matrix of a module back from its tensors, or None if the module is not quantised."""
        return None

    def experts(self, module: str, config: Config) -> str | None:
        """What modules of single experts are called whose tensors lie behind one another in those of `module`.

        `{e}` stands for the number of the expert. None where a module is one matrix.
        """
        return None

    def stacks(self, specs: Specs, config: Config) -> dict[str, Stack]:
        """Tensors of several matrices that are stored as codes, by the names that they have in the decoded model."""
        return {}

    def decode_stacked(self, stack: Stack, number: int, read_at: Reader) -> "Coded":
        """One matrix of a stack, codes [out, in]; `read_at` gives what parts hold of it. TypeError without stacks."""
        raise TypeError(f"format {self.name} stores every matrix by itself")

    def inputs(self, module: str, read: Reader, config: Config) -> "Rounding | None":
        """How the inputs of a module are rounded while the model runs; None if they are not."""
        return None
