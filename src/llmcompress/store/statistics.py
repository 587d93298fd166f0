"""Statistics of inputs, stored for later runs: other methods and widths can use them without running text again.

DIR/<key>/about.json                  of what model and tokens, and which steps were at work when they were gathered
DIR/<key>/layer-00007.safetensors     by space: the upper triangle of the mean Gram matrix, or the squares; its tokens,
                                      and for a Gram matrix the weight of what it borrowed

What gradients say of the model as it was (`--guided`) is stored alike, a file for each layer.

The key is a hash of model, tokens, the type layers ran in, the steps that came before pruning and rounding, and those
themselves: inputs hold the errors of whatever was done to the matrices before them.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmcompress.errors import PlanError, RunError
from llmcompress.methods.base import Statistics
from llmcompress.stats.energy import Energy, Squares
from llmcompress.stats.gram import Gram
from llmcompress.store.claim import Claim, ClaimedError
from llmcompress.store.files import writing
from llmcompress.store.folder import Folder, HeldFile
from llmcompress.store.tensor_file import CheckedTensors, checked_tensors, write_tensors

STORED = frozenset({"gram", "squares"})  # names of the statistics (stats/) that a store holds
_ABOUT, _MARK = "about.json", ".llmcompress-stats"


@dataclass(frozen=True)
class Kept:
    """Statistics in a store. about: what they are of; steps: what had been done to the matrices before."""

    folder: Folder
    about: Mapping[str, Any]

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def key(self) -> str:
        return self.path.name

    @property
    def steps(self) -> list[str]:
        """The names of the steps that were active when the statistics were gathered."""
        return [str(step) for step in self.about.get("steps", [])]

    @property
    def nbytes(self) -> int:
        return sum((self.folder / name).stat().st_size for name in self.folder.names())

    @property
    def complete(self) -> bool:
        """Whether every layer is there."""
        return all(self._file(number).exists() for number in range(int(self.about["layers"])))

    def _file(self, number: int) -> HeldFile:
        return self.folder / f"layer-{number:05d}.safetensors"

    def write(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of a layer: its input statistics as `packed_statistics` returns them, or its gradients."""
        with writing(self._file(number)):
            write_tensors(self._file(number), self.key, tensors, {})

    def read(self, number: int, space: str, device: torch.device) -> Statistics | None:
        """Statistics of an input of a layer, None where there are none; RunError for a damaged file."""
        with self._opened(number) as file:
            return _restored(file, space, device) if f"{space}/tokens" in file.names else None

    def tensors(self, number: int) -> dict[str, Tensor]:
        """All tensors of a layer by name; RunError for a damaged file."""
        with self._opened(number) as file:
            return {name: file.read(name) for name in file.names}

    @contextmanager
    def _opened(self, number: int) -> Iterator[CheckedTensors]:
        try:
            with checked_tensors(self._file(number), self.key) as file:
                yield file
        except (OSError, ValueError, RuntimeError) as error:
            raise RunError(f"{self._file(number)} is damaged: {error}", f"remove {self.path}") from None

    def has(self, number: int, spaces: Mapping[str, bool]) -> bool:
        """Whether a layer's statistics hold these spaces, with a Gram matrix for spaces of value True.

        PlanError for a file that is damaged so that it does not tell.
        """
        try:
            with checked_tensors(self._file(number), self.key) as file:
                names = set(file.names)
        except (OSError, ValueError) as error:
            raise PlanError(f"{self._file(number)} is damaged: {error}", f"remove {self.path}") from None
        grams = {name.rpartition("/")[0] for name in names if name.endswith("/gram")}
        known = grams | {name.rpartition("/")[0] for name in names if name.endswith("/squares")}
        return all(space in (grams if gram else known) for space, gram in spaces.items())

    def remove(self) -> None:
        """Delete the statistics, and no other files; PlanError while a run fills them."""
        Claim(self.path, _MARK, f"{self.path} is filled by", "wait for it").close()
        for name in self.folder.names():
            if name.startswith((_ABOUT, "layer-")) or name == _MARK:
                (self.folder / name).unlink()
        self.path.rmdir()


def packed_statistics(found: Mapping[str, Statistics]) -> dict[str, Tensor]:
    """The tensors to store for input statistics by space: a Gram matrix's triangle, or else squares."""
    tensors: dict[str, Tensor] = {}
    for space, statistics in found.items():
        if statistics.gram is not None:
            mean = statistics.gram.mean()
            tensors[f"{space}/gram"] = torch.cat([line[row:] for row, line in enumerate(mean)]).to("cpu")
            counts = [statistics.gram.tokens, statistics.gram.borrowed]
            tensors[f"{space}/tokens"] = torch.tensor(counts, dtype=torch.float64)
        elif statistics.squares is not None:
            tensors[f"{space}/squares"] = statistics.squares.sums
            tensors[f"{space}/tokens"] = torch.tensor([statistics.squares.tokens], dtype=torch.float64)
    return tensors


def _restored(file: CheckedTensors, space: str, device: torch.device) -> Statistics:
    tokens, *borrowed = file.read(f"{space}/tokens").tolist()
    if f"{space}/squares" in file.names:
        return Statistics({"squares": Squares(Energy(file.read(f"{space}/squares") * 1.0, int(tokens), 0))})
    stored = file.read(f"{space}/gram")
    size = int(((8 * stored.numel() + 1) ** 0.5 - 1) / 2 + 0.5)
    mean = torch.zeros(size, size)
    for row, line in enumerate(torch.split(stored, list(range(size, 0, -1)))):
        mean[row, row:] = line
        mean[row:, row] = line
    return Statistics({"gram": Gram.of(mean.to(device), int(tokens), sum(borrowed))})


def all_statistics(store: Path) -> list[Kept]:
    """All statistics in a directory, in order of their keys; PlanError for one that is damaged, or of another user."""
    if not store.exists():
        return []
    Folder(store).close()  # refuses what is not this user's own
    return [kept_statistics(file.parent) for file in sorted(store.glob(f"*/{_ABOUT}"))]


def kept_statistics(path: Path) -> Kept:
    """The statistics in a directory of a store. PlanError if they are damaged, or of another user."""
    folder = Folder(path)
    try:
        about = json.loads((folder / _ABOUT).read_bytes())
        if _key(about) != path.name:
            raise ValueError
        int(about["layers"])
    except RunError as error:
        raise PlanError(error.message, error.hint) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise PlanError(f"{path / _ABOUT} is damaged", f"remove {path}") from None
    return Kept(folder, about)


def remove_store(store: Path) -> None:
    """Delete all statistics in a store, and the store where nothing else is in it; PlanError while a run fills them."""
    for kept in all_statistics(store):
        kept.remove()
    with suppress(OSError):  # there is none, or something else is in it
        store.rmdir()


def statistics_entry(store: Path, about: Mapping[str, Any]) -> Kept | None:
    """The entry of a store for statistics `about` a run, created unless it exists; None while another run fills it."""
    with writing(store):
        if store.exists():
            Folder(store).close()
        try:
            entry = Claim(store / _key(about), _MARK, f"{store} is filled by", "wait for it")
        except ClaimedError:
            return None
        (entry / _ABOUT).write_whole([json.dumps(about, indent=1, sort_keys=True).encode()])
    return Kept(entry, about)


def finished_entry(store: Path, about: Mapping[str, Any]) -> Kept | None:
    """The entry of a store for statistics `about` a run, where all layers are there."""
    path = store / _key(about)
    kept = kept_statistics(path) if (path / _ABOUT).exists() else None
    return kept if kept is not None and kept.complete else None


def _key(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
