"""Running a layer over all calibration windows, stopping at the inputs of its stages.

Every stage starts each batch anew and stops at its own input, so that one batch per thread is in memory. What is costly
before it has been done already: where the last thing a module does is a matrix (`o_proj` of an attention, `down_proj`
of a feed-forward), the matrix's input is recorded on disk when its stage comes, and what the module returns when it is
run next; from then on the module is not run again. So attention and feed-forward are computed once per layer, and the
result is the same to the bit.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from llmcompress.engine.run.prefetch import Feed
from llmcompress.model.build import StreamedModel
from llmcompress.model.cache import Change
from llmcompress.parallel import in_order
from llmcompress.processes import WHOLE, from_all, gathered, part
from llmcompress.stats.key_value_range import KeyValueRange
from llmcompress.store.windows import Windows, WindowsShare, WindowsWriter

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
class Bypass:
    """A module that ends in the matrix `last`, which reads `space`. width: of the tuple it returns, 0 if it is none."""

    space: str
    module: str
    last: str
    width: int


class Forward:
    """All batches of a stream on their way through a layer; what it records goes into `folder`."""

    def __init__(
        self,
        model: StreamedModel,
        number: int,
        stream: Stream,
        batch: int,
        folder: Path,
        spaces: Mapping[str, str],
        measuring: bool = False,
    ) -> None:
        """spaces: space to the module path of a matrix that reads it, for the stages whose inputs may be recorded.

        measuring: note how large keys and values become, for `key_value_range`.
        """
        self.model, self.number, self.stream, self.folder = model, number, stream, folder
        count, length = stream.hidden.shape[:2]
        self.length = length  # tokens of a window
        self.batches = -(-count // batch)  # of all processes
        self._at_once = max(1, _EXCHANGED // (batch * length))
        self._part, self._hidden = part(), stream.hidden
        if self._part != WHOLE:
            self._hidden = WindowsShare(stream.hidden, batch, self._part)
            count = self._hidden.shape[0]
        self._spans = [slice(start, min(start + batch, count)) for start in range(0, count, batch)]
        self._feed = Feed(self._hidden, self._spans, model.device)
        for size in dict.fromkeys(span.stop - span.start for span in self._spans):
            model.prepare_batch(size, length)
        # a GPU runs a module again in less time than what it read and returned takes to a disk and back
        self._bypasses = self._find(spaces) if spaces and count and model.device.type == "cpu" else []
        self._measuring = measuring
        self._watch: Change | None = None
        self._range: KeyValueRange | None = None
        self._entered: dict[str, Windows] = {}  # by space: what its matrix read
        self._left: dict[str, Windows] = {}  # by space: what the module returned
        self._local = threading.local()  # of each thread: the windows it runs, what it has seen, what modules returned

    def inputs(self, wanted: Mapping[str, str]) -> Iterator[Inputs]:
        """Per batch, the inputs of the spaces in `wanted` (space to the module path of a matrix that reads it).

        A space that was not reached is absent, as that of an expert without tokens. Stages come in order of execution.
        """
        return from_all(self._inputs(wanted), self.batches, self._at_once)

    def _inputs(self, wanted: Mapping[str, str]) -> Iterator[Inputs]:
        """Of the batches of this process."""
        # experts run in order of their numbers and may be skipped: nothing tells which of them is the last
        only = None if len(wanted) > 1 else next(iter(wanted))
        handles = [
            self.stream.layer.get_submodule(path).register_forward_pre_hook(self._see(space, space == only))
            for space, path in wanted.items()
        ]
        cached = KeyValueRange() if self._measuring else None
        recorded = any(bypass.space == only for bypass in self._bypasses)
        entering = self._writer(str(only), "in") if recorded else None
        leaving = {space: self._writer(space, "out") for space in self._entered if space not in self._left}
        try:
            with self._bypassed(), self._noting(cached):
                for seen, returned in in_order(self._stage, self._spans):
                    if entering is not None:
                        entering.append(seen[str(only)])
                    for space in list(leaving):
                        if space in returned:
                            leaving[space].append(returned[space])
                        else:  # this stage comes before the module
                            leaving.pop(space).abandon()
                    yield seen
        finally:
            for handle in handles:
                handle.remove()
        if cached is not None and cached.key is not None:
            self._range = cached
        if entering is not None:
            self._entered[str(only)] = entering.finish()
        for space, writer in leaving.items():
            self._left[space] = writer.finish()

    def outputs(self) -> Iterator[Tensor]:
        """Per batch, what leaves the layer."""
        return from_all(self._outputs(), self.batches, self._at_once)

    def _outputs(self) -> Iterator[Tensor]:
        with self._bypassed():
            yield from in_order(self._call, self._spans)

    def key_value_range(self) -> KeyValueRange:
        """How large keys and values became in the last pass that came so far; if none did, by a pass of its own.

        A stage that comes so far has been given its keys and values by the stages before it, as they will stay.
        """
        return self.keys_and_values() if self._range is None else _of_all(self._range)

    def keys_and_values(self) -> KeyValueRange:
        """How large keys, after rotation, and values are as the layer stands: a pass that ends at the cache."""
        seen = KeyValueRange()
        with self._noting(seen, ending=True):
            for _ in in_order(self._stage, self._spans):
                pass
        return _of_all(seen)

    def whole(self, wanted: Mapping[str, str], summary: Callable[[Tensor], R]) -> Iterator[tuple[dict[str, R], Tensor]]:
        """Per batch, a summary of the input of every space in `wanted`, and what leaves the layer: one pass of it all.

        Inputs are summed up as they are seen, before a later module may write over them.
        """
        return from_all(self._whole(wanted, summary), self.batches, self._at_once)

    def _whole(
        self, wanted: Mapping[str, str], summary: Callable[[Tensor], R]
    ) -> Iterator[tuple[dict[str, R], Tensor]]:
        def see(space: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                self._local.seen[space] = summary(args[0])

            return hook

        def through(span: slice) -> tuple[dict[str, R], Tensor]:
            self._local.seen = {}
            left = self._call(span)
            return self._local.seen, left

        modules = {space: self.stream.layer.get_submodule(path) for space, path in wanted.items()}
        handles = [module.register_forward_pre_hook(see(space)) for space, module in modules.items()]
        try:
            yield from in_order(through, self._spans)
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, space: str, enough: bool) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._local.seen[space] = args[0]
            if enough:
                raise _Enough

        return hook

    def _stage(self, span: slice) -> tuple[Inputs, Inputs]:
        self._local.seen = {}
        with suppress(_Enough):
            self._call(span)
        return self._local.seen, self._local.returned

    def _call(self, span: slice) -> Tensor:
        self._local.span, self._local.returned = span, {}
        states = self._feed.read(span)
        return self.model.call(self.number, self.stream.layer, states, self._watch)

    def _writer(self, space: str, side: str) -> WindowsWriter:
        whose = "" if self._part == WHOLE else f"{self._part.number}-"  # processes may share the folder
        return WindowsWriter(self.folder / f"record-{whose}{self.stream.name}-{space}-{side}.bin", self.model.dtype)

    @contextmanager
    def _bypassed(self) -> Iterator[None]:
        """Within, modules whose last input is recorded are not run."""
        modules = [
            (bypass, self.stream.layer.get_submodule(bypass.module))
            for bypass in self._bypasses
            if bypass.space in self._entered
        ]
        try:
            for bypass, module in modules:
                module.forward = self._shortcut(bypass)
            yield
        finally:
            for _, module in modules:
                module.__dict__.pop("forward", None)

    def _shortcut(self, bypass: Bypass) -> Callable[..., Any]:
        entered, left = self._entered[bypass.space], self._left.get(bypass.space)
        last = self.stream.layer.get_submodule(bypass.last)

        def forward(*_: Any, **__: Any) -> Any:
            recorded = (left or entered).read(self._local.span).to(self.model.device)
            out = recorded if left is not None else last(recorded)
            self._local.returned[bypass.space] = out
            return (out, *[None] * (bypass.width - 1)) if bypass.width else out

        return forward

    @contextmanager
    def _noting(self, seen: KeyValueRange | None, ending: bool = False) -> Iterator[None]:
        """Within, `seen` gets the keys and values that are cached; ending: a layer is not run beyond them."""

        def note(_: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            assert seen is not None
            seen.update(key, value)
            if ending:
                raise _Enough
            return key, value

        self._watch = None if seen is None else note
        try:
            yield
        finally:
            self._watch = None

    def _find(self, spaces: Mapping[str, str]) -> list[Bypass]:
        """Which modules end in a matrix that reads one of `spaces`: seen by running one window."""
        layer = self.stream.layer
        pairs = [(space, path, path.rpartition(".")[0]) for space, path in spaces.items() if "." in path]
        returned: dict[str, tuple[Any, Tensor | None]] = {}

        def keep(path: str) -> Callable[..., None]:
            def hook(_: nn.Module, __: Any, out: Any) -> None:
                returned[path] = (out, out.clone() if isinstance(out, Tensor) else None)

            return hook

        handles = [
            layer.get_submodule(path).register_forward_hook(keep(path))
            for path in {name for _, *names in pairs for name in names}
        ]
        try:
            with torch.no_grad():
                first = self._hidden.read(slice(0, 1)).to(self.model.device)
                self.model.call(self.number, layer, first)
        finally:
            for handle in handles:
                handle.remove()
        found = []
        for space, path, parent in pairs:
            if path in returned and parent in returned:
                (out, untouched), (end, _) = returned[path], returned[parent]
                values = end if isinstance(end, tuple) else (end,)
                if untouched is not None and _is_same(values, out, untouched):
                    found.append(Bypass(space, parent, path, len(values) if isinstance(end, tuple) else 0))
        return found


def _of_all(seen: KeyValueRange) -> KeyValueRange:
    """What the processes have seen together."""
    every = KeyValueRange()
    for key, value in gathered((seen.key, seen.value)):
        if key is not None and value is not None:
            every.include(key, value)
    return every


def _is_same(values: tuple[Any, ...], out: Tensor, untouched: Tensor) -> bool:
    """Whether a module returned just what its matrix did: the very memory, unchanged. Equal numbers might be chance."""
    first, *rest = values
    return (
        isinstance(first, Tensor)
        and first.data_ptr() == out.data_ptr()
        and first.shape == out.shape
        and torch.equal(first, untouched)
        and all(value is None for value in rest)
    )


class _Enough(Exception):  # noqa: N818 (control flow, not an error)
    """Raised when the wanted input of a batch has been seen; the rest of the layer need not run."""
