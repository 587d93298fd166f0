"""Reading windows to the device where a layer runs: a GPU fetches the next batches while it runs one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from llmcompress.background import Ahead
from llmcompress.engine.plan.memory_model import FETCHED
from llmcompress.store.windows import Windows


class Prefetch:
    """Reads batches of windows as tensors on a device."""

    def __init__(self, windows: Windows, spans: Sequence[slice], device: torch.device) -> None:
        """spans: the windows of each batch, in the order in which `read` will be called."""
        self._windows, self._device = windows, device
        self._ahead = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._ahead = Ahead(self._fetch, [(span.start, span.stop) for span in spans], FETCHED)

    def read(self, span: slice) -> Tensor:
        """The windows [span], in memory of their own."""
        if self._ahead is None:
            return self._windows.read(span).to(self._device)
        there, copied = self._ahead.take((span.start, span.stop))
        now = torch.cuda.current_stream(self._device)
        now.wait_event(copied)
        there.record_stream(now)  # the memory belongs to the other stream
        return there

    def _fetch(self, span: tuple[int, int]) -> tuple[Tensor, torch.cuda.Event]:
        """Windows [start, stop), copied through pinned memory, and the event to wait for before they are used."""
        with torch.cuda.stream(self._stream):
            there = self._windows.read(slice(*span), pinned=True).to(self._device, non_blocking=True)
            return there, self._stream.record_event()
