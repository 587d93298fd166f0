"""Passes of all calibration windows through a layer, each stopping at the inputs of one stage.

Every pass starts each batch anew, so that one batch per thread is in memory. What is costly before the stage is not run
again but read from disk (bypass.py): attention and feed-forward are computed once per layer, and the result is the same
to the bit.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from llmcompress.engine.run.bypass import Bypass, Bypasses, find_bypasses
from llmcompress.engine.run.current_batch import Batch, CurrentBatch, stop_forward, until_stopped
from llmcompress.engine.run.kv_ranges import KeyValueWatch
from llmcompress.engine.run.prefetch import Prefetch
from llmcompress.model.experts import Expert
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.stats.key_value_range import KeyValueRange
from llmcompress.store.folder import Folder, HeldFile
from llmcompress.store.windows import Windows, WindowsShare, WindowsWriter, write_windows
from llmcompress.workers import WHOLE, Workers

_EXCHANGED = 8192  # tokens that a process runs before it waits for others

Inputs = dict[str, Tensor]
R = TypeVar("R")


@dataclass(frozen=True)
class Stream:
    """A layer, and the hidden states that enter it: in the model as compressed so far, or as it was."""

    name: str
    layer: nn.Module
    hidden: Windows


@dataclass(frozen=True)
class Recording:
    """Where the inputs of which spaces may be recorded. spaces: space to the module path of a matrix that reads it."""

    folder: Folder | None
    spaces: Mapping[str, str]


NOT_RECORDED = Recording(None, {})


class Forward:
    """All batches of a stream on their way through a layer."""

    def __init__(
        self,
        model: StreamedModel,
        number: int,
        stream: Stream,
        batch: int,
        workers: Workers,
        recording: Recording = NOT_RECORDED,
        watches_cache: bool = False,
    ) -> None:
        """workers: share the batches. recording: of inputs of modules that later passes are to bypass.

        watches_cache: whether passes over stages also note how large keys and values become, for `key_value_range`.
        """
        self.model, self.number, self.stream, self.workers = model, number, stream, workers
        count, length = stream.hidden.shape[:2]
        self.length = length  # tokens of a window
        self.batches = -(-count // batch)  # of all processes
        self._at_once = max(1, _EXCHANGED // (batch * length))
        own, hidden = workers.part(), stream.hidden
        if own != WHOLE:
            hidden = WindowsShare(stream.hidden, batch, own)
            count = hidden.shape[0]
        self._spans = [slice(start, min(start + batch, count)) for start in range(0, count, batch)]
        self._windows = Prefetch(hidden, self._spans, model.device)
        for size in dict.fromkeys(span.stop - span.start for span in self._spans):
            model.prepare_batch(size, length)
        self._current = CurrentBatch()
        self._watches_cache = watches_cache
        self._watch: KeyValueWatch | None = None  # of the last pass that reached the cache
        found: list[Bypass] = []
        # a GPU runs a module again in less time than what it read and returned takes to a disk and back
        if recording.spaces and count and model.device.type == "cpu":
            found = find_bypasses(
                stream.layer, recording.spaces, lambda: model.call(number, stream.layer, hidden.read(slice(0, 1)))
            )
        whose = stream.name if own == WHOLE else f"{own.number}-{stream.name}"  # processes may share the folder
        self._left: Windows | None = None  # what leaves the layer, once it is concluded

        # functions without this object: in a circle with it, a layer would stay until Python looks for circles
        def record(name: str) -> HeldFile:
            assert recording.folder is not None
            return recording.folder / f"record-{whose}-{name}.bin"

        def writer(space: str, side: str) -> WindowsWriter:
            return WindowsWriter(record(f"{space}-{side}"), model.dtype)

        self.record = record
        """A file of this stream and process, for what is of use while the layer is worked on."""
        self.bypasses = Bypasses(stream.layer, found, writer, self._current)

    def conclude(self, onward: bool) -> None:
        """Give up the layer: no pass over its stages will follow. onward: whether what leaves it will be asked for."""
        if onward:
            self._left = write_windows(self._outputs(), self.record("left"), self.model.dtype)
        self.stream = replace(self.stream, layer=nn.Module())
        self.renew()

    def renew(self) -> None:
        """Forget what was recorded and seen: the layer is no longer what it was."""
        self.bypasses = Bypasses(self.stream.layer, [], self.bypasses.writer, self._current)
        self._watch = None

    def inputs(self, wanted: Mapping[str, str]) -> Iterator[Inputs]:
        """Per batch, the inputs of the spaces in `wanted` (space to the module path of a matrix that reads it).

        A space that no token reached is absent, such as that of an expert. Stages come in order of execution.
        """
        return self.workers.interleave_ranks(self._inputs(wanted), self.batches, self._at_once)

    def _inputs(self, wanted: Mapping[str, str]) -> Iterator[Inputs]:
        """Of the batches of this process."""
        # experts run in order of their numbers and may be skipped: nothing tells which of them is the last
        only = None if len(wanted) > 1 else next(iter(wanted))
        watch = KeyValueWatch() if self._watches_cache else None
        experts = self._experts(wanted)
        ends = {*experts} if only is None else {only, *experts}
        with self._seeing(wanted, None, ends), _ended(experts), self.bypasses.recording(only) as record:
            for batch in self.workers.in_order(partial(self._stage, watch), self._spans):
                record(batch)
                yield batch.seen
        if watch is not None and watch.seen.key is not None:
            self._watch = watch

    def outputs(self) -> Iterator[Tensor]:
        """Per batch, what leaves the layer."""
        return self.workers.interleave_ranks(self._outputs(), self.batches, self._at_once)

    def _outputs(self) -> Iterator[Tensor]:
        if self._left is not None:
            yield from map(self._left.read, self._spans)
            return
        with self.bypasses.in_place():
            yield from self.workers.in_order(self._call, self._spans)

    def summaries_and_outputs(
        self, wanted: Mapping[str, str], summary: Callable[[Tensor], R]
    ) -> Iterator[tuple[dict[str, R], Tensor]]:
        """Per batch, a summary of the input of every space in `wanted`, and what leaves the layer: one whole pass.

        An input is summed up when it is seen, before a later module may write over it.
        """
        return self.workers.interleave_ranks(self._summaries_and_outputs(wanted, summary), self.batches, self._at_once)

    def _summaries_and_outputs(
        self, wanted: Mapping[str, str], summary: Callable[[Tensor], R]
    ) -> Iterator[tuple[dict[str, R], Tensor]]:
        def through(span: slice) -> tuple[dict[str, R], Tensor]:
            out = self._call(span)
            return self._current.batch.seen, out

        with self._seeing(wanted, summary):
            yield from self.workers.in_order(through, self._spans)

    def key_value_range(self) -> KeyValueRange:
        """How large keys and values became in the last pass that reached the cache; if none did, by a pass of its own.

        The weights of the stages before the cache no longer change once a pass has come that far, so the keys and
        values of that pass are the ones that the compressed layer computes.
        """
        return self.key_value_range_now() if self._watch is None else self._watch.of_all(self.workers)

    def key_value_range_now(self) -> KeyValueRange:
        """How large keys, after rotation, and values are as the layer stands: a pass that ends at the cache."""
        watch = KeyValueWatch(ending=True)
        for _ in self.workers.in_order(partial(self._stage, watch), self._spans):
            pass
        return watch.of_all(self.workers)

    @contextmanager
    def _seeing(
        self, wanted: Mapping[str, str], summary: Callable[[Tensor], Any] | None = None, ends: Container[str] = ()
    ) -> Iterator[None]:
        """Within, batches note the inputs of the spaces in `wanted`, or summaries; a forward stops at any of `ends`."""

        def see(space: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                self._current.batch.seen[space] = args[0] if summary is None else summary(args[0])
                if space in ends:
                    stop_forward()

            return hook

        modules = {space: self.stream.layer.get_submodule(path) for space, path in wanted.items()}
        handles = [module.register_forward_pre_hook(see(space)) for space, module in modules.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _experts(self, wanted: Mapping[str, str]) -> dict[str, tuple[nn.Module, Expert]]:
        """By space in `wanted`, the block of experts and the expert of the matrix that reads it, where there is one."""
        parents = {space: path.rpartition(".")[0] for space, path in wanted.items()}
        modules = {space: (path, self.stream.layer.get_submodule(path)) for space, path in parents.items()}
        return {
            space: (self.stream.layer.get_submodule(path.rpartition(".")[0]), module)
            for space, (path, module) in modules.items()
            if isinstance(module, Expert)
        }

    def _stage(self, watch: KeyValueWatch | None, span: slice) -> Batch:
        """One batch through the layer, until a hook has seen what it wants."""
        with until_stopped():
            self._call(span, watch)
        return self._current.batch

    def _call(self, span: slice, watch: KeyValueWatch | None = None) -> Tensor:
        self._current.begin(span)
        return self.model.call(self.number, self.stream.layer, self._windows.read(span), watch)


@contextmanager
def _ended(experts: Mapping[str, tuple[nn.Module, Expert]]) -> Iterator[None]:
    """Within, experts stop where their input has been seen and give zeros, and the layer stops after their block."""

    def shown(expert: Expert) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            with until_stopped():
                Expert.forward(expert, x)
            return x.new_zeros(()).expand_as(x)

        return forward

    blocks = {block for block, _ in experts.values()}
    handles = [block.register_forward_hook(lambda *_: stop_forward()) for block in blocks] if len(blocks) == 1 else []
    try:
        for _, expert in experts.values():
            expert.forward = shown(expert)  # type: ignore[method-assign, assignment]
        yield
    finally:
        for handle in handles:
            handle.remove()
        for _, expert in experts.values():
            expert.__dict__.pop("forward", None)
