"""What a model loses with a layer: how little the layer changes its input, and how far the logits move without it.

Layers are read one at a time, each once per pass, however many variants of the model run through it.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from llmcompress.engine.plan.memory_model import HEAD_TOKENS
from llmcompress.engine.structure.source_model import layer_outputs
from llmcompress.errors import RunError
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.stats.similarity import Cosines, cosines
from llmcompress.store.folder import Folder, HeldFile
from llmcompress.store.windows import Windows, write_windows
from llmcompress.workers import Workers

Watch = Callable[[], None]


class Removal:
    """Scores the layers of a model. entering: the windows that enter the first layer. folder: for hidden states.

    watch: called after each layer that was read.
    """

    def __init__(
        self, model: StreamedModel, entering: Windows, batch: int, folder: Folder, workers: Workers, watch: Watch
    ) -> None:
        self.model, self.entering, self.batch, self.folder = model, entering, batch, folder
        self.workers, self.watch = workers, watch

    def similarities(self, span: int) -> list[float]:
        """Mean cosine between what enters layer l and what leaves layer l + span - 1, for every l with such a layer.

        ShortGPT's block influence is 1 less this for a span of 1 (arXiv:2403.03853, equation 1); for longer ones it is
        the criterion of arXiv:2403.17887, up to the arc cosine. RunError for states that are not finite.
        """
        passed, found = [self.entering], []
        for number in range(len(self.model.layers)):
            with self.model.layer(number) as layer:
                file = self.folder / f"states-{number % (span + 1)}.bin"
                passed.append(self._layer_outputs(number, layer, passed[-1], file))
            if len(passed) > span:
                found.append(self._cosine(passed[-1 - span], passed[-1]))
                passed.pop(0)
            if found and not -1.01 < found[-1] < 1.01:
                raise RunError(f"what leaves layer {number} is not finite", "use --compute-dtype float32")
            self.watch()
        return found

    def divergences(
        self, layers: Sequence[int], starts: Collection[int], span: int, reference: Windows | None
    ) -> tuple[dict[int, float], Windows]:
        """KL divergence (nats per token) of the model of `layers` without `span` of them from each place in `starts`.

        The divergence is from the model whose last hidden states are `reference`; without one, from the model of all
        `layers`. Returned second are the last hidden states of that model. All variants pass a layer while it is in
        memory.
        """
        main, variants = self.entering, dict[int, Windows]()
        for place, number in enumerate(layers):
            with self.model.layer(number) as layer:
                for start, windows in variants.items():
                    if place >= start + span:
                        variants[start] = self._layer_outputs(number, layer, windows, windows.file)
                if place in starts:
                    copied = (self._read(main, part) for part in self._spans(main))
                    variants[place] = write_windows(copied, self.folder / f"without-{place}.bin", self.model.dtype)
                main = self._layer_outputs(number, layer, main, self.folder / f"states-{place % 2}.bin")
            self.watch()
        if reference is None:
            main = reference = _renamed(main, self.folder / "reference.bin")
        found = dict(zip(variants, self._head(reference, list(variants.values())), strict=True))
        return found, reference

    def _layer_outputs(self, number: int, layer: nn.Module, hidden: Windows, file: HeldFile) -> Windows:
        return layer_outputs(self.model, number, layer, hidden, self.batch, file, self.workers)

    def _spans(self, windows: Windows) -> list[slice]:
        count = windows.shape[0]
        return [slice(start, min(start + self.batch, count)) for start in range(0, count, self.batch)]

    def _read(self, windows: Windows, span: slice) -> Tensor:
        return windows.read(span).to(self.model.device)

    def _cosine(self, before: Windows, after: Windows) -> float:
        total = Cosines(0.0, 0)
        for part in self.workers.in_order(
            # without what travels with the hidden states to later layers
            lambda span: cosines(*(self.model.read_by_head(self._read(rows, span)) for rows in (before, after))),
            self._spans(after),
        ):
            total = total.plus(part)
        return total.mean

    @torch.no_grad()
    def _head(self, reference: Windows, others: Sequence[Windows]) -> list[float]:
        """Mean KL(reference || other) over all tokens, in float32 on the full vocabulary, for each of `others`."""
        totals = [0.0] * len(others)
        with self.model.outer(embed=False, head=True) as causal:
            for number in range(reference.shape[0]):
                window = slice(number, number + 1)
                states = [self._read(windows, window) for windows in (reference, *others)]
                for start in range(0, reference.shape[1], HEAD_TOKENS):
                    piece = slice(start, start + HEAD_TOKENS)
                    wanted = self._logs(causal, states[0][:, piece])
                    chance = wanted.exp()
                    for place, hidden in enumerate(states[1:]):
                        moved = chance * (wanted - self._logs(causal, hidden[:, piece]))
                        totals[place] += float(moved.sum(dtype=torch.float64))
        found = [total / (reference.shape[0] * reference.shape[1]) for total in totals]
        if not all(value == value and abs(value) < float("inf") for value in found):
            raise RunError("logits of a model without some layers are not finite", "use --compute-dtype float32")
        return found

    def _logs(self, causal: nn.Module, hidden: Tensor) -> Tensor:
        return self.model.logits(causal, hidden).to(torch.float32).log_softmax(dim=-1)


def _renamed(windows: Windows, file: HeldFile) -> Windows:
    return Windows(windows.file.rename(file.name), windows.shape, windows.dtype)
