"""How the Fisher information of a layer's matrices is summed up, from what each window shows of them."""

from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from llmcompress.engine.run.guidance import POWER
from llmcompress.engine.source.tensor_names import without_numbers
from llmcompress.stats.fisher import Fisher, of_window
from llmcompress.stats.gram import Gram
from llmcompress.workers import Workers

JUDGED = 16  # windows, of those fitted to and of those held back, that tell losses at most


class Window(NamedTuple):
    """What a window shows of a matrix.

    gradient: [out, in], where the window tells losses. x: its inputs [tokens, in], where it is fitted to. squares: of
    the gradients at its outputs, summed over these [tokens], where tokens are weighed.
    """

    x: Tensor | None
    gradient: Tensor | None
    squares: Tensor | None


class _Inputs(NamedTuple):
    """Inputs [tokens, in] of a window, and squares [tokens] of the gradients behind each matrix that weighs them."""

    x: Tensor
    squares: list[Tensor]

    @property
    def weighed(self) -> Tensor:
        """The inputs times the roots of the tokens' weights: those of `run/guidance.py` but for their mean."""
        roots = torch.stack(self.squares).sum(dim=0) ** (POWER / 2)
        return self.x * roots[:, None]


class WindowSplit(NamedTuple):
    """Numbers of windows: fitted to while losses are measured, held back then, and fitted to later by the run."""

    fitted: int
    back: int
    later: int

    @classmethod
    def of(cls, windows: int, later: int) -> "WindowSplit":
        """A quarter of the windows is held back, but no more than JUDGED; of a single one nothing can be."""
        back = min(max(1, windows // 4), windows - 1, JUDGED)
        return cls(windows - back, back, max(later, windows))

    @property
    def judging(self) -> int:
        """How many windows tell losses."""
        return min(self.fitted, JUDGED) + self.back

    def judges(self, window: int) -> bool:
        """Whether a window tells losses: the first of those that are fitted to do, and those that are held back."""
        return window < JUDGED or window >= self.fitted

    def expected(self, inside: Tensor, outside: Tensor) -> Tensor:
        """The loss on other text when `later` windows are fitted to; or a matrix that the loss is linear in.

        inside: in windows that were fitted to, which is l - c / fitted. outside: in the windows held back, which is
        l + c / fitted. The result is l + c / later.
        """
        share = self.fitted / self.later
        return (inside * (1 - share) + outside * (1 + share)) / 2


class WindowFisher:
    """Sums over windows, the tokens of a window together; with Gram matrices, for methods that compensate errors.

    spaces: space of each path. grams: whether Gram matrices are summed up; experts of a layer share one, since a single
    expert sees too few tokens. windows: of those that are not fitted to, and of some of the others, gradients show what
    errors do to text that was fitted to, and to other text. workers: share the sums. guided: those of `spaces` by
    whose gradients tokens are weighed in the Gram matrix of their space, as in a run with `--guided`.
    """

    def __init__(
        self,
        spaces: Mapping[str, str],
        grams: bool,
        windows: WindowSplit,
        workers: Workers,
        guided: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.spaces = {path: without_numbers(space) for path, space in spaces.items()}
        self._grams, self._windows, self.workers = grams, windows, workers
        self._read, self._owners = spaces, dict[str, str]()  # by space, the first matrix that was seen to read it
        self._guided, self._readers = guided, Counter(guided.values())  # of each space, how many weigh its tokens
        self._waiting: dict[tuple[str, int], _Inputs] = {}  # by space and window
        self._found: dict[str, Fisher] = {}
        self._seen: dict[str, Gram] = {}
        self._weighed: dict[bool, dict[str, Gram]] = {True: {}, False: {}}  # True: over the windows that were fitted to

    def part(self, path: str, x: Tensor, gradient: Tensor, window: int) -> Window:
        rows, slopes = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        fitted = window < self._windows.fitted
        squares = slopes.square().sum(dim=1) if fitted and path in self._guided else None
        product = slopes.T @ rows if self._windows.judges(window) else None
        return Window(rows if fitted and self._grams else None, product, squares)

    def add(self, path: str, part: Window, window: int) -> None:
        if part.gradient is not None:
            fisher, fitted = of_window(part.gradient), window < self._windows.fitted
            self._found[path] = self._found[path].plus(fisher) if path in self._found else fisher
            if self._grams:
                self._sum(self._weighed[fitted], without_numbers(path), part.gradient)
        if part.x is not None:
            if self._read[path] in self._readers:
                if part.squares is not None:
                    self._wait(path, part.x, part.squares, window)
            elif self._owners.setdefault(self._read[path], path) == path:
                self._sum(self._seen, self.spaces[path], part.x)

    def _wait(self, path: str, x: Tensor, squares: Tensor, window: int) -> None:
        """Keep the inputs of a window until all matrices that weigh them have said how much each token counts."""
        space = self._read[path]
        inputs = self._waiting.setdefault((space, window), _Inputs(x, []))
        inputs.squares.append(squares)
        if len(inputs.squares) == self._readers[space]:
            self._sum(self._seen, self.spaces[path], self._waiting.pop((space, window)).weighed)

    def _sum(self, grams: dict[str, Gram], name: str, rows: Tensor) -> None:
        if name not in grams:
            grams[name] = Gram(rows.shape[-1], self.workers, rows.device)
        grams[name].update(rows)

    def finish(self, blind: Collection[str]) -> dict[str, Fisher]:
        for (space, _), inputs in self._waiting.items():  # of spaces that a matrix without gradients would weigh too
            self._sum(self._seen, without_numbers(space), inputs.weighed)
        self._waiting.clear()
        return self._found

    def seen(self, space: str) -> Gram:
        """Gram matrix of the inputs in one of `spaces`, over the windows that are fitted to."""
        return self._seen[space]

    def weighed(self, path: str, fitted: bool) -> Tensor:
        """Gram matrix [in, in] of a matrix's gradients, by which errors are judged, of trace 1.

        fitted: over windows that are fitted to, or else over the others.
        """
        gram = self._weighed[fitted][without_numbers(path)].mean()
        return gram / gram.diagonal().sum().clamp_min(1e-30)
