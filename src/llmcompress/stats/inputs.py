"""What transforms need to know of an input: its Gram matrix, how large its channels are, and some of its tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompress.stats.absmax import after_first, finite_rows
from llmcompress.stats.gram import Gram
from llmcompress.workers import WHOLE, Part, Workers


@dataclass(frozen=True)
class Inputs:
    """An input over all calibration tokens, in float32.

    hessian [in, in]: mean of x x^T. mean [in]: mean of |x|. largest [in]: largest |x| without the first token of each
    window. tokens [n, in]: an even sample.
    """

    hessian: Tensor
    mean: Tensor
    largest: Tensor
    tokens: Tensor

    def divided(self, scale: Tensor) -> "Inputs":
        """The same input with every channel divided by scale [in]."""
        square = self.hessian / scale / scale[:, None]
        return Inputs(square, self.mean / scale, self.largest / scale, self.tokens / scale)


class InputStatistics:
    """Accumulates `Inputs` with a sample of about `sample` tokens; its memory does not grow with the tokens.

    The activations of the first token of a window are hundreds of times as large as any other (attention sinks):
    maxima leave that token out, sums do not.
    """

    def __init__(
        self,
        size: int,
        tokens: int,
        workers: Workers,
        device: torch.device | None = None,
        sample: int = 1024,
        part: Part = WHOLE,
    ) -> None:
        """tokens: how many will be added, for an even sample. part: of the Gram matrix that this rank adds up."""
        self.gram = Gram(size, workers, device, part)
        self._sum = torch.zeros(size, dtype=torch.float64, device=device)
        self._largest = torch.zeros(size, device=device)
        self._parts: list[Tensor] = []
        self._step = max(1, tokens // sample)
        self._next = self._step // 2  # which token of the next batch is kept first

    def update(self, x: Tensor) -> None:
        """Add an input [windows, length, in], or [tokens, in] where windows cannot be told."""
        self.gram.update(x)
        windows = x.detach().to(torch.float32)
        later = finite_rows(after_first(windows))
        self._sum += finite_rows(windows.reshape(-1, x.shape[-1])).abs().sum(dim=0)
        if len(later):
            self._largest = torch.maximum(self._largest, torch.maximum(later.amax(dim=0), -later.amin(dim=0)))
            self._parts.append(later[self._next :: self._step].clone())
            self._next = (self._next - len(later)) % self._step

    def finish(self) -> Inputs:
        mean = (self._sum / max(self.gram.tokens, 1)).to(torch.float32)
        tokens = torch.cat(self._parts) if self._parts else torch.zeros(0, self.gram.size, device=mean.device)
        return Inputs(self.gram.finish(), mean, self._largest, tokens)
