"""What goes from layer to layer beside the hidden states of a token, so that each layer can run alone.

All of it lies in the row of a token: the streams of the model one after the other (one, but for AltUp of Gemma 3n and
hyper-connections), what is made of the tokens for all layers (the embeddings of Zamba) or for each of them (Gemma's
inputs by layer), what a layer hands to the next one (indices of DeepSeek's sparse attention, states of Zaya's routers),
and keys and values that layers leave for later ones.
"""

import inspect
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmcompress.errors import CheckpointError

_OWN = "per_layer_input"  # what Gemma hands each layer beside the hidden states, made of the tokens
_SHARED = "shared_kv_states"  # where layers of Gemma leave keys and values, and others find them

_ALONE = "what is {} and no vector for each of them, so none can run alone"
_DIGIT = 256  # whole numbers below it are exact in every type of hidden states

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""What a layer is called with besides the hidden states: by position, and by name."""


@dataclass(frozen=True)
class HandedOn:
    """Stands for a further value that a layer returns, where a model is recorded. number: which of them."""

    number: int


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


@dataclass(frozen=True)
class _Columns:
    """A tensor [batch, length, width] in columns of rows, whose type may be another than its `dtype`.

    flat: [batch, length]. whole: each number as three digits.
    """

    width: int
    whole: bool
    flat: bool
    dtype: torch.dtype

    @classmethod
    def like(cls, value: Any, tokens: torch.Size) -> "_Columns | None":
        """Columns for a value that has a vector or a number for each of `tokens` [batch, length]; None for others."""
        if not isinstance(value, Tensor) or value.ndim not in (2, 3) or value.shape[:2] != tokens:
            return None
        width = value.shape[2] if value.ndim == 3 else 1
        return cls(width, not value.is_floating_point(), value.ndim == 2, value.dtype)

    @property
    def size(self) -> int:
        return 3 * self.width if self.whole else self.width

    def row(self, value: Tensor, like: Tensor) -> Tensor:
        value = value[..., None] if self.flat else value
        if not self.whole:
            return value.to(like.dtype)
        if int(value.min()) < 0 or int(value.max()) >= _DIGIT**3:
            raise CheckpointError(f"layers are called with whole numbers that are not below {_DIGIT**3}")
        return torch.cat([value // _DIGIT**2, value // _DIGIT % _DIGIT, value % _DIGIT], -1).to(like.dtype)

    def of(self, row: Tensor) -> Tensor:
        if self.whole:
            first, second, third = torch.split(row.long(), self.width, -1)
            row = (first * _DIGIT + second) * _DIGIT + third
        return (row[..., 0] if self.flat else row).to(self.dtype)


@dataclass(frozen=True)
class _Made:
    """What is made of the tokens and given to layers. number, place: the first layer that gets it, and where."""

    columns: _Columns
    number: int
    place: _Place


class Carried:
    """What the layers of a model carry.

    of_tokens: whether layers get inputs that only the token ids tell, not the embeddings. streams, width: as many
    hidden states, as wide each, as `packed` has seen.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.of_tokens = any(_place_of(layer, _OWN) for layer in layers)
        self._shared = [_place_of(layer, _SHARED) for layer in layers]
        self._left = list(_left_by(layers))
        self._made: list[_Made] = []
        self._made_at: list[dict[_Place, int]] = [{} for _ in layers]  # by layer, which of `_made` it gets, and where
        self._handed: _Columns | None = None
        self._handed_at: list[_Place | None] = [None for _ in layers]
        self._returned = 0  # which of the further values that a layer returns is handed on
        self.streams, self.width = 1, 0
        self._axis = 0  # of streams, in hidden states that have some

    @property
    def whole_calls(self) -> bool:
        """Whether a row is made of the calls of all layers, not of the hidden states that enter the first alone."""
        return bool(self._made)

    def learn(self, tokens: torch.Size, hidden: Tensor, calls: Sequence[Call], others: Sequence[Call]) -> bool:
        """See what layers are called with that depends on the tokens, from two texts of [batch, length] tokens.

        hidden: what enters the first layer with the first of them. Returns whether layers hand something on, of which
        `see_handed` is then to be told. CheckpointError for what cannot be carried.
        """
        self._made, self._handed = [], None
        self._axis = 2 if hidden.shape[:2] == tokens else 0
        known: list[Tensor] = []
        for number, (call, other) in enumerate(zip(calls, others, strict=True)):
            self._made_at[number], self._handed_at[number] = {}, None
            for place, value in _arguments(call):
                if isinstance(value, HandedOn):
                    self._handed_at[number], self._returned = place, value.number
                elif _differs(value, place.of(*other)):
                    same = next((index for index, seen in enumerate(known) if seen is value), len(known))
                    if same == len(known):
                        columns = _Columns.like(value, tokens)
                        if columns is None:
                            raise CheckpointError(
                                f"layer {number} is called with {_ALONE.format('made of the tokens')}"
                            )
                        known.append(value)
                        self._made.append(_Made(columns, number, place))
                    self._made_at[number][place] = same
        return any(self._handed_at)

    def see_handed(self, tokens: torch.Size, out: tuple[Any, ...]) -> None:
        """See what the first layer hands on, from what it returned; CheckpointError if it is no vector for each."""
        self._handed = _Columns.like(out[self._returned] if len(out) > self._returned else None, tokens)
        if self._handed is None:
            raise CheckpointError(f"layers are called with {_ALONE.format('handed on by the ones before')}")

    def packed(self, hidden: Tensor, calls: Sequence[Call | None]) -> Tensor:
        """Rows of tokens [batch, length, width] from what the layers are called with; nothing is handed on yet."""
        self.width = hidden.shape[-1]
        if hidden.ndim == 4:
            self.streams = hidden.shape[self._axis]
            hidden = self._flat(hidden)
        more = []
        for made in self._made:
            call = calls[made.number]
            assert call is not None
            more.append(made.columns.row(made.place.of(*call), hidden))
        later = (0 if self._handed is None else self._handed.size) + sum(item.size for item in self._left)
        more += [hidden.new_zeros(*hidden.shape[:2], later)] * bool(later)
        return torch.cat([hidden, *more], -1) if more else hidden

    def hidden(self, rows: Tensor) -> Tensor:
        """The hidden states in rows, as layers take them."""
        states = self.states(rows)
        if self.streams == 1:
            return states
        return states.reshape(*rows.shape[:2], self.streams, self.width).movedim(2, self._axis)

    def states(self, rows: Tensor) -> Tensor:
        """The columns of rows that are hidden states."""
        return rows[..., : self.streams * self.width]

    def _flat(self, hidden: Tensor) -> Tensor:
        """Hidden states as in rows."""
        return hidden.movedim(self._axis, 2).flatten(2) if hidden.ndim == 4 else hidden

    def random(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Rows like these of normally distributed numbers; whole numbers, which may be indices, stay as they are."""
        found = torch.randn(rows.shape, dtype=rows.dtype, generator=generator)
        columns = [made.columns for made in self._made] + [self._handed] * (self._handed is not None)
        (made, handed, _), (made_now, handed_now, _) = self._parted(found), self._parted(rows)
        for item, part, now in zip(columns, (*made, handed), (*made_now, handed_now), strict=False):
            if item is not None and item.whole:
                part.copy_(now)
        return found

    def opened(self, number: int, rows: Tensor, call: Call) -> tuple[Tensor, Call]:
        """Hidden states for a layer, and its call with what the rows carry for it."""
        made, handed, left = self._parted(rows)
        shared = self._shared[number]
        for where, index in self._made_at[number].items():
            call = where.put(self._made[index].columns.of(made[index]), *call)
        where_handed = self._handed_at[number]
        if where_handed is not None:
            assert self._handed is not None
            call = where_handed.put(self._handed.of(handed), *call)
        if shared is not None and self._left:
            states = type(shared.of(*call))()
            for item, part in zip(self._left, left, strict=True):
                states[item.kind] = item.of(part)
            call = shared.put(states, *call)
        return self.hidden(rows), call

    def closed(self, number: int, rows: Tensor, out: Tensor | Sequence[Any], call: Call) -> Tensor:
        """Rows behind a layer that was called so, and returned `out`."""
        values = (out,) if isinstance(out, Tensor) else out
        states = self._flat(values[0])
        made, handed, left = self._parted(rows)
        if self._handed is not None and number + 1 < len(self._handed_at):
            value = values[self._returned] if len(values) > self._returned else None
            if not isinstance(value, Tensor) or _Columns.like(value, rows.shape[:2]) != self._handed:
                raise CheckpointError(f"layer {number} hands on something else than the first one does")
            handed = self._handed.row(value, states)
        shared = self._shared[number]
        if shared is not None and self._left:
            kept: MutableMapping[str, tuple[Tensor, Tensor]] = shared.of(*call)
            left = [item.row(kept[item.kind]) for item in self._left]
        more = [part for part in (*made, handed, *left) if part.shape[-1]]
        return torch.cat([states, *more], -1) if more else states

    def _parted(self, rows: Tensor) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        """What lies behind the hidden states in rows: what is made, handed on, and left for later."""
        sizes = [made.columns.size for made in self._made]
        sizes += [0 if self._handed is None else self._handed.size, *(item.size for item in self._left)]
        parts = torch.split(rows[..., self.streams * self.width :], sizes, -1)
        count = len(self._made)
        return list(parts[:count]), parts[count], list(parts[count + 1 :])


def _arguments(call: Call) -> Iterator[tuple[_Place, Any]]:
    """What a layer is called with, and where."""
    args, kwargs = call
    for number, value in enumerate(args):
        yield _Place("", number), value
    for name, value in kwargs.items():
        yield _Place(name, len(args)), value


def _differs(value: Any, other: Any) -> bool:
    """Whether two arguments differ, as far as tensors are in them."""
    if isinstance(value, Tensor):
        return not isinstance(other, Tensor) or value.shape != other.shape or not torch.equal(value, other)
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return value.keys() != other.keys() or any(_differs(item, other[key]) for key, item in value.items())
    if isinstance(value, tuple | list) and isinstance(other, tuple | list):
        return len(value) != len(other) or any(map(_differs, value, other))
    return False


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
