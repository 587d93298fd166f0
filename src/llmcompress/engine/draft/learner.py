"""What a head loses against its target on windows of text, and the gradients, by training-time test.

At depth d a row has the head's own output of the row before in place of hidden states of the target, d times over, as
when so many tokens were drafted (arXiv:2503.01840, section 3.2).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from llmcompress.engine.draft.draft_plan import DEPTHS, DraftPlan
from llmcompress.engine.plan.memory_model import HEAD_TOKENS
from llmcompress.engine.train.training import TrainingText
from llmcompress.model.eagle import EagleHead
from llmcompress.model.per_thread import PerThread
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.store.draft_head import DraftShape
from llmcompress.store.windows import Windows
from llmcompress.workers import Workers

_FUSED, _HEAD = "fc.weight", "lm_head.weight"
_SPREAD = 0.5  # of weights that begin at random, times the root of their inputs
_CALM = 0.4  # of the gains before the head: what is first predicted is another token's, and had better be unsure
_WINDOWS = 16  # that tell how large channels are


@dataclass
class LearntTensor:
    """A tensor of the head. learnt: its value times `unit`, which spreads over columns; float32.

    Some channels of hidden states are a thousand times as large as others. A step of Adam moves all numbers alike, so
    those that read large channels are learnt in units of these.
    """

    pace: ClassVar[float] = 1.0
    learnt: Tensor
    unit: Tensor

    def value(self) -> Tensor:
        return self.learnt / self.unit


class LearntSlowly(LearntTensor):
    """Rows of which few tokens say anything, and that are good to begin with."""

    pace: ClassVar[float] = 0.2


class _Seen(NamedTuple):
    """Of one window: embeddings [rows, hidden], hidden states [rows, 3 hidden], and the chances that the target gives
    the tokens that can be drafted after each row [rows, draft vocabulary] float32."""

    embedded: Tensor
    states: Tensor
    wanted: Tensor


class DraftLearner:
    """A head beside its target, whose embedding and head are in memory within `heads`.

    ids: tokens that can be drafted, int64 in rising order. states: of the target, by number.
    """

    def __init__(
        self, plan: DraftPlan, model: StreamedModel, text: TrainingText, states: Mapping[int, Windows], workers: Workers
    ) -> None:
        """The head as it begins, within an `outer` of the model that has embedding and head."""
        self.shape, self.model, self.tokens, self.workers = plan.shape, model, text.tokens, workers
        self.auxiliary = [states[number] for number in plan.shape.states]
        self.last = states[len(model.layers)]
        self.ids = frequent(text.tokens[list(text.trained)], plan.shape)
        self._causal = model.causal
        started, sizes = _started(plan, self._head_rows(), self._gains()), self._sizes()
        one = torch.ones(())
        self.trained = {name: LearntTensor(value, one) for name, value in started.items()}
        self.trained[_FUSED] = LearntTensor(started[_FUSED] * sizes, sizes)
        self.trained[_HEAD] = LearntSlowly(started[_HEAD], one)

    @contextmanager
    def heads(self) -> Iterator[None]:
        """A context in which the embedding and the head of the target are in memory."""
        with self.model.outer(embed=True, head=True) as causal:
            self._threads = PerThread(causal)
            yield

    def divergence(self, windows: Sequence[int]) -> float:
        """The mean loss of some windows: at each depth KL(target || head) of the tokens that can be drafted."""
        head = self._head(learning=False)
        found = self.workers.in_order(lambda window: float(self._loss(head, window)), windows)
        return sum(found) / len(windows)

    def gradients(self, windows: Sequence[int]) -> tuple[float, dict[str, Tensor]]:
        """The same mean, and its gradient at every tensor of the head."""
        head = self._head(learning=True)

        def learnt(window: int) -> tuple[float, list[Tensor]]:
            with torch.enable_grad():
                loss = self._loss(head, window)
                found = torch.autograd.grad(loss, list(head.weights.values()))
            return float(loss.detach()), [slope.to("cpu", torch.float32) for slope in found]

        total, sums = 0.0, [torch.zeros_like(item.learnt) for item in self.trained.values()]
        for loss, slopes in self.workers.in_order(learnt, windows):
            total += loss
            for held, slope in zip(sums, slopes, strict=True):
                held += slope
        sums = [held / item.unit for held, item in zip(sums, self.trained.values(), strict=True)]
        return total / len(windows), {name: held / len(windows) for name, held in zip(self.trained, sums, strict=True)}

    def acceptances(self, windows: Sequence[int], depths: int) -> list[float]:
        """The share of tokens that the target accepts of the head, by depth: the mean of 1 - total variation."""
        head = self._head(learning=False)

        def of(window: int) -> list[float]:
            seen = self._seen(window)
            return [
                float(torch.minimum(wanted, chances.exp()).sum(dim=-1).mean())
                for chances, wanted in self._judged(head, seen, depths)
            ]

        found = list(self.workers.in_order(of, windows))
        return [sum(parts) / len(parts) for parts in zip(*found, strict=True)]

    def _loss(self, head: EagleHead, window: int) -> Tensor:
        """The mean over depths of the mean KL(p || q) over rows, both of tokens that can be drafted alone, times p's
        share of all tokens."""
        total = torch.zeros((), device=self.model.device)
        for chances, wanted in self._judged(head, self._seen(window), DEPTHS):
            share = wanted.sum(dim=-1)
            own = torch.special.xlogy(wanted, wanted).sum(dim=-1) - torch.special.xlogy(share, share)
            total = total + (own - (wanted * chances).sum(dim=-1)).mean()
        return total / DEPTHS

    def _judged(self, head: EagleHead, seen: _Seen, depths: int) -> Iterator[tuple[Tensor, Tensor]]:
        """By depth, log-probabilities of the head and probabilities of the target, both [rows, draft vocabulary]."""
        outputs = head.unrolled(seen.embedded, head.fused(seen.states), depths)
        for depth, output in enumerate(outputs):
            yield head.logits(output[depth:]).to(torch.float32).log_softmax(dim=-1), seen.wanted[depth:]

    def _seen(self, window: int) -> _Seen:
        (causal,) = self._threads.get()
        with torch.no_grad():
            span, device = slice(window, window + 1), self.model.device
            states = torch.cat([item.read(span)[0, :-1] for item in self.auxiliary], dim=-1)
            table: Tensor = causal.get_submodule(self.model.spec.embed).weight  # type: ignore[assignment]
            embedded = table[self.tokens[window, 1:].to(device)]
            last = self.last.read(span)[:, 1:].to(device)
            wanted = torch.cat([self._wanted(causal, piece) for piece in torch.split(last, HEAD_TOKENS, dim=1)])
            return _Seen(embedded.to(self.model.dtype), states.to(device), wanted)

    def _wanted(self, causal: nn.Module, last: Tensor) -> Tensor:
        logits = self.model.logits(causal, last)[0].to(torch.float32)
        return (logits[:, self.ids] - logits.logsumexp(dim=-1, keepdim=True)).exp()

    def _head(self, learning: bool) -> EagleHead:
        """The head as it is now, in the type and on the device of the target."""
        place, dtype = self.model.device, self.model.dtype
        weights = {
            name: item.value().to(place, dtype, copy=True).requires_grad_(learning)
            for name, item in self.trained.items()
        }
        return EagleHead(self.shape, weights)

    def _head_rows(self) -> Tensor:
        """The target's head for the tokens that can be drafted: [draft vocabulary, hidden] float32."""
        head: Tensor = self._causal.get_submodule(self.model.spec.head).weight  # type: ignore[assignment]
        return head[self.ids].to("cpu", torch.float32)

    def _sizes(self) -> Tensor:
        """The root mean square [3 hidden] of each channel of the hidden states, over some windows, as a share of
        that of all channels of the last one; float32."""
        span = slice(0, min(_WINDOWS, len(self.tokens)))
        states = torch.cat([item.read(span).to(torch.float32).flatten(0, 1) for item in self.auxiliary], dim=-1)
        found = states.square().mean(dim=0).sqrt()
        return (found / found[-self.shape.hidden :].square().mean().sqrt()).clamp(min=1e-3)

    def _gains(self) -> Tensor:
        """The gains [hidden] of the norm before the target's head, float32: by channel what leaves it, as a share of
        what enters it divided by the root mean square of a token."""
        found: list[Tensor] = []
        head = self._causal.get_submodule(self.model.spec.head)
        handle = head.register_forward_pre_hook(lambda _, args: found.append(args[0]))
        entering = self.last.read(slice(0, 1))[:, :HEAD_TOKENS].to(self.model.device)
        try:
            with torch.no_grad():
                self.model.logits(self._causal, entering)
        finally:
            handle.remove()
        left, before = found[0][0].to("cpu", torch.float32), entering[0].to("cpu", torch.float32)
        normed = before / before.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-20)
        return (left.square().mean(dim=0) / normed.square().mean(dim=0).clamp(min=1e-12)).sqrt()


def frequent(tokens: Tensor, shape: DraftShape) -> Tensor:
    """The ids that come most often, as many as can be drafted, in rising order; of equal ones the lower. int64."""
    counts = torch.bincount(tokens.flatten(), minlength=shape.target_vocabulary)
    return counts.argsort(descending=True, stable=True)[: shape.vocabulary].sort().values


def _started(plan: DraftPlan, head: Tensor, gains: Tensor) -> dict[str, Tensor]:
    """A head as it begins: the feature is the last of the hidden states that are read, what attention and the
    feed-forward add is nothing, logits are made as the target makes them. All else is random."""
    generator = torch.Generator().manual_seed(plan.opened.text.seed)
    found = {}
    for name, shape in plan.shape.matrices.items():
        if len(shape) == 1:
            found[name] = torch.ones(shape)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name] = torch.zeros(shape)
        else:
            found[name] = torch.randn(shape, generator=generator) * _SPREAD / shape[1] ** 0.5
    found[_FUSED] = torch.zeros(plan.shape.matrices[_FUSED])
    found[_FUSED][:, -plan.shape.hidden :] = torch.eye(plan.shape.hidden)
    return {**found, "norm.weight": gains * _CALM, _HEAD: head}
