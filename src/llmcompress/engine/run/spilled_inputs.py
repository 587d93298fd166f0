"""What enters the experts of a layer, on disk by expert: a Gram matrix is made of it only while an expert is solved."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from llmcompress.grids.base import InputSpec
from llmcompress.grids.inputs import foreseen
from llmcompress.stats.gram import Gram
from llmcompress.store.folder import HeldFile
from llmcompress.store.windows import Windows, WindowsWriter
from llmcompress.workers import Workers

GATHERED = 2048  # rows of one expert that are read, and added to its Gram matrix, at once
_FEW = 256  # rows: a product of more has a multiple of this


class SpilledInputs:
    """The inputs of all experts of a stage, by space, in one file.

    All Gram matrices at once would take more than the layer: 256 of 7168 channels are 53 GB. What they are made of is
    a few rows a token.
    """

    def __init__(self, file: HeldFile) -> None:
        self._file = file
        self._writer: WindowsWriter | None = None
        self._spans: dict[str, list[slice]] = {}
        self._rows = 0
        self._windows: Windows | None = None

    def append(self, inputs: Mapping[str, Tensor]) -> None:
        """Add a batch: by space the inputs [..., in], all of one width and type; spaces that saw nothing are absent."""
        if not inputs:
            return
        rows = [x.detach().reshape(-1, x.shape[-1]) for x in inputs.values()]
        self._writer = self._writer or WindowsWriter(self._file, rows[0].dtype)
        self._writer.append(torch.cat(rows))
        for space, part in zip(inputs, rows, strict=True):
            self._spans.setdefault(space, []).append(slice(self._rows, self._rows + len(part)))
            self._rows += len(part)

    def finish(self) -> None:
        """Nothing more will be added."""
        if self._writer is not None:
            self._windows = self._writer.finish()

    def gram(
        self, space: str, size: int, workers: Workers, device: torch.device, rounding: InputSpec | None = None
    ) -> Gram:
        """The Gram matrix of a space of `size` channels; it does not depend on how its rows came in batches.

        rounding: of inputs before they are multiplied.
        """
        gram = Gram(size, workers, device)
        for rows in self.read(space):
            # torch keeps code for every number of rows it has multiplied, some MB for each expert: few numbers are used
            blank = min(1 << (len(rows) - 1).bit_length(), -(-len(rows) // _FEW) * _FEW) - len(rows)
            gram.update(nn.functional.pad(foreseen(rows.to(device), rounding), (0, 0, 0, blank)), blank)
        return gram

    def chunks(self, space: str) -> int:
        """How many tensors `read` gives."""
        rows: int = sum(span.stop - span.start for span in self._spans.get(space, ()))
        return -(-rows // GATHERED)

    def read(self, space: str) -> Iterator[Tensor]:
        """The rows of a space, `GATHERED` at a time."""
        waiting: list[Tensor] = []
        held = 0
        for span in self._spans.get(space, ()):
            assert self._windows is not None
            rows = self._windows.read(span)
            while held + len(rows) >= GATHERED:
                taken = GATHERED - held
                yield torch.cat([*waiting, rows[:taken]])
                waiting, held, rows = [], 0, rows[taken:]
            waiting.append(rows)
            held += len(rows)
        if held:
            yield torch.cat(waiting)
