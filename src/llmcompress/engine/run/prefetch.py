"""Windows on their way to where a layer runs: on a GPU the next ones are fetched while some run."""

from collections.abc import Sequence

import torch
from torch import Tensor

from llmcompress.background import Ahead
from llmcompress.engine.plan.memory_model import FETCHED
from llmcompress.store.windows import Windows


class Prefetch:
    """Batches of windows as tensors of their own memory, on a device."""

    def __init__(self, windows: Windows, spans: Sequence[slice], device: torch.device) -> None:
        """spans: of the windows in each batch, in the order in which they will be asked for."""
        self._windows, self._device = windows, device
        self._ahead = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._ahead = Ahead(self._fetch, [(span.start, span.stop) for span in spans], FETCHED)

    def read(self, span: slice) -> Tensor:
        """Windows [span]."""
        if self._ahead is None:
            return self._windows.read(span).to(self._device)
        there, copied = self._ahead.take((span.start, span.stop))
        now = torch.cuda.current_stream(self._device)
        now.wait_event(copied)
        there.record_stream(now)  # whose memory is the other stream's
        return there

    def _fetch(self, span: tuple[int, int]) -> tuple[Tensor, torch.cuda.Event]:
        """Windows [start, stop) through pinned memory, and what to wait for before they are used."""
        with torch.cuda.stream(self._stream):
            there = self._windows.read(slice(*span), pinned=True).to(self._device, non_blocking=True)
            return there, self._stream.record_event()
