"""How the Fisher information of a layer's matrices is summed up, from what each window shows of them."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import Tensor

from llmcompress.engine.source.tensor_names import without_numbers
from llmcompress.stats.fisher import Fisher, of_window
from llmcompress.stats.gram import Gram
from llmcompress.workers import Workers


class Window(NamedTuple):
    """What a window shows of a matrix: its inputs [tokens, in], where those are needed, and its gradient [out, in]."""

    x: Tensor | None
    gradient: Tensor


class WindowFisher:
    """Sums over windows, the tokens of a window together; with Gram matrices, for methods that compensate errors.

    spaces: space of each path. grams: whether Gram matrices are summed up; experts of a layer share one, since a single
    expert sees too few tokens. fitted: how many windows, from the first on, the method fits to; the other windows show
    what the errors do to text that nothing was fitted to. workers: share the sums.
    """

    def __init__(self, spaces: Mapping[str, str], grams: bool, fitted: int, workers: Workers) -> None:
        self.spaces = {path: without_numbers(space) for path, space in spaces.items()}
        self._grams, self._fitted, self.workers = grams, fitted, workers
        self._read, self._owners = spaces, dict[str, str]()  # by space, the first matrix that was seen to read it
        self._found: dict[str, Fisher] = {}
        self._seen: dict[str, Gram] = {}
        self._weighed: dict[bool, dict[str, Gram]] = {True: {}, False: {}}  # True: over the windows that were fitted to

    def part(self, x: Tensor, gradient: Tensor) -> Window:
        rows, slopes = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        return Window(rows if self._grams else None, slopes.T @ rows)

    def add(self, path: str, part: Window, window: int) -> None:
        fisher, fitted = of_window(part.gradient), window < self._fitted
        self._found[path] = self._found[path].plus(fisher) if path in self._found else fisher
        if part.x is not None:
            if fitted and self._owners.setdefault(self._read[path], path) == path:
                self._sum(self._seen, self.spaces[path], part.x)
            self._sum(self._weighed[fitted], without_numbers(path), part.gradient)

    def _sum(self, grams: dict[str, Gram], name: str, rows: Tensor) -> None:
        if name not in grams:
            grams[name] = Gram(rows.shape[-1], self.workers, rows.device)
        grams[name].update(rows)

    def finish(self, blind: Collection[str]) -> dict[str, Fisher]:
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
