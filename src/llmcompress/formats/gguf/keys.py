"""Keys of a GGUF file as plain data, and how they are written."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from gguf import GGUFWriter

Value = int | float | bool | str | tuple[str, ...]


@dataclass(frozen=True)
class Key:
    """A key and its value. kind: how it is stored."""

    name: str
    value: Value
    kind: Literal["u32", "i32", "f32", "bool", "text", "texts"]


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


def write(writer: "GGUFWriter", keys: Iterable[Key]) -> None:
    """Add keys to a gguf.GGUFWriter in order. An empty list is left out: GGUF cannot say what it would hold."""
    from gguf import GGUFValueType as Type

    plain = {"u32": Type.UINT32, "i32": Type.INT32, "f32": Type.FLOAT32, "bool": Type.BOOL, "text": Type.STRING}
    for key in keys:
        if key.kind != "texts":
            writer.add_key_value(key.name, key.value, plain[key.kind])
        elif isinstance(key.value, tuple) and key.value:
            writer.add_key_value(key.name, list(key.value), Type.ARRAY, sub_type=Type.STRING)
