"""The divergence of a model that is trained from its original, and its gradients, one layer in memory at a time.

Windows run forward through all layers, the hidden states that enter each layer being kept in memory, then back, each
layer being run anew. The original runs once: of it the states behind its last layer are kept, from which its head makes
the logits again.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from llmcompress.engine.plan.memory_model import HEAD_TOKENS
from llmcompress.engine.train.places import TrainedPlace, add_slopes, mark, slopes_of, weight_at
from llmcompress.engine.train.trained import Trained
from llmcompress.model.per_thread import PerThread
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.store.windows import Windows
from llmcompress.workers import Workers


class Distillation:
    """A student beside its teacher on windows of text, within `heads`.

    states: of the teacher, behind its last layer. tokens [windows, length]. places: of trained tensors, by layer, and
    last those behind the layers.
    """

    def __init__(
        self,
        student: StreamedModel,
        teacher: StreamedModel,
        states: Windows,
        tokens: Tensor,
        trained: Mapping[str, Trained],
        places: Sequence[Sequence[TrainedPlace]],
        workers: Workers,
    ) -> None:
        self.student, self.teacher, self.states, self.tokens = student, teacher, states, tokens
        self.trained, self.places, self.workers = trained, places, workers
        self._outer: nn.Module | None = None

    @contextmanager
    def heads(self) -> Iterator[None]:
        """A context in which the embedding and both heads are in memory."""
        student, teacher = self.student, self.teacher
        with student.outer(embed=True, head=True) as self._outer, teacher.outer(embed=False, head=True) as target:
            student.prepare(self.tokens[:1])
            student.prepare_batch(1, self.tokens.shape[1])
            mark(self._outer, self.places[-1])
            self._heads = PerThread(self._outer, target)
            yield

    def divergence(self, windows: Sequence[int]) -> float:
        """The mean KL(teacher || student) of all tokens of some windows."""
        self._refresh()
        hidden = self._entering(windows)
        for number in range(len(self.student.layers)):
            hidden = self._advance(number, hidden)
        found = self.workers.in_order(self._compared, zip(windows, hidden, strict=True))
        return sum(found) / len(windows)

    def gradients(self, windows: Sequence[int]) -> tuple[float, dict[str, Tensor]]:
        """The same mean, and its gradient at the logarithms of every trained tensor that a token reached."""
        entering = [self._entering(windows)]
        for number in range(len(self.student.layers)):
            entering.append(self._advance(number, entering[-1]))
        found: dict[str, Tensor] = {}
        total, back = 0.0, []
        self._refresh()
        behind = zip(windows, entering.pop(), strict=True)
        for divergence, slopes, gradient in self.workers.in_order(self._learnt, behind):
            total += divergence
            add_slopes(found, slopes)
            back.append(gradient)
        for number in reversed(range(len(self.student.layers))):
            pairs = zip(entering.pop(), back, strict=True)
            with self.student.layer(number) as layer:
                mark(layer, self.places[number])
                through = self.workers.in_order(partial(self._through, number, layer), pairs)
                back = []
                for slopes, gradient in through:
                    add_slopes(found, slopes)
                    back.append(gradient)
        for slope in found.values():
            slope /= len(windows)
        return total / len(windows), found

    def _entering(self, windows: Sequence[int]) -> list[Tensor]:
        assert self._outer is not None  # within `heads`
        with torch.no_grad():
            return [self.student.entering(self._outer, self.tokens[[window]]) for window in windows]

    def _advance(self, number: int, hidden: Sequence[Tensor]) -> list[Tensor]:
        with self.student.layer(number) as layer:
            return list(self.workers.in_order(partial(self.student.call, number, layer), hidden))

    def _refresh(self) -> None:
        """Give what stands behind the layers its values of now."""
        assert self._outer is not None  # within `heads`
        for place in self.places[-1]:
            weight_at(self._outer, place).data.copy_(self.trained[place.name].value())

    def _through(self, number: int, layer: nn.Module, pair: tuple[Tensor, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Slopes of a layer's trained tensors, and the gradient at its input, from that at its output."""
        hidden, gradient = pair

        def run(entering: Tensor) -> tuple[Tensor, Tensor]:
            return self.student.call(number, layer, entering), gradient

        return slopes_of(layer, self.places[number], self.trained, hidden, run)

    def _learnt(self, item: tuple[int, Tensor]) -> tuple[float, dict[str, Tensor], Tensor]:
        """The divergence of a window from the states behind the last layer, and gradients there."""
        total, found, back = 0.0, dict[str, Tensor](), []
        own, _ = self._heads.get()
        for hidden, wanted in self._pieces(*item):

            def loss(entering: Tensor, wanted: Tensor = wanted) -> tuple[Tensor, None]:
                nonlocal total
                divergence = _divergence(wanted, self.student.logits(own, entering))
                total += float(divergence.detach())
                return divergence / item[1].shape[1], None

            slopes, gradient = slopes_of(own, self.places[-1], self.trained, hidden, loss)
            add_slopes(found, slopes)
            back.append(gradient)
        return total / item[1].shape[1], found, torch.cat(back, dim=1)

    def _compared(self, item: tuple[int, Tensor]) -> float:
        """The divergence of a window, from the states behind the last layer."""
        own, _ = self._heads.get()
        parts = [float(_divergence(wanted, self.student.logits(own, hidden))) for hidden, wanted in self._pieces(*item)]
        return sum(parts) / item[1].shape[1]

    def _pieces(self, window: int, hidden: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The student's states of a few tokens at a time, and the log-probabilities that the teacher gives there."""
        _, target = self._heads.get()
        states = self.states.read(slice(window, window + 1)).to(self.teacher.device)
        for own, wanted in zip(*(torch.split(part, HEAD_TOKENS, dim=1) for part in (hidden, states)), strict=True):
            yield own, self.teacher.logits(target, wanted).to(torch.float32).log_softmax(dim=-1)


def _divergence(wanted: Tensor, logits: Tensor) -> Tensor:
    """The sum of KL(p || q) over tokens. wanted: log p; both [1, tokens, vocabulary]."""
    logs = logits.to(torch.float32).log_softmax(dim=-1)
    return (wanted.exp() * (wanted - logs)).sum()
