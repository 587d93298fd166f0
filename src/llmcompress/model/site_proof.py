"""Where channels of an undeclared layer can be scaled, found and proven by running it in float64 on random weights.

What is tried comes from the run itself. Outputs of a norm or of a matrix are multiplied by random factors; what reads
those channels are the matrices whose inputs change by just these factors, each of which then undoes them. A site is
proven where that leaves every product with a matrix, and what leaves the layer, as they were to 1e-9: then nothing else
reads the channels. That each reader has to undo the factors is seen at its inputs. Factors span six orders of
magnitude, so that what clips its input shows.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from llmcompress.arch.scaling_site import Index, Site, SitePart
from llmcompress.arch.spec import ArchSpec
from llmcompress.model.traced_layer import Changes, Trace, TracedLayer

_EXACT = 1e-9
_ROUNDING = 1e-13  # of the largest of all, where channels all but cancel out
_WIDEST = 1e3  # of the factors, both ways
_OFFSETS = (0.0, 1.0)  # of the gains of norms
_NOTHING = "no norm and no matrix writes its inputs channel by channel"

Spread = Index | None


class SiteProof:
    """The sites of one layer. sites: proven ones. refused: why matrices have none, by module path with `{e}`."""

    def __init__(self, traced: TracedLayer, spec: ArchSpec) -> None:
        self.traced, self.spec = traced, spec
        self.plain = traced.run()
        self.order = list(self.plain.calls)
        self.generator = torch.Generator().manual_seed(1)
        self.sites: list[Site] = []
        self.refused: dict[str, str] = {}
        self._covered: set[str] = set()
        used = self.plain.calls.keys() | self.plain.cut
        self._alike: dict[str, list[str]] = {}
        for path in self.order:
            self._alike.setdefault(_sibling(path), []).append(path)
        self._silent = [path for path in _matrices(traced.layer) if path not in used]
        self._spaces = {linear.path: linear.reads for linear in spec.linears}
        for path, module in traced.layer.named_modules():
            if _is_norm(module):
                self._norm(path, module)
        self._direct: dict[str, set[str]] = {}
        for reader in self._one_expert(self.order):
            if reader not in self._covered and self._general(reader) in self._spaces:
                self._matrix(reader)
        for path in dict.fromkeys(map(self._general, self.order)):
            if path in self._spaces and path not in {self._general(one) for one in self._covered}:
                self.refused.setdefault(path, _NOTHING)
            else:
                self.refused.pop(path, None)

    # -- what is tried ----------------------------------------------------------------------------------------------

    def _norm(self, path: str, module: nn.Module) -> None:
        """The site of the channels that a norm writes, whose gain is its weight, or one more."""
        parameters: dict[str, Tensor] = {
            leaf: value.data for leaf, value in module._parameters.items() if value is not None
        }
        factors = self._factors(len(parameters["weight"]))
        for offset in _OFFSETS:
            gains = {f"{path}.{leaf}": value * factors for leaf, value in parameters.items()}
            gains[f"{path}.weight"] += offset * factors - offset
            changes = Changes(vectors=gains)
            readers = self._readers(changes, factors)
            if readers:
                self._prove(SitePart(path, divided=True, offset=offset), factors, changes, readers, norm=True)
                return

    def _matrix(self, reader: str) -> None:
        """The site of the channels that a reader reads from a matrix, the last one that writes them."""
        rows = {path: self.plain.calls[path][0][1].shape[-1] for path in self._one_expert(self.order)}
        for writer in reversed(self._one_expert(self.order[: self.order.index(reader)])):
            if reader not in self._reached(writer):
                continue
            for at in self._parts(writer, rows[writer], reader):
                factors = self._factors(rows[writer] if at is None else len(at))
                whole = torch.ones(rows[writer], dtype=torch.float64)
                whole[slice(None) if at is None else torch.from_numpy(at)] = factors
                changes = Changes(outputs={writer: whole})
                readers = self._readers(changes, factors)
                if reader in readers:
                    self._prove(SitePart(writer, divided=True, at=at), factors, changes, readers)
                    if reader in self._covered:
                        return

    def _reached(self, writer: str) -> set[str]:
        """The matrices whose inputs depend on a matrix by a way on which no other matrix is."""
        if writer not in self._direct:
            factors = self._factors(self.plain.calls[writer][0][1].shape[-1])
            found = self.traced.run(Changes(outputs={writer: factors}, replayed=self.plain))
            self._direct[writer] = {
                path
                for path, calls in self.plain.calls.items()
                if not _same([x for x, _ in found.calls.get(path, [])], [x for x, _ in calls])
            }
        return self._direct[writer]

    def _parts(self, writer: str, rows: int, reader: str) -> Iterator[Index | None]:
        """Which outputs of a matrix may be the channels of its reader: all, those seen at the first token, a share.

        The first token attends to itself alone, so there the inputs of what follows attention are its values.
        """
        width = self.plain.calls[reader][0][0].shape[-1]
        if width % rows == 0 or rows == width:
            yield None
        factors = self._factors(rows)
        found = self.traced.run(Changes(outputs={writer: factors}, replayed=self.plain)).calls.get(reader, [])
        first = _matched(self.plain.calls[reader][0][0][:1], found[0][0][:1], factors) if found else None
        if first is not None and len(set(first)) < rows:
            yield np.unique(first)
        if rows > width and rows % width == 0:
            share = rows // width
            yield from (np.arange(width) + width * number for number in reversed(range(share)))
            yield from (np.arange(width) * share + number for number in reversed(range(share)))

    # -- what is found ----------------------------------------------------------------------------------------------

    def _readers(self, changes: Changes, factors: Tensor) -> dict[str, Spread]:
        """The matrices whose inputs change by the factors, and the number of the factor of each channel.

        Other matrices give what they gave before, so that routing and attention stay as they were.
        """
        readers: dict[str, Spread] = {}
        found = self.traced.run(replace(changes, replayed=self.plain))
        for path, calls in self.plain.calls.items():
            again = found.calls.get(path, [])
            if path in self.plain.cut or [len(x) for x, _ in calls] != [len(x) for x, _ in again]:
                continue
            x, y = torch.cat([x for x, _ in calls]), torch.cat([x for x, _ in again])
            if x.shape[-1] == len(factors) and _close(y, x * factors):
                readers[path] = None
            elif x.shape[-1] >= len(factors) and not _close(y, x):
                spread = _matched(x, y, factors)
                if spread is not None:
                    readers[path] = spread
        return readers

    def _prove(
        self, writer: SitePart, factors: Tensor, changes: Changes, readers: dict[str, Spread], norm: bool = False
    ) -> None:
        """Keep the site if readers that undo the factors leave everything else as it was; else say why not."""
        undone = {
            path: 1 / (factors if spread is None else factors[torch.from_numpy(spread)])
            for path, spread in readers.items()
        }
        found = self.traced.run(replace(changes, inputs=undone))
        why = self._difference(found, readers) or self._doubt(writer, readers)
        if why is None:
            self._keep(writer, len(factors), readers, norm)
            return
        for path in readers:
            self.refused.setdefault(self._general(path), f"{why} {writer.path}")

    def _difference(self, found: Trace, readers: dict[str, Spread]) -> str | None:
        """What else reads the channels, for a message; None if nothing does."""
        if found.calls.keys() != self.plain.calls.keys():
            return "other experts are chosen when channels are scaled that are written by"
        for path, calls in self.plain.calls.items():
            again = found.calls[path]
            if len(calls) != len(again):
                return f"{path} runs more or less often when channels are scaled that are written by"
            for (x, y), (x_again, y_again) in zip(calls, again, strict=True):
                if not _close(y_again, y) or (path not in readers and not _close(x_again, x)):
                    return f"{path} depends in another way on what is written by"
        if not _same(found.left, self.plain.left):
            return "something that is no matrix also reads what is written by"
        return None

    def _doubt(self, writer: SitePart, readers: dict[str, Spread]) -> str | None:
        """Why what was seen may not be all there is."""
        if writer.path in self.plain.cut:
            return "parts of a matrix are used one by one, as those of"
        if len({None if spread is None else spread.tobytes() for spread in readers.values()}) > 1:
            return "matrices number in different ways the channels that are written by"
        own = self._number(writer.path)
        for path in self._silent:
            if own is not None and self._number(path) not in (None, own):
                continue  # another expert's
            like = self._alike.get(_sibling(path), [])
            if not like or 0 < sum(other in readers for other in like) < len(like):
                return f"{path} did not run and may read what is written by"
        return None

    def _keep(self, writer: SitePart, channels: int, readers: dict[str, Spread], norm: bool) -> None:
        """Note the site, where an expert writes the channels for all experts alike."""
        self._covered |= readers.keys()
        spread = next(iter(readers.values()))
        if self._number(writer.path) is not None:
            space = self._spaces[self._general(next(iter(readers)))]
            for number in range(self.spec.expert_count({})):
                own = replace(writer, path=self._general(writer.path).format(e=number))
                parts = (SitePart(self._general(path).format(e=number), True, spread=spread) for path in readers)
                self.sites.append(Site(space.format(e=number), channels, own, tuple(parts)))
            return
        chosen = set(map(_sibling, readers))
        paths = [*readers, *(path for path in self._silent if _sibling(path) in chosen)]
        paths.sort(key=self._place)
        if self._number(paths[0]) is not None:
            self.refused.update((self._general(path), f"none but experts read {writer.path}") for path in readers)
            self._covered -= readers.keys()
            return
        parts = (SitePart(path, True, spread=spread) for path in paths)
        self.sites.append(Site(f"what {paths[0]} reads", channels, writer, tuple(parts), norm=norm))

    # -- names ------------------------------------------------------------------------------------------------------

    def _number(self, path: str) -> int | None:
        """Of the expert whose matrix is at a path, where experts are taken apart."""
        found = self.spec.experts.general(path) if self.spec.experts is not None else None
        return None if found is None else int(found[1])

    def _general(self, path: str) -> str:
        """A path with `{e}` in place of an expert's number."""
        found = self.spec.experts.general(path) if self.spec.experts is not None else None
        return path if found is None else found[0]

    def _place(self, path: str) -> tuple[bool, bool, int]:
        """First comes what sees every token, of that first what may be rounded; then experts by number."""
        number = self._number(path)
        return number is not None, path not in self._spaces, number or 0

    def _one_expert(self, paths: list[str]) -> list[str]:
        """The paths without those of all but one expert."""
        numbers = [number for path in paths if (number := self._number(path)) is not None]
        return [path for path in paths if self._number(path) in (None, *numbers[:1])]

    def _factors(self, count: int) -> Tensor:
        """Factors that are far enough from one another to be told apart, in random order."""
        order = torch.randperm(count, generator=self.generator).to(torch.float64)
        return _WIDEST ** ((2 * order + 1) / count - 1)


