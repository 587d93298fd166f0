"""Modules that need not run again in later passes, because what went into their last matrix is on disk.

Where the last thing a module does is a matrix (`o_proj` of an attention, `down_proj` of a feed-forward), that matrix's
input is recorded in the pass of its stage. From then on the module is not run: the matrix alone is applied to the
record. What the matrix returns is recorded in the first whole pass after that, and from then on is all that is read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmcompress.engine.run.current_batch import Batch, CurrentBatch
from llmcompress.model.carried import leaves
from llmcompress.store.windows import Windows, WindowsWriter


@dataclass(frozen=True)
class Bypass:
    """A module that ends in the matrix `last`, which reads `space`.

    width: the length of the tuple that the module returns; 0 where it returns a tensor.
    """

    space: str
    module: str
    last: str
    width: int


class Bypasses:
    """The bypasses of one layer and their records. writer: a file for a space and a side, "in" or "out"."""

    def __init__(
        self,
        layer: nn.Module,
        found: Sequence[Bypass],
        writer: Callable[[str, str], WindowsWriter],
        current: CurrentBatch,
    ) -> None:
        self.layer, self.found = layer, found
        self.writer, self._current = writer, current
        self._inputs: dict[str, Windows] = {}  # by space: what the last matrix read
        self._outputs: dict[str, Windows] = {}  # by space: what the module returned

    @contextmanager
    def recording(self, space: str | None) -> Iterator[Callable[[Batch], None]]:
        """Within, recorded modules are bypassed, and the function given is to be called with every batch, in order.

        space: the one space whose inputs this pass looks at; None if it looks at several.
        """
        recorded = any(bypass.space == space for bypass in self.found)
        inputs = self.writer(str(space), "in") if recorded else None
        outputs = {space: self.writer(space, "out") for space in self._inputs if space not in self._outputs}

        def record(batch: Batch) -> None:
            if inputs is not None:
                inputs.append(batch.seen[str(space)])
            for name in list(outputs):
                if name in batch.returned:
                    outputs[name].append(batch.returned[name])
                else:  # the pass stops before the module
                    outputs.pop(name).abandon()

        with self.in_place():
            yield record
        if inputs is not None:
            self._inputs[str(space)] = inputs.finish()
        for name, writer in outputs.items():
            self._outputs[name] = writer.finish()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, modules for which there is a record are not run."""
        modules = [
            (bypass, self.layer.get_submodule(bypass.module)) for bypass in self.found if bypass.space in self._inputs
        ]
        try:
            for bypass, module in modules:
                module.forward = self._shortcut(bypass)
            yield
        finally:
            for _, module in modules:
                module.__dict__.pop("forward", None)

    def _shortcut(self, bypass: Bypass) -> Callable[..., Any]:
        """What stands in for the module's forward."""
        inputs, outputs = self._inputs[bypass.space], self._outputs.get(bypass.space)
        last = self.layer.get_submodule(bypass.last)

        def forward(*_: Any, **__: Any) -> Any:
            batch = self._current.batch
            recorded = (outputs or inputs).read(batch.span)
            out = recorded if outputs is not None else last(recorded)
            batch.returned[bypass.space] = out
            return (out, *[None] * (bypass.width - 1)) if bypass.width else out

        return forward


def find_bypasses(layer: nn.Module, spaces: Mapping[str, str], run: Callable[[], object]) -> list[Bypass]:
    """Which modules end in a matrix that reads one of `spaces` (space to module path), as `run`, one window, shows."""
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
            run()
    finally:
        for handle in handles:
            handle.remove()
    found = []
    for space, path, parent in pairs:
        if path in returned and parent in returned:
            (out, untouched), (end, _) = returned[path], returned[parent]
            values = end if isinstance(end, tuple) else (end,)
            # a record is read by windows, which a module that joins them before it multiplies no longer tells apart
            alone = untouched is not None and untouched.ndim == 3 and _is_same(values, out, untouched)
            if alone and not leaves(layer.get_submodule(parent)):
                found.append(Bypass(space, parent, path, len(values) if isinstance(end, tuple) else 0))
    return found


def _is_same(values: tuple[Any, ...], out: Tensor, untouched: Tensor) -> bool:
    """Whether a module returned the very memory that its matrix returned, unchanged. Equal numbers might be chance."""
    first, *rest = values
    return (
        isinstance(first, Tensor)
        and first.data_ptr() == out.data_ptr()
        and first.shape == out.shape
        and torch.equal(first, untouched)
        and all(value is None for value in rest)
    )
