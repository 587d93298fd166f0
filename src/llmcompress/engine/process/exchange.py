"""Values as bytes and back, for other processes: plain data, tensors, codes. Nothing that is read can run anything.

A buffer is the length of a text (8 bytes), the text (JSON: values in place, tensors by type and shape), then the
tensors, each at a multiple of 64 bytes, as memory of its own would be.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from llmcompress.grids.coded import Coded
from llmcompress.grids.grid_type import restored, spec_named
from llmcompress.solve.damping import Factor
from llmcompress.stats.energy import Energy

_ALIGNED = 64
_LENGTH = 8
_MADE: Mapping[str, Callable[..., Any]] = {"factor": Factor, "energy": Energy, "tuple": lambda *items: items}


def packed(value: Any, device: torch.device) -> Tensor:
    """A value as bytes, uint8 [n]. TypeError for what is none of the above."""
    tensors: list[Tensor] = []
    text = json.dumps(_described(value, tensors)).encode()
    places = list(_places(_LENGTH + len(text), tensors))
    buffer = torch.zeros(places[-1], dtype=torch.uint8, device=device)
    head = len(text).to_bytes(_LENGTH, "little") + text
    buffer[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for place, tensor in zip(places, tensors, strict=False):
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        buffer[place : place + flat.numel()] = flat
    return buffer


def unpacked(buffer: Tensor) -> Any:
    """The value; its tensors share the memory of the buffer, or are copied to where they were."""
    size = int.from_bytes(bytes(buffer[:_LENGTH].tolist()), "little")
    text = bytes(buffer[_LENGTH : _LENGTH + size].cpu().numpy())
    return _restored(json.loads(text), _Reader(buffer, _LENGTH + size))


def _places(start: int, tensors: list[Tensor]) -> Iterator[int]:
    """Where each tensor begins, and at last where all end."""
    for tensor in tensors:
        start = -(-start // _ALIGNED) * _ALIGNED
        yield start
        start += tensor.numel() * tensor.element_size()
    yield start


def _described(value: Any, tensors: list[Tensor]) -> Any:
    """What JSON can say; tensors are put aside."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type]}
    if isinstance(value, Coded):
        return {"coded": [value.grid.spec.name, _described(value.stored(), tensors)]}
    if isinstance(value, Factor):
        fields = (value.ahead, value.pivots, value.percdamp, value.dead, value.shrinkage)
        return {"factor": [_described(item, tensors) for item in fields]}
    if isinstance(value, Energy):
        return {"energy": [_described(item, tensors) for item in value]}
    if isinstance(value, tuple):
        return {"tuple": [_described(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_described(item, tensors) for item in value]
    if isinstance(value, dict):
        return {"dict": [[key, _described(item, tensors)] for key, item in value.items()]}
    raise TypeError(f"a {type(value).__name__} cannot be told to another process")


def _restored(said: Any, tensors: "_Reader") -> Any:
    if isinstance(said, list):
        return [_restored(item, tensors) for item in said]
    if not isinstance(said, dict):
        return said
    ((kind, inner),) = said.items()
    if kind == "tensor":
        return tensors.next(*inner)
    if kind == "coded":
        return restored(spec_named(inner[0]), _restored(inner[1], tensors))
    if kind == "dict":
        return {key: _restored(item, tensors) for key, item in inner}
    items = [_restored(item, tensors) for item in inner]
    return _MADE[kind](*items)


class _Reader:
    """Takes tensors off a buffer, in order."""

    def __init__(self, buffer: Tensor, place: int) -> None:
        self.buffer, self.place = buffer, place

    def next(self, dtype: str, shape: list[int], device: str) -> Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        start = -(-self.place // _ALIGNED) * _ALIGNED
        self.place = start + torch.Size(shape).numel() * kind.itemsize
        found = self.buffer[start : self.place].view(kind).reshape(shape)
        return found.to("cpu") if device == "cpu" else found
