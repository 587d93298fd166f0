"""What is left out while a model runs, measured alone: cached keys and values, attention weights, or neurons."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmcompress.errors import RecipeError
from llmcompress.model.choosing_attention import Attended, choose
from llmcompress.model.rotary_positions import RotaryPositions
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.registry import discover, suggest
from llmcompress.validate import eviction
from llmcompress.validate.eviction.score import Context, Score


class Omission(Protocol):
    """A share of something that is left out. `str` of it is how the user asks for it."""

    def check(self, length: int) -> None:
        """RecipeError for windows of `length` tokens that are too short."""

    def first(self, length: int) -> int:
        """The first position of a window at which all that is measured may be left out."""

    def install(self, model: StreamedModel) -> set[int]:
        """Leave it out of a model that has not run. The layers it was left out of, which is filled as they run.

        CheckpointError for a model of which it cannot be left out.
        """


@dataclass
class Contexts:
    """How many tokens of each row that is run next are its context, as items of tasks have it: all that is not scored.

    The tokens behind the context are predicted without what is evicted; the first of them reads it already.
    """

    rows: Sequence[int] = ()


def kept(count: int, share: float) -> int:
    """How many of `count` remain without a share, one at the least."""
    return max(1, int(count * (1 - share)))


@dataclass(frozen=True)
class Eviction:
    """A share of the keys and values of a context before the text goes on: of the first half of a window.

    In every key-value head of each layer whose tokens see all before them; the rest keep their positions. contexts: in
    place of halves.
    """

    score: Score
    share: float
    contexts: Contexts | None = None

    def __str__(self) -> str:
        return f"--kv {self.score.name}:{self.share:g}"

    def check(self, length: int) -> None:
        context = self.first(length)
        if not self.fits(context) or length < context + 2:
            raise RecipeError(
                f"{self} leaves {kept(context, self.share)} of the {context} tokens that are the first half of a "
                f"window, and {self.score.name} always keeps {self.score.always}",
                "use a longer --length or a lower ratio",
            )

    def fits(self, context: int) -> bool:
        """Whether a context of so many tokens is longer than what is always kept, and leaves as much."""
        return context > self.score.always and kept(context, self.share) >= self.score.always

    def first(self, length: int) -> int:
        return length // 2

    def install(self, model: StreamedModel) -> set[int]:
        evicting = _Evicting(self, RotaryPositions(model) if self.score.rotates else None)
        choose(model, evicting)
        return evicting.layers


class _Evicting:
    """What attention goes on with: chosen as texts are read, and the same for what is written after them."""

    def __init__(self, eviction: Eviction, rotation: RotaryPositions | None) -> None:
        self.eviction, self.rotation = eviction, rotation
        self.layers: set[int] = set()
        self._stay: dict[int, Tensor] = {}  # by layer, bool [batch, heads, length]: of all that was read and written

    def __call__(self, seen: Attended) -> Tensor | None:
        new, known = seen.query.shape[2], seen.key.shape[2]
        if new == known:
            return self._read(seen)
        if seen.layer not in self._stay:
            return None
        self._stay[seen.layer] = stay = functional.pad(self._stay[seen.layer], (0, new), value=True)
        return stay[:, :, None, -known:]  # a sliding window drops what was read first

    def _read(self, seen: Attended) -> Tensor | None:
        self._stay.pop(seen.layer, None)
        if not seen.whole:
            return None
        self.layers.add(seen.layer)
        batch, heads, length, _ = seen.query.shape
        contexts = self.eviction.contexts
        rows = [self.eviction.first(length)] * batch if contexts is None else contexts.rows
        stay = torch.ones(seen.key.shape[:3], dtype=torch.bool, device=seen.key.device)
        for context in set(rows):
            of_rows = [number for number, one in enumerate(rows) if one == context]
            stay[of_rows, :, :context] = self._stays(seen, slice(None) if len(of_rows) == batch else of_rows, context)
        self._stay[seen.layer] = stay = stay.repeat_interleave(heads // seen.key.shape[1], dim=1)
        before = torch.arange(length, device=stay.device) < torch.tensor(rows, device=stay.device)[:, None]
        return stay[:, :, None] | before[:, None, :, None]

    def _stays(self, seen: Attended, rows: Any, context: int) -> Tensor:
        """Which keys and values of a context stay, bool [rows, kv heads, context]."""
        query, key, value = (part[rows, :, :context] for part in (seen.query, seen.key, seen.value))
        weights = seen.weights[rows, :, :context, :context]
        scores = self.eviction.score.of(Context(query, key, value, weights, seen.scaling, self.rotation))
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : kept(context, self.eviction.share)]
        return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter_(-1, best, True)


@dataclass(frozen=True)
class SparseAttention:
    """A share of the attention weights of each query in each head, the smallest; the others add up to one again."""

    share: float

    def __str__(self) -> str:
        return f"--attention-sparsity {self.share:g}"

    def check(self, length: int) -> None:
        pass

    def first(self, length: int) -> int:
        return 0

    def install(self, model: StreamedModel) -> set[int]:
        done: set[int] = set()
        choose(model, partial(self._remaining, done))
        return done

    def _remaining(self, done: set[int], seen: Attended) -> Tensor:
        done.add(seen.layer)
        length = seen.key.shape[2]
        counts = torch.tensor([kept(number, self.share) for number in range(length + 1)], device=seen.weights.device)
        ranks = torch.arange(length, device=seen.weights.device)
        visible = seen.visible.expand(*seen.weights.shape[:1], -1, -1, -1)
        remaining = torch.zeros(seen.weights.shape, dtype=torch.bool, device=seen.weights.device)
        for weights, allowed, out in zip(seen.weights, visible, remaining, strict=True):  # sorting takes memory
            order = weights.masked_fill(~allowed, -1).argsort(dim=-1, descending=True, stable=True)
            best = ranks < counts[allowed.sum(-1)][..., None]
            out.scatter_(-1, order, best.expand(order.shape))
        return remaining


@dataclass(frozen=True)
class SparseNeurons:
    """A share of the neurons of each feed-forward block, for every token those of the smallest magnitude.

    That is contextual sparsity with an oracle (Liu et al. 2023, "Deja Vu", section 3): no predictor of the neurons that
    matter can do better. Of experts, a share of each one's.
    """

    share: float

    def __str__(self) -> str:
        return f"--mlp-sparsity {self.share:g}"

    def check(self, length: int) -> None:
        pass

    def first(self, length: int) -> int:
        return 0

    def install(self, model: StreamedModel) -> set[int]:
        if model.spec.observed:
            raise RecipeError(
                f"--mlp-sparsity knows no feed-forward blocks of a {model.spec.name!r} model",
                "`llmcompress list architectures` names the families that are declared",
            )
        done: set[int] = set()
        paths = [re.escape(linear.path).replace(r"\{e\}", r"\d+") for linear in model.spec.stages()[-1]]
        for number, layer in enumerate(model.layers):
            for name, part in layer.named_modules():
                if any(re.fullmatch(path, name) for path in paths):
                    part.register_forward_pre_hook(partial(self._remaining, number, done), prepend=True)
        return done

    def _remaining(self, number: int, done: set[int], module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        done.add(number)
        values: Tensor = given[0]
        best = values.abs().topk(kept(values.shape[-1], self.share), dim=-1).indices
        return torch.zeros_like(values).scatter_(-1, best, values.gather(-1, best)), *given[1:]


def of_items(omission: Omission | None, contexts: Contexts) -> Eviction | None:
    """What is evicted from items of tasks, whose contexts are told as they are run."""
    assert omission is None or isinstance(omission, Eviction)  # nothing else is measured so
    return None if omission is None else replace(omission, contexts=contexts)


def omissions_of(
    kv: str | None = None, mlp_sparsity: str | None = None, attention_sparsity: str | None = None
) -> list[Omission]:
    """What the options of these names ask for, each a list with commas. RecipeError for what is none."""
    found: list[Omission] = [_eviction(text) for text in _parts(kv)]
    found += [SparseNeurons(_share("--mlp-sparsity", text)) for text in _parts(mlp_sparsity)]
    return found + [SparseAttention(_share("--attention-sparsity", text)) for text in _parts(attention_sparsity)]


def _parts(text: str | None) -> Sequence[str]:
    return [] if text is None else [part.strip() for part in text.split(",")]


def _eviction(text: str) -> Eviction:
    scores: dict[str, Score] = discover(eviction, "SCORE")
    name, colon, share = text.partition(":")
    if name not in scores:
        raise RecipeError(f"--kv {text!r}: there is no score {name!r}", suggest(name, list(scores)))
    if not colon:
        raise RecipeError(f"--kv {text!r} does not say what share is evicted", f"write for example --kv {name}:0.5")
    return Eviction(scores[name], _share("--kv", share))


def _share(option: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise RecipeError(f"{option}: {text!r} is not a share from 0 to below 1", "write for example 0.5")
    return share
