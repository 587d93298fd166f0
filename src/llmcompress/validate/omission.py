"""What is left out while a model runs, measured alone: cached keys and values, attention weights, or neurons."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

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


def kept(count: int, share: float) -> int:
    """How many of `count` remain without a share, one at the least."""
    return max(1, int(count * (1 - share)))


@dataclass(frozen=True)
class Eviction:
    """A share of the keys and values of a context, the first half of a window, before the other half goes on.

    In every key-value head of each layer whose tokens see all before them; the rest keep their positions.
    """

    score: Score
    share: float

    def __str__(self) -> str:
        return f"--kv {self.score.name}:{self.share:g}"

    def check(self, length: int) -> None:
        context = self.first(length)
        if context <= self.score.always or kept(context, self.share) < self.score.always or length < context + 2:
            raise RecipeError(
                f"{self} leaves {kept(context, self.share)} of the {context} tokens that are the first half of a "
                f"window, and {self.score.name} always keeps {self.score.always}",
                "use a longer --length or a lower ratio",
            )

    def first(self, length: int) -> int:
        return length // 2

    def install(self, model: StreamedModel) -> set[int]:
        rotation = RotaryPositions(model) if self.score.rotates else None
        done: set[int] = set()
        choose(model, partial(self._remaining, rotation, done))
        return done

    def _remaining(self, rotation: RotaryPositions | None, done: set[int], seen: Attended) -> Tensor | None:
        if not seen.whole:
            return None
        done.add(seen.layer)
        length = seen.key.shape[2]
        context = self.first(length)
        query, key, value = (part[:, :, :context] for part in (seen.query, seen.key, seen.value))
        weights = seen.weights[:, :, :context, :context]
        scores = self.score.of(Context(query, key, value, weights, seen.scaling, rotation))
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : kept(context, self.share)]
        stay = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter_(-1, best, True)
        heads = stay.repeat_interleave(seen.query.shape[1] // key.shape[1], dim=1)
        remaining = torch.ones(seen.weights.shape, dtype=torch.bool, device=scores.device)
        remaining[:, :, context:, :context] = heads[:, :, None]
        return remaining


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
