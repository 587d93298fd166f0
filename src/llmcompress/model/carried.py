"""What goes from layer to layer beside the hidden states of a token, so that each layer can run alone.

All of it lies in the row of a token: the streams of the model one after the other (one, but for AltUp of Gemma 3n), the
inputs that each layer gets of its own, in order of the layers, then keys and values that layers leave for later ones.
"""

import inspect
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_OWN = "per_layer_input"  # what Gemma hands each layer beside the hidden states, made of the tokens
_SHARED = "shared_kv_states"  # where layers of Gemma leave keys and values, and others find them

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""What a layer is called with besides the hidden states: by position, and by name."""


@dataclass(frozen=True)
class _Place:
    """The place of a parameter in calls of a layer, beside the hidden states: its name, and its number by position."""

    name: str
    number: int

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[self.number] if self.number < len(args) else kwargs.get(self.name)

    def put(self, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        if self.number < len(args):
            return (*args[: self.number], value, *args[self.number + 1 :]), kwargs
        return args, {**kwargs, self.name: value}


@dataclass(frozen=True)
class _Left:
    """Keys and values that a layer leaves for later ones of its kind, each [batch, heads, length, width]."""

    kind: str
    heads: int
    width: int

    @property
    def size(self) -> int:
        return 2 * self.heads * self.width

    def row(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat([part.transpose(1, 2).flatten(2) for part in both], -1)

    def of(self, row: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = row.reshape(*row.shape[:2], 2, self.heads, self.width).permute(2, 0, 3, 1, 4)
        return keys, values


class Carried:
    """What the layers of a model carry. streams, width: as many hidden states, as wide each, as `packed` has seen."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._own = [_place_of(layer, _OWN) for layer in layers]
        self._shared = [_place_of(layer, _SHARED) for layer in layers]
        self._left = list(_left_by(layers))
        self._behind = sum(item.size for item in self._left)  # the last values of a row
        self.streams, self.width = 1, 0

    @property
    def of_tokens(self) -> bool:
        """Whether layers get inputs of their own, made of the tokens."""
        return any(self._own)

    def packed(self, hidden: Tensor, calls: Sequence[Call | None]) -> Tensor:
        """Rows of tokens [batch, length, width] from what the layers are called with; nothing is left for later yet."""
        self.width = hidden.shape[-1]
        if hidden.ndim == 4:
            self.streams = len(hidden)
            hidden = hidden.permute(1, 2, 0, 3).flatten(2)
        more = [
            value
            for place, call in zip(self._own, calls, strict=True)
            if place is not None and call is not None and (value := place.of(*call)) is not None
        ]
        more += [hidden.new_zeros(*hidden.shape[:2], item.size) for item in self._left]
        return torch.cat([hidden, *more], -1) if more else hidden

    def hidden(self, rows: Tensor) -> Tensor:
        """The hidden states in rows, as layers take them."""
        states = rows[..., : self.streams * self.width]
        if self.streams == 1:
            return states
        return states.reshape(*rows.shape[:2], self.streams, self.width).permute(2, 0, 1, 3)

    def opened(self, number: int, rows: Tensor, call: Call) -> tuple[Tensor, Call]:
        """Hidden states for a layer, and its call with what the rows carry for it."""
        end = rows.shape[-1] - self._behind
        own = rows[..., self.streams * self.width : end]
        place, shared = self._own[number], self._shared[number]
        if place is not None and own.shape[-1]:
            call = place.put(own.reshape(*own.shape[:2], len(self._own), -1)[..., number, :], *call)
        if shared is not None and self._left:
            states = type(shared.of(*call))()
            parts = torch.split(rows[..., end:], [item.size for item in self._left], -1)
            for item, part in zip(self._left, parts, strict=True):
                states[item.kind] = item.of(part)
            call = shared.put(states, *call)
        return self.hidden(rows), call

    def closed(self, number: int, rows: Tensor, out: Tensor, call: Call) -> Tensor:
        """Rows behind a layer that was called so, and gave `out`."""
        out = out.permute(1, 2, 0, 3).flatten(2) if out.ndim == 4 else out
        rest = rows[..., out.shape[-1] : rows.shape[-1] - self._behind]
        shared = self._shared[number]
        if shared is None or not self._left:
            return torch.cat([out, rest], -1) if rest.shape[-1] else out
        states: MutableMapping[str, tuple[Tensor, Tensor]] = shared.of(*call)
        return torch.cat([out, rest, *(item.row(states[item.kind]) for item in self._left)], -1)


def _place_of(layer: nn.Module, name: str) -> _Place | None:
    """The place of a parameter of that name, None where a layer has no such."""
    names = list(inspect.signature(layer.forward).parameters)
    return _Place(name, names.index(name) - 1) if name in names else None


def leaves(module: nn.Module) -> bool:
    """Whether a module, or one in it, leaves keys and values for later layers when it runs."""
    return any(getattr(part, "store_full_length_kv", False) for part in module.modules())


def _left_by(layers: Sequence[nn.Module]) -> Iterator[_Left]:
    """What the layers leave for later ones, by kind of layer."""
    for layer in layers:
        for module in layer.modules():
            if getattr(module, "store_full_length_kv", False):
                keys: nn.Linear = module.k_proj  # type: ignore[assignment]
                width: int = module.head_dim  # type: ignore[assignment]
                yield _Left(str(module.layer_type), keys.out_features // width, width)
