"""How the Fisher information of a layer's matrices is summed up, from what each window shows of them."""

import re
from collections.abc import Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from llmcompress.solve.compensation import relief
from llmcompress.stats.fisher import Fisher, of_matrix, of_window
from llmcompress.stats.gram import Gram

P = TypeVar("P")


class Gathering(Protocol, Generic[P]):
    """Of one layer. `part` is for any thread, of the input [..., in] of a matrix and the gradient [..., out] at its
    output; `add` and `finish` are for one thread, in order."""

    def part(self, x: Tensor, gradient: Tensor) -> P: ...

    def add(self, path: str, part: P) -> None: ...

    def finish(self) -> dict[str, Fisher]: ...


class ByToken:
    """Each token by its own gradient."""

    def __init__(self) -> None:
        self._found: dict[str, Fisher] = {}

    def part(self, x: Tensor, gradient: Tensor) -> Fisher:
        return of_matrix(x, gradient)

    def add(self, path: str, part: Fisher) -> None:
        self._found[path] = self._found[path].plus(part) if path in self._found else part

    def finish(self) -> dict[str, Fisher]:
        return self._found


class Window(NamedTuple):
    """What a window shows of a matrix: its inputs [tokens, in], where those are needed, and its gradient [out, in]."""

    x: Tensor | None
    gradient: Tensor


class ByWindow:
    """Tokens of a window together; with `percdamp`, inputs count by what is left once GPTQ has made up for errors.

    spaces: space of each path. percdamp: as GPTQ's; None: errors stay where they are made. What compensation leaves is
    found for the experts of a layer together, as single ones see too few tokens.
    """

    def __init__(self, spaces: Mapping[str, str], percdamp: float | None) -> None:
        self.percdamp = percdamp
        owners = {space: path for path, space in reversed(list(spaces.items()))}
        self._spaces = {path: _alike(space) for path, space in spaces.items()}
        self._owners = set(owners.values())
        self._found: dict[str, Fisher] = {}
        self._seen: dict[str, Gram] = {}
        self._weighed: dict[str, Gram] = {}

    def part(self, x: Tensor, gradient: Tensor) -> Window:
        rows, slopes = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        return Window(None if self.percdamp is None else rows, slopes.T @ rows)

    def add(self, path: str, part: Window) -> None:
        fisher = of_window(part.gradient)
        self._found[path] = self._found[path].plus(fisher) if path in self._found else fisher
        if part.x is not None:
            if path in self._owners:
                self._sum(self._seen, self._spaces[path], part.x)
            self._sum(self._weighed, _alike(path), part.gradient)

    def _sum(self, grams: dict[str, Gram], name: str, rows: Tensor) -> None:
        if name not in grams:
            grams[name] = Gram(rows.shape[-1], rows.device)
        grams[name].update(rows)

    def finish(self) -> dict[str, Fisher]:
        if self.percdamp is None:
            return self._found
        left = {
            path: relief(self._seen[self._spaces[path]].mean(), self._weighed[_alike(path)].mean(), self.percdamp)
            for path in {_alike(path): path for path in self._found}.values()
        }
        shares = {_alike(path): share.to("cpu", torch.float64) for path, share in left.items()}
        return {
            path: Fisher(fisher.outputs, fisher.inputs * shares[_alike(path)]) for path, fisher in self._found.items()
        }


def _alike(path: str) -> str:
    """The same for all experts."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
