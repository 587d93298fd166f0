"""Quantised matrices as `verify` reads them, independent of the format."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llmcompress.validate.stored import Array, DamageError, Tensor

PACKED, INTEGERS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
E4M3: Array = np.array(  # values of all codes; 0x7F and 0xFF are NaN, and read as 480
    [
        (-1.0) ** (code >> 7)
        * ((code & 7) / 512 if code & 0x78 == 0 else (8 + (code & 7)) * 2.0 ** ((code >> 3 & 15) - 10))
        for code in range(256)
    ],
    np.float32,
)
_BLOCK = 1 << 22  # weights decoded at once


@dataclass(frozen=True)
class StoredScheme:
    """The scheme that a config declares for a module. size: of a group, -1 for a row. order: by activation order.

    stored: storage of the codes. inputs: rounding of the inputs, such as int8-token, or None. kind: name of a grid that
    is not affine.
    """

    bits: int
    size: int
    symmetric: bool
    order: bool = False
    stored: str = PACKED
    inputs: str | None = None
    kind: str = ""

    @property
    def name(self) -> str:
        group = "row" if self.size == -1 else f"g{self.size}"
        return self.kind or f"int{self.bits}-{group}-{'sym' if self.symmetric else 'asym'}"


ZERO_SCALES = "has scales of zero"


def zero_scales(name: str, scales: Array) -> list[str]:
    """The fault of scales of zero, by which every weight is zero."""
    return [] if scales.all() else [f"{name} {ZERO_SCALES}"]


@dataclass(frozen=True)
class StoredMatrix(ABC):
    """A quantised matrix [rows, width]."""

    module: str
    scheme: StoredScheme
    rows: int
    width: int

    @abstractmethod
    def decode(self, rows: slice) -> Array:
        """Values float32 [rows, in]."""

    @abstractmethod
    def reach(self, rows: slice, weight: Array) -> Array:
        """The largest error of rounding each weight [rows, in] to the nearest value, with ties decided in float32."""

    def blocks(self) -> Iterator[slice]:
        """Slices of rows whose decoded values fit in memory."""
        step = max(1, _BLOCK // self.width)
        return (slice(start, min(start + step, self.rows)) for start in range(0, self.rows, step))


def beyond(weight: Array, low: Array, high: Array) -> Array:
    """How far each weight lies outside of its range."""
    distance: Array = np.abs(weight - np.clip(weight, low, high))
    return distance


def nearest(weight: Array, values: Iterator[Array]) -> Array:
    """Distance of each weight to the nearest of `values`; each value is an array that broadcasts to weight's shape."""
    least: Array = np.full(weight.shape, np.inf, np.float32)
    for value in values:
        np.minimum(least, np.abs(weight - value), out=least)
    return least


def shaped(tensor: Tensor, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
    """`tensor`; DamageError unless the tensor has one of `dtypes` and `shape`."""
    if tensor.dtype not in dtypes or tensor.shape != shape:
        raise DamageError(
            f"{tensor.name} is {tensor.dtype} {list(tensor.shape)} and should be {dtypes[0]} {list(shape)}"
        )
    return tensor
