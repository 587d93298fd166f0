"""How the Fisher information of a layer's matrices is summed up, from what each window shows of them."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from llmcompress.engine.run.guidance import POWER
from llmcompress.engine.source.tensor_names import without_numbers
from llmcompress.stats.fisher import Fisher, of_window
from llmcompress.stats.gram import Gram
from llmcompress.workers import Workers


class Window(NamedTuple):
    """What a window shows of a matrix: its gradient [out, in].

    x: its inputs [tokens, in], where those are needed. squares: of the gradients at its outputs, summed over these
    [tokens].
    """

    x: Tensor | None
    gradient: Tensor
    squares: Tensor


class _Inputs(NamedTuple):
    """Inputs [tokens, in] of a window, and squares [tokens] of the gradients behind each matrix that reads them."""

    x: Tensor
    squares: list[Tensor]

    @property
    def weighed(self) -> Tensor:
        """The inputs times the roots of the tokens' weights: those of `run/guidance.py` but for their mean."""
        roots = torch.stack(self.squares).sum(dim=0) ** (POWER / 2)
        return self.x * roots.to(self.x.dtype)[:, None]


class WindowFisher:
    """Sums over windows, the tokens of a window together; with Gram matrices, for methods that compensate errors.

    spaces: space of each path. grams: whether Gram matrices are summed up; experts of a layer share one, since a single
    expert sees too few tokens. fitted: how many windows, from the first on, the method fits to; the other windows show
    what the errors do to text that nothing was fitted to. workers: share the sums. guided: spaces in whose Gram
    matrices each token counts as gradients say, as in a run with `--guided`.
    """

    def __init__(
        self, spaces: Mapping[str, str], grams: bool, fitted: int, workers: Workers, guided: Collection[str] = ()
    ) -> None:
        self.spaces = {path: without_numbers(space) for path, space in spaces.items()}
        self._grams, self._fitted, self.workers = grams, fitted, workers
        self._read, self._owners = spaces, dict[str, str]()  # by space, the first matrix that was seen to read it
        self._guided, self._waiting = guided, dict[tuple[str, int], _Inputs]()
        self._found: dict[str, Fisher] = {}
        self._seen: dict[str, Gram] = {}
        self._weighed: dict[bool, dict[str, Gram]] = {True: {}, False: {}}  # True: over the windows that were fitted to

    def part(self, x: Tensor, gradient: Tensor) -> Window:
        rows, slopes = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        return Window(rows if self._grams else None, slopes.T @ rows, slopes.square().sum(dim=1))

    def add(self, path: str, part: Window, window: int) -> None:
        fisher, fitted = of_window(part.gradient), window < self._fitted
        self._found[path] = self._found[path].plus(fisher) if path in self._found else fisher
        if part.x is not None:
            if fitted and self._read[path] in self._guided:
                self._wait(path, part.x, part.squares, window)
            elif fitted and self._owners.setdefault(self._read[path], path) == path:
                self._sum(self._seen, self.spaces[path], part.x)
            self._sum(self._weighed[fitted], without_numbers(path), part.gradient)

    def _wait(self, path: str, x: Tensor, squares: Tensor, window: int) -> None:
        """Keep the inputs of a window until all matrices that read them have said how much each token counts."""
        space = self._read[path]
        inputs = self._waiting.setdefault((space, window), _Inputs(x, []))
        inputs.squares.append(squares)
        if len(inputs.squares) == sum(read == space for read in self._read.values()):
            self._sum(self._seen, self.spaces[path], self._waiting.pop((space, window)).weighed)

    def _sum(self, grams: dict[str, Gram], name: str, rows: Tensor) -> None:
        if name not in grams:
            grams[name] = Gram(rows.shape[-1], self.workers, rows.device)
        grams[name].update(rows)

    def finish(self, blind: Collection[str]) -> dict[str, Fisher]:
        for (space, _), inputs in self._waiting.items():  # of spaces that a matrix without gradients reads too
            self._sum(self._seen, without_numbers(space), inputs.weighed)
        self._waiting.clear()
        return self._found

    def seen(self, space: str) -> Gram:
        """Gram matrix of the inputs in one of `spaces`, over the windows that are fitted to."""
        return self._seen[space]

    def weighed(self, path: str, fitted: bool) -> Tensor:
        """Gram matrix [in, in] of a matrix's gradients, by which errors are judged, of trace 1.

        fitted: over the windows that are fitted to, or else over the others.
        """
        gram = self._weighed[fitted][without_numbers(path)].mean()
        return gram / gram.diagonal().sum().clamp_min(1e-30)
