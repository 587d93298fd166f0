"""What a head loses against its target on windows of text, and the gradients: at each depth as when so many tokens were
drafted before."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from llmcompress.engine.draft.draft_plan import DraftPlan
from llmcompress.engine.plan.memory_model import HEAD_TOKENS
from llmcompress.engine.train.training import TrainingText
from llmcompress.model.draft_heads.base import DraftHead, DraftShape, TargetSample
from llmcompress.model.per_thread import PerThread
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.store.windows import Windows
from llmcompress.workers import Workers

_WINDOWS = 16  # that tell how large channels are


class _Seen(NamedTuple):
    """Of one window: embeddings [rows, hidden], states [rows, width], and the chances that the target gives the tokens
    that can be drafted after each row [rows, draft vocabulary] float32."""

    embedded: Tensor
    states: Tensor
    wanted: Tensor


class _AtHead(NamedTuple):
    """Of some tokens: what the target's head reads [tokens, hidden], what it gives, and the logits that are made of it,
    both [tokens, vocabulary]."""

    read: Tensor
    given: Tensor
    logits: Tensor


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
        sample = self._sample(model.causal)
        self.trained = plan.kind.start(plan.shape, sample, plan.opened.text.seed)
        self._depths = plan.kind.depths

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

    def _loss(self, head: DraftHead, window: int) -> Tensor:
        """The mean over depths of the mean KL(p || q) over rows, both of tokens that can be drafted alone, times p's
        share of all tokens."""
        total = torch.zeros((), device=self.model.device)
        for chances, wanted in self._judged(head, self._seen(window), self._depths):
            share = wanted.sum(dim=-1)
            own = torch.special.xlogy(wanted, wanted).sum(dim=-1) - torch.special.xlogy(share, share)
            total = total + (own - (wanted * chances).sum(dim=-1)).mean()
        return total / self._depths

    def _judged(self, head: DraftHead, seen: _Seen, depths: int) -> Iterator[tuple[Tensor, Tensor]]:
        """By depth, log-probabilities of the head and probabilities of the target, both [rows, draft vocabulary]."""
        outputs = head.unrolled(seen.embedded, seen.states, depths)
        for depth, output in enumerate(outputs):
            yield head.logits(output[depth:]).to(torch.float32).log_softmax(dim=-1), seen.wanted[depth:]

    def _seen(self, window: int) -> _Seen:
        (causal,) = self._threads.get()
        with torch.no_grad():
            span, device = slice(window, window + 1), self.model.device
            table: Tensor = causal.get_submodule(self.model.spec.embed).weight  # type: ignore[assignment]
            embedded = table[self.tokens[window, 1:].to(device)].to(self.model.dtype)
            pieces = torch.split(self.last.read(span).to(device), HEAD_TOKENS, dim=1)
            wanted, read = zip(*(self._judged_by(causal, piece) for piece in pieces), strict=True)
            if self.auxiliary:
                states = torch.cat([item.read(span)[0] for item in self.auxiliary], dim=-1).to(device)
            else:
                states = torch.cat(read)
            return _Seen(embedded, states[:-1], torch.cat(wanted)[1:])

    def _judged_by(self, causal: nn.Module, last: Tensor) -> tuple[Tensor, Tensor]:
        """Chances [tokens, draft vocabulary] float32 by the target, and what its head reads [tokens, hidden]."""
        at = self._at_head(causal, last)
        logits = at.logits.to(torch.float32)
        return (logits[:, self.ids] - logits.logsumexp(dim=-1, keepdim=True)).exp(), at.read

    def _at_head(self, causal: nn.Module, last: Tensor) -> _AtHead:
        """What the target's head makes of what leaves all layers, [1, tokens, hidden]."""
        seen: list[tuple[Tensor, Tensor]] = []
        head = causal.get_submodule(self.model.spec.head)
        handle = head.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
        try:
            logits = self.model.logits(causal, last)
        finally:
            handle.remove()
        read, given = seen[0]
        return _AtHead(read[0], given[0], logits[0])

    def _head(self, learning: bool) -> DraftHead:
        """The head as it is now, in the type and on the device of the target."""
        place, dtype = self.model.device, self.model.dtype
        weights = {
            name: item.value().to(place, dtype, copy=True).requires_grad_(learning)
            for name, item in self.trained.items()
        }
        return self.shape.head(weights)

    def _sample(self, causal: nn.Module) -> TargetSample:
        """What the head begins with."""
        head: Tensor = causal.get_submodule(self.model.spec.head).weight  # type: ignore[assignment]
        entering = self.last.read(slice(0, 1))[:, :HEAD_TOKENS].to(self.model.device)
        with torch.no_grad():
            at = self._at_head(causal, entering)
        read, given, logits = (part.to("cpu", torch.float32) for part in at)
        before = entering[0].to("cpu", torch.float32)
        normed = before / before.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-20)
        gains = (read.square().mean(dim=0) / normed.square().mean(dim=0).clamp(min=1e-12)).sqrt()
        known = logits.isfinite()  # tokens that are ruled out have no finite ones
        slope = float((logits[known] * given[known]).sum() / given[known].square().sum().clamp(min=1e-20))
        span = slice(0, min(_WINDOWS, len(self.tokens)))
        held = [item.read(span).to(torch.float32).flatten(0, 1) for item in self.auxiliary]
        states = torch.cat(held, dim=-1) if held else read
        return TargetSample(head[self.ids].to("cpu", torch.float32), states, gains, slope)


def frequent(tokens: Tensor, shape: DraftShape) -> Tensor:
    """The ids that come most often, as many as can be drafted, in rising order; of equal ones the lower. int64."""
    counts = torch.bincount(tokens.flatten(), minlength=shape.target_vocabulary)
    return counts.argsort(descending=True, stable=True)[: shape.vocabulary].sort().values
