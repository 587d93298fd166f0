"""A checkpoint with changes folded into its weights while they are read: scales and rotations that cancel out.

A fold is worked out in float64 or float32 and rounded once, to the type of the tensor; matrices that are to be
quantised are not rounded at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcompress.grids.base import Spec
from llmcompress.grids.coded import Coded
from llmcompress.solve.hadamard import Rotation
from llmcompress.store.checkpoint import DTYPES, Checkpoint, StoredRows

TURNED_ROWS = 1024  # rows rotated at once


class Fold(Protocol):
    """A change of one stored tensor `x`, float32 or float64; the call may overwrite `x`."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class Scaled:
    """(x + offset) * factor - offset along an axis, for the entries `at`, or for all."""

    factor: Tensor
    axis: int = 0
    at: Tensor | None = None
    offset: float = 0.0

    def whole(self, size: int) -> Tensor:
        """The factor of every entry [size], float64."""
        factor = torch.ones(size, dtype=torch.float64)
        factor[slice(None) if self.at is None else self.at] = self.factor.to(torch.float64)
        return factor

    def __call__(self, x: Tensor) -> Tensor:
        factor = self.whole(x.shape[self.axis])
        shape = [-1 if axis == self.axis else 1 for axis in range(x.ndim)]
        x = x.add_(self.offset) if self.offset else x
        x.mul_(factor.to(x.dtype).view(shape))
        return x.sub_(self.offset) if self.offset else x


@dataclass(frozen=True)
class Filled:
    """One value everywhere."""

    value: float

    def __call__(self, x: Tensor) -> Tensor:
        return x.fill_(self.value)


@dataclass(frozen=True)
class Turned:
    """Every vector along an axis times a rotation, in runs of the rotation's width; only entries `at`, if given."""

    rotation: Rotation
    axis: int = 0
    at: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        vectors = x.movedim(self.axis, -1)
        vectors = vectors if vectors.ndim > 1 else vectors[None]
        for start in range(0, vectors.shape[0], TURNED_ROWS):
            part = vectors[start : start + TURNED_ROWS]
            chosen = part if self.at is None else part[:, self.at]
            turned = self.rotation.turn(chosen.reshape(-1, self.rotation.size)).reshape(chosen.shape).to(x.dtype)
            if self.at is None:
                part.copy_(turned)
            else:
                part[:, self.at] = turned
        return x


class FoldedCheckpoint(Checkpoint):
    """A checkpoint whose tensors are read with their folds, in order of addition.

    exact: names of matrices that are read in float32 (float64 if stored so) instead of their own type. shared: names of
    tensors that lie in the file under another one.
    """

    def __init__(
        self, base: Checkpoint, exact: frozenset[str] = frozenset(), shared: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(base.headers)
        self.base, self.exact, self.shared = base, exact, dict(shared or {})
        self._folds: dict[str, list[Fold]] = {}

    def fold(self, folds: Mapping[str, Sequence[Fold]]) -> None:
        """Add folds by on-disk tensor name."""
        for name, changes in folds.items():
            self._folds.setdefault(name, []).extend(changes)

    def scales(self) -> dict[str, NDArray[np.float64]]:
        """The factors of tensors that were only scaled.

        "NAME/0" and "NAME/1": factors along an axis; "NAME/offset": added before scaling and subtracted after.
        """
        found: dict[str, NDArray[np.float64]] = {}
        for name, changes in sorted(self._folds.items()):
            shape = self.headers.tensors[name].spec.shape
            for change in changes if all(isinstance(change, Scaled) for change in changes) else ():
                assert isinstance(change, Scaled)
                key = f"{name}/{change.axis}"
                found[key] = found.get(key, 1.0) * change.whole(shape[change.axis]).numpy()
                if change.offset:
                    found[f"{name}/offset"] = np.array(change.offset)
        return found

    def coded(self, module: str) -> Coded | None:
        return None if f"{module}.weight" in self._folds else self.base.coded(module)

    def coded_at(self, name: str, number: int) -> Coded | None:
        return None if name in self._folds else self.base.coded_at(name, number)

    def read_at(self, name: str, number: int) -> Tensor:
        folded = name in self._folds or name in self.shared
        return self.read(name)[number] if folded else self.base.read_at(name, number)

    def rows(self, name: str) -> StoredRows | None:
        return None if name in self._folds or name in self.shared else self.base.rows(name)

    def code_grid(self, module: str, scales: str | None = None) -> Spec | None:
        return None if f"{module}.weight" in self._folds else self.base.code_grid(module, scales)

    def read(self, name: str) -> Tensor:
        if name not in self._folds:
            return self.base.read(self.shared.get(name, name))
        work = self.unrounded(name)
        return work if name in self.exact else work.to(DTYPES[self.headers.tensors[name].spec.dtype])

    def unrounded(self, name: str) -> Tensor:
        """A tensor with its folds, in float32, or float64 if it is stored so."""
        work = self.base.read(self.shared.get(name, name))
        work = work.to(torch.float64 if work.dtype == torch.float64 else torch.float32)
        for change in self._folds.get(name, ()):
            work = change(work)
        return work
