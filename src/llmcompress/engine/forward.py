"""Running a layer over all calibration windows, stopping at the inputs of its stages: at once, or again and again.

Both ways give the same numbers. `Suspended` runs one forward per batch and pauses every batch before a stage, while the
stage is solved: each batch then goes on with the compressed weights. It holds what all batches have alive. `Replayed`
starts each batch anew for every stage and holds one batch.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn

from llmcompress.errors import RunError
from llmcompress.model.build import StreamedModel
from llmcompress.store.staging import Hidden

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Stream:
    """A layer, and the hidden states that enter it: in the model as compressed so far, or as it was."""

    layer: nn.Module
    hidden: Hidden


class Forward(Protocol):
    """All batches of a stream on their way through a layer."""

    def inputs(self, wanted: Mapping[str, str]) -> Iterator[Inputs]:
        """Per batch, the inputs of the spaces in `wanted` (space to the module path of a matrix that reads it).

        Stages must be asked for in order of execution. A space of an expert no token was sent to is absent.
        """
        ...

    def outputs(self) -> Iterator[Tensor]:
        """Per batch, what leaves the layer."""
        ...

    def close(self) -> None:
        """Let go of whatever is under way."""
        ...


class Replayed:
    """Each batch starts anew for every stage and stops at the last wanted input; one batch is alive."""

    def __init__(self, model: StreamedModel, number: int, stream: Stream, batch: int) -> None:
        self.model, self.number, self.stream, self.batch = model, number, stream, batch

    def inputs(self, wanted: Mapping[str, str]) -> Iterator[Inputs]:
        seen: Inputs = {}
        # experts run in order of their numbers and may be skipped: nothing tells which of them is the last
        last = None if len(wanted) > 1 else next(iter(wanted))
        handles = []
        for space, path in wanted.items():

            def see(_: nn.Module, args: tuple[Tensor, ...], space: str = space) -> None:
                seen[space] = args[0]
                if space == last:
                    raise _Enough

            handles.append(self.stream.layer.get_submodule(path).register_forward_pre_hook(see))
        try:
            for states in self.stream.hidden.batches(self.batch):
                seen.clear()
                with suppress(_Enough):
                    self.model.call(self.number, self.stream.layer, states.to(self.model.device))
                yield dict(seen)
        finally:
            for handle in handles:
                handle.remove()

    def outputs(self) -> Iterator[Tensor]:
        for states in self.stream.hidden.batches(self.batch):
            yield self.model.call(self.number, self.stream.layer, states.to(self.model.device))

    def close(self) -> None:
        """Nothing is under way between two batches."""


class Suspended:
    """Every batch is a forward of its own, paused before each stage; all of them are alive."""

    def __init__(
        self, model: StreamedModel, number: int, stream: Stream, batch: int, spaces: Mapping[str, str]
    ) -> None:
        def forward(states: Tensor) -> Callable[[], Tensor]:
            return lambda: model.call(number, stream.layer, states.to(model.device))

        self._handles = [
            stream.layer.get_submodule(path).register_forward_pre_hook(_pause(space)) for space, path in spaces.items()
        ]
        self._batches = (greenlet(forward(states)) for states in stream.hidden.batches(batch))
        self._running: list[greenlet] | None = None

    def _all(self) -> list[greenlet]:
        if self._running is None:
            self._running = list(self._batches)
        return self._running

    def inputs(self, wanted: Mapping[str, str]) -> Iterator[Inputs]:
        (space,) = wanted
        for running in self._all():
            reached = running.switch()
            if running.dead or reached[0] != space:
                raise RunError(
                    f"a layer did not reach {space} when it should have", "its declaration has another order"
                )
            yield {space: reached[1]}

    def outputs(self) -> Iterator[Tensor]:
        for running in self._all():
            out = running.switch()
            if not running.dead:
                raise RunError(f"a layer stopped at {out[0]} after its last stage", "its declaration has another order")
            yield out

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        for running in self._running or ():
            running.throw(GreenletExit)


class _Enough(Exception):  # noqa: N818 (control flow, not an error)
    """Raised when every wanted input of a batch has been seen; the rest of the layer need not run."""


def _pause(space: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def see(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        waiting = getcurrent().parent
        if waiting is None:
            raise RunError(f"{space} was reached outside of a suspended forward")
        waiting.switch((space, args[0]))

    return see