def _is_norm(module: nn.Module) -> bool:
    """Whether a module has nothing but a gain per channel, and maybe a bias."""
    own = {leaf: value for leaf, value in module._parameters.items() if value is not None}
    vectors = all(value.ndim == 1 and len(value) > 1 for value in own.values())
    return "weight" in own and own.keys() <= {"weight", "bias"} and vectors and not list(module.children())


def _sibling(path: str) -> str:
    """What matrices have in common that are at the same place in equal modules of one list."""
    return re.sub(r"\.\d+\.", ".*.", path)


def _matrices(layer: nn.Module) -> list[str]:
    return [path for path, module in layer.named_modules() if isinstance(module, nn.Linear | Conv1D)]


def _same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(_close, found, expected))


def _close(found: Tensor, expected: Tensor) -> bool:
    """Whether values [tokens, channels] are equal, as far as the largest of each channel goes."""
    if found.shape != expected.shape:
        return False
    found, expected = (value.reshape(-1, value.shape[-1]) for value in (found, expected))
    if not expected.numel():
        return True
    sizes = expected.abs().amax(0)
    return bool(((found - expected).abs() <= _EXACT * sizes + _ROUNDING * sizes.amax()).all())


def _matched(before: Tensor, after: Tensor, factors: Tensor) -> Index | None:
    """The number of the factor by which each channel of [tokens, channels] has changed; None unless each has."""
    size = before.square().sum(0)
    if len(factors) == 1 or not bool((size > 0).all()):
        return None
    ratio = (before * after).sum(0) / size
    ordered, numbers = factors.sort()
    above = torch.searchsorted(ordered, ratio).clamp(1, len(factors) - 1)
    nearer = (ordered[above - 1] - ratio).abs() < (ordered[above] - ratio).abs()
    found = numbers[above - nearer.long()]
    return found.numpy() if _close(after, before * factors[found]) else None
