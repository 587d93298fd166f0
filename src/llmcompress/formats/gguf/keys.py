"""Keys of a GGUF file as plain data, and how they are written."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from gguf import GGUFWriter

Value = int | float | bool | str | tuple[str, ...] | tuple[int, ...] | tuple[float, ...]


@dataclass(frozen=True)
class Key:
    """A key and its value. kind: how it is stored."""

    name: str
    value: Value
    kind: Literal["u32", "i32", "f32", "bool", "text", "texts", "i32s", "u64s", "f32s", "bools"]


def u32(name: str, value: int) -> Key:
    return Key(name, value, "u32")


def f32(name: str, value: float) -> Key:
    return Key(name, float(value), "f32")


def flag(name: str, value: bool) -> Key:
    return Key(name, value, "bool")


def text(name: str, value: str) -> Key:
    return Key(name, value, "text")


def texts(name: str, values: Iterable[str]) -> Key:
    return Key(name, tuple(values), "texts")


def i32s(name: str, values: Iterable[int]) -> Key:
    return Key(name, tuple(values), "i32s")


def u64s(name: str, values: Iterable[int]) -> Key:
    return Key(name, tuple(values), "u64s")


def f32s(name: str, values: Iterable[float]) -> Key:
    return Key(name, tuple(map(float, values)), "f32s")


def flags(name: str, values: Iterable[bool]) -> Key:
    return Key(name, tuple(map(bool, values)), "bools")


def write(writer: "GGUFWriter", keys: Iterable[Key]) -> None:
    """Add keys to a gguf.GGUFWriter in order. An empty list is left out: GGUF cannot say what it would hold."""
    from gguf import GGUFValueType as Type

    plain = {"u32": Type.UINT32, "i32": Type.INT32, "u64": Type.UINT64, "f32": Type.FLOAT32, "bool": Type.BOOL,
             "text": Type.STRING}  # fmt: skip
    for key in keys:
        if not isinstance(key.value, tuple):
            writer.add_key_value(key.name, key.value, plain[key.kind])
        elif key.value:
            writer.add_key_value(key.name, list(key.value), Type.ARRAY, sub_type=plain[key.kind.removesuffix("s")])
