"""Gradients of what a model predicts at the outputs of all its matrices, one layer in memory at a time.

All windows run forward once, the hidden states that enter each layer being kept on disk; then gradients run back from
the head, through each layer anew, to the embedding.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from llmcompress.engine.plan.memory_model import HEAD_TOKENS
from llmcompress.engine.process.process_memory import return_freed_memory
from llmcompress.errors import RunError
from llmcompress.model.gradients import LayerGradient, embedding_gradient, head_gradient
from llmcompress.model.per_thread import PerThread
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.stats.fisher import UNKNOWN, Fisher, of_matrix
from llmcompress.store.folder import Folder
from llmcompress.store.windows import Windows, WindowsWriter
from llmcompress.workers import Workers

EMBEDDING, HEAD = "embedding", "head"
ENTERING, GRADIENT = "entering", "gradient"
RECORDED = ("record-entering", "record-gradient")
"""What the names of files begin with that a pass leaves."""

P = TypeVar("P")
Watch = Callable[[int], None]
Found = dict[tuple[int, str] | str, Fisher]
"""Fisher information by (layer, path of the matrix below the layer), or by EMBEDDING or HEAD."""


class FisherSum(Protocol[P]):
    """Sums up the Fisher information of one layer's matrices.

    `part` takes the input [..., in] of a matrix and the gradient [..., out] at its output, in one window; any thread
    may call it. `add` and `finish` are called by one thread, in order of the windows' numbers. blind: paths of matrices
    that ran without gradients.
    """

    def part(self, path: str, x: Tensor, gradient: Tensor, window: int) -> P: ...

    def add(self, path: str, part: P, window: int) -> None: ...

    def finish(self, blind: Collection[str]) -> dict[str, Fisher]: ...


class TokenFisher:
    """Sums over tokens, each token with its own gradient."""

    def __init__(self) -> None:
        self._found: dict[str, Fisher] = {}

    def part(self, path: str, x: Tensor, gradient: Tensor, window: int) -> Fisher:
        return of_matrix(x, gradient)

    def add(self, path: str, part: Fisher, window: int) -> None:
        self._found[path] = self._found[path].plus(part) if path in self._found else part

    def finish(self, blind: Collection[str]) -> dict[str, Fisher]:
        return self._found | dict.fromkeys(blind, UNKNOWN)


class FinishedLayers:
    """The layers that an earlier start has finished, from the last layer backwards; here none, as nothing is kept."""

    def seed(self, name: str) -> int:
        """What the CRC-32 of a file begins with."""
        return 0

    def has(self, layer: int) -> bool:
        return False

    def add(self, layer: int) -> None:
        """Remember that a layer is finished."""


def fisher_information(
    model: StreamedModel,
    tokens: Tensor,
    paths: Sequence[Sequence[str]],
    seed: int,
    folder: Folder,
    workers: Workers,
    watch: Watch = lambda done: None,
    gathering: Callable[[int, Workers], FisherSum[Any]] = lambda number, workers: TokenFisher(),
    finished: FinishedLayers | None = None,
    outside: bool = True,
) -> Found:
    """Mean Fisher information per token of `tokens` [samples, length] for the matrices at `paths` of each layer.

    The gradients are those of the log-probabilities of drawn tokens; a generator made from `seed` and the number of a
    window draws the tokens of that window. folder: for hidden states and gradients of all layers; where layers may be
    `finished`, files of an earlier start are used again. watch: called after each of 2 * layers + 1 steps with how many
    are done. gathering: how the information of a layer's matrices is summed up, by the layer's number. outside: whether
    that of head and embedding is wanted too. The numbers are the same for any number of threads. Absent are matrices
    that no token came to or that layers do not run, and layers that were finished before; those of matrices that ran
    without gradients are `UNKNOWN`. RunError for gradients that are not finite.
    """
    count, past = len(model.layers), finished or FinishedLayers()
    left = next((number for number in range(count) if past.has(number)), count)
    with model.outer(embed=True, head=False):
        states = _States(folder, (*tokens.shape, model.prepare(tokens[:1])), model.dtype, finished)
    _forward(model, tokens, states, workers, watch, left)
    return_freed_memory()
    found: Found = {}
    written = states.known(GRADIENT, left)  # by an earlier start, which did not keep what it knew of the head
    if written and outside and not states.known(ENTERING, count):
        raise states.lacking("what leaves the last layer")
    if outside or not written:
        with model.outer(embed=False, head=True) as causal:
            gradients = _head(model, causal, states, seed, found, outside, workers)
            if written:
                deque(gradients, maxlen=0)
            else:
                states.write(GRADIENT, count, gradients)
                watch(count + 1)
    for number in reversed(range(left)):
        return_freed_memory()
        _layer(model, number, states, paths[number], found, gathering(number, workers), workers)
        past.add(number)
        states.drop(number)
        watch(2 * count + 1 - number)
    return_freed_memory()
    if outside:
        with model.outer(embed=True, head=False) as causal:
            for window, back in enumerate(_read(states.of(GRADIENT, 0))):
                _add(found, EMBEDDING, embedding_gradient(model, causal, tokens[window : window + 1], back))
    _refuse_infinite(found)
    return {name: part.times(1 / tokens.numel()) for name, part in found.items()}


class _States:
    """Files of the hidden states that enter each layer and of the gradients there; a file appears when it is whole.

    shape: of the states of one layer. finished: by an earlier start, whose files are used again; None for no such.
    """

    def __init__(
        self, folder: Folder, shape: tuple[int, ...], dtype: torch.dtype, finished: FinishedLayers | None
    ) -> None:
        self.folder, self.shape, self.dtype, self.finished = folder, shape, dtype, finished
        self._found: dict[tuple[str, int], Windows] = {}

    def __len__(self) -> int:
        return self.shape[0]

    def of(self, kind: str, layer: int) -> Windows:
        return self._found[kind, layer]

    def known(self, kind: str, layer: int) -> bool:
        """Whether there is such a file: of this start, or one of an earlier start that is whole."""
        stem = self._stem(kind, layer)
        for name in self.folder.names() if self.finished and (kind, layer) not in self._found else ():
            windows = Windows(self.folder / name, self.shape, self.dtype)
            if name.startswith(stem) and name == f"{stem}-{windows.crc(self._seed(stem)) or 0:08x}.bin":
                self._found[kind, layer] = windows
        return (kind, layer) in self._found

    def write(self, kind: str, layer: int, batches: Iterable[Tensor]) -> None:
        stem = self._stem(kind, layer)
        writer = WindowsWriter(self.folder / f"record-{kind}.partial", self.dtype, self._seed(stem))
        for batch in batches:
            writer.append(batch)
        self._found[kind, layer] = writer.finish(lambda crc: f"{stem}-{crc or 0:08x}.bin")

    def drop(self, layer: int) -> None:
        """Give up what enters a finished layer, and the gradient at what leaves the layer."""
        for kind, number in ((ENTERING, layer), (GRADIENT, layer + 1)):
            self._found.pop((kind, number)).file.rename(f"record-{kind}.partial")  # to be written over next

    def lacking(self, what: str) -> RunError:
        """The error for files that an earlier start should have left."""
        return RunError(f"{self.folder.path} lacks {what}, or it is damaged", "start anew with --restart")

    def _stem(self, kind: str, layer: int) -> str:
        return f"record-{kind}-{layer:05d}"

    def _seed(self, stem: str) -> int:
        return (self.finished or FinishedLayers()).seed(stem)


def _forward(model: StreamedModel, tokens: Tensor, states: _States, workers: Workers, watch: Watch, left: int) -> None:
    """Write the hidden states that enter each of the first `left` layers, and those that leave the last layer.

    The latter are not needed where the gradient at the last of these layers is known.
    """
    known = states.known(GRADIENT, left)
    if left < len(model.layers) and not known:
        raise states.lacking(f"the gradients at layer {left}")
    last = left - 1 if known else left
    if last >= 0 and not states.known(ENTERING, 0):
        with model.outer(embed=True, head=False):
            states.write(ENTERING, 0, model.embedded(tokens, 1))
    model.prepare_batch(1, tokens.shape[1])
    for number in range(last):
        if not states.known(ENTERING, number + 1):
            with model.layer(number) as layer:
                before = _on(model, states.of(ENTERING, number))
                states.write(ENTERING, number + 1, workers.in_order(partial(model.call, number, layer), before))
            if not known:
                watch(number + 1)


def _head(
    model: StreamedModel,
    causal: torch.nn.Module,
    states: _States,
    seed: int,
    found: Found,
    informed: bool,
    workers: Workers,
) -> Iterator[Tensor]:
    """The gradients at the outputs of the last layer; if `informed`, what is known of the head is added to `found`."""
    heads = PerThread(causal)

    def back(numbered: tuple[int, Tensor]) -> tuple[list[Fisher | None], Tensor]:
        window, hidden = numbered
        generator = torch.Generator().manual_seed((seed + window) % (1 << 63))
        (head,) = heads.get()
        split = torch.split(hidden, HEAD_TOKENS, dim=1)
        pieces = [head_gradient(model, head, piece, generator, informed) for piece in split]
        return [part for part, _ in pieces], torch.cat([gradient for _, gradient in pieces], dim=1)

    windows = enumerate(_on(model, states.of(ENTERING, len(model.layers))))
    for parts, gradient in workers.in_order(back, windows):
        for part in parts:
            if part is not None:
                _add(found, HEAD, part)
        yield gradient


def _layer(
    model: StreamedModel,
    number: int,
    states: _States,
    paths: Sequence[str],
    found: Found,
    gathered: FisherSum[Any],
    workers: Workers,
) -> None:
    """Add the information of the matrices of a layer to `found`; write the gradients at the inputs of the layer."""
    with model.layer(number) as layer:
        back = LayerGradient(model, number, layer, paths, gathered.part)

        def through() -> Iterator[Tensor]:
            kept = [_on(model, states.of(kind, at)) for kind, at in ((ENTERING, number), (GRADIENT, number + 1))]
            numbered = zip(range(len(states)), *kept, strict=True)
            for window, (parts, gradient) in enumerate(workers.in_order(lambda item: back(*item), numbered)):
                for path in paths:
                    for part in parts.get(path, []):
                        gathered.add(path, part, window)
                yield gradient

        with back.watching():
            states.write(GRADIENT, number, through())
    found |= {(number, path): fisher for path, fisher in gathered.finish(back.blind).items()}


def _on(model: StreamedModel, windows: Windows) -> Iterator[Tensor]:
    return (window.to(model.device) for window in _read(windows))


def _read(windows: Windows) -> Iterator[Tensor]:
    """One window at a time [1, length, width]."""
    return (windows.read(slice(number, number + 1)) for number in range(windows.shape[0]))


def _add(found: Found, name: tuple[int, str] | str, part: Fisher) -> None:
    found[name] = found[name].plus(part) if name in found else part


def _refuse_infinite(found: Found) -> None:
    for name, part in found.items():
        if not bool(torch.isfinite(part.outputs.sum() + part.inputs.sum())):
            where = name if isinstance(name, str) else f"{name[1]} of layer {name[0]}"
            raise RunError(f"the gradients of {where} are not finite", "look at its weights, and at config.json")
