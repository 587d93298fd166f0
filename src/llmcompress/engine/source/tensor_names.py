"""On-disk names of the parts of a model: its matrices, the tensors of a layer, and the tensors outside of layers."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from llmcompress.arch.scaling_site import Site
from llmcompress.arch.sites import residual_readers, residual_writers, scores_site, sites
from llmcompress.arch.spec import ArchSpec, Linear
from llmcompress.store.headers import ModelHeaders


def without_numbers(name: str) -> str:
    """A dotted name with `*` in place of every number in it, which layers and experts alike then share."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


@dataclass(frozen=True)
class MatrixRef:
    """One declared matrix of a checkpoint. module: on-disk name without `.weight`; path: module path below the layer.

    expert: its number, None where the matrix is of no expert. space: the input it reads. linear: its declaration.
    """

    module: str
    layer: int
    expert: int | None
    path: str
    space: str
    linear: Linear


@dataclass(frozen=True)
class Anatomy:
    """The headers of a model, read with its declaration. prefix: on-disk name of the list of layers; empty without one.

    layers: number of layers.
    """

    headers: ModelHeaders
    spec: ArchSpec
    prefix: str
    layers: int

    def tensor(self, layer: int, path: str, leaf: str = "weight") -> str | None:
        """On-disk name of a parameter of a module below a layer, if there is one."""
        return self._present(f"{self.prefix}.{layer}.{self.spec.disk_parameter(f'{path}.{leaf}')}")

    def outer(self, path: str, leaf: str = "weight") -> str | None:
        """On-disk name of a parameter of a module outside of the layers, if there is one."""
        name = self.spec.disk_parameter(f"{path}.{leaf}")
        whole = self.prefix == self.spec.disk_path(self.spec.layers)  # else names lack the base model's
        return self._present(name if whole or path == self.spec.head else name.partition(".")[2])

    def _present(self, name: str) -> str | None:
        return name if name in self.headers.tensors else None

    def transposed(self, path: str) -> bool:
        """Whether a module below a layer stores its weight [in, out]."""
        return any(linear.path == path and linear.conv1d for linear in self.spec.linears)

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights of a layer by module path, matrices [out, in]."""
        found = {}
        for path in self._paths():
            name = self.tensor(layer, path)
            if name is not None:
                shape = self.headers.tensors[name].spec.shape
                found[path] = shape[::-1] if self.transposed(path) else shape
        return found

    def _paths(self) -> Iterator[str]:
        experts = self.spec.expert_count(self.headers.config)
        for linear in (*self.spec.never, *self.spec.linears):
            yield from (path for _, path, _ in self.spec.expand(linear, experts))
        yield from (norm.path for norm in self.spec.norms)
        if self.spec.scores is not None and self.spec.scores.norms is not None:
            yield from self.spec.scores.norms

    def sites(self, layer: int) -> list[Site]:
        """The sites of a layer: where factors of channels can be moved between matrices."""
        if self.spec.observed:
            return list(self.spec.proven.get(layer, ()))
        return sites(self.spec, self.headers.config, self.shapes(layer))

    def scores(self, layer: int) -> Site | None:
        """The site of a layer where queries and keys can be scaled against each other, if the architecture has one."""
        return scores_site(self.spec, self.headers.config, self.shapes(layer))

    def residual(self, layer: int) -> tuple[list[str], list[str]]:
        """Module paths of the matrices that read a layer's hidden states, and of those that add to them."""
        config, shapes = self.headers.config, self.shapes(layer)
        return residual_readers(self.spec, config, shapes), residual_writers(self.spec, config, shapes)
