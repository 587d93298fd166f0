"""Statistics of inputs, stored for later runs: other methods and widths can use them without running text again.

DIR/<key>/about.json                  of what model and tokens, and which steps were at work when they were gathered
DIR/<key>/layer-00007.safetensors     by space: the upper triangle of the mean Gram matrix, or the squares; its tokens

The key is a hash of model, tokens, the type layers ran in, the steps that came before pruning and rounding, and those
themselves: inputs hold the errors of whatever was done to the matrices before them.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from llmcompress.errors import PlanError
from llmcompress.methods.base import Statistics
from llmcompress.stats.energy import Energy, Squares
from llmcompress.stats.gram import Gram
from llmcompress.store.files import file_mode, make_directory, writing

STORED = frozenset({"gram", "squares"})  # names of the statistics (stats/) that a store holds
_ABOUT = "about.json"


@dataclass(frozen=True)
class Kept:
    """Statistics in a store. about: what they are of; steps: what had been done to the matrices before."""

    path: Path
    about: Mapping[str, Any]

    @property
    def key(self) -> str:
        return self.path.name

    @property
    def steps(self) -> list[str]:
        """The names of the steps that were active when the statistics were gathered."""
        return [str(step) for step in self.about.get("steps", [])]

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.iterdir())

    @property
    def complete(self) -> bool:
        """Whether every layer is there."""
        return all(self._file(number).exists() for number in range(int(self.about["layers"])))

    def _file(self, number: int) -> Path:
        return self.path / f"layer-{number:05d}.safetensors"

    def write(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of a layer's input statistics, which `packed_statistics` returns."""
        target = self._file(number)
        partial = target.with_suffix(".partial")
        with writing(target):
            save_file(dict(tensors), partial)
            partial.chmod(file_mode())
            partial.replace(target)

    def read(self, number: int, device: torch.device) -> dict[str, Statistics]:
        """Statistics of a layer's inputs by space; PlanError for a damaged file."""
        try:
            with safe_open(self._file(number), framework="pt") as file:
                spaces = sorted({name.rpartition("/")[0] for name in file.keys()})  # noqa: SIM118
                return {space: _restored(file, space, device) for space in spaces}
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise PlanError(f"{self._file(number)} is damaged: {error}", f"remove {self.path}") from None

    def has(self, number: int, spaces: Mapping[str, bool]) -> bool:
        """Whether a layer's statistics hold these spaces, with a Gram matrix for spaces of value True."""
        try:
            with safe_open(self._file(number), framework="pt") as file:
                names = set(file.keys())
        except (SafetensorError, OSError):
            return False
        grams = {name.rpartition("/")[0] for name in names if name.endswith("/gram")}
        known = grams | {name.rpartition("/")[0] for name in names if name.endswith("/squares")}
        return all(space in (grams if gram else known) for space, gram in spaces.items())

    def remove(self) -> None:
        """Delete the statistics, and no other files."""
        for file in [*self.path.glob("layer-*"), self.path / _ABOUT]:
            file.unlink(missing_ok=True)
        self.path.rmdir()


def packed_statistics(found: Mapping[str, Statistics]) -> dict[str, Tensor]:
    """The tensors to store for input statistics by space: a Gram matrix's triangle, or else squares."""
    tensors: dict[str, Tensor] = {}
    for space, statistics in found.items():
        if statistics.gram is not None:
            rows, columns = torch.triu_indices(statistics.gram.size, statistics.gram.size)
            tensors[f"{space}/gram"] = statistics.gram.mean()[rows, columns].to("cpu")
            tensors[f"{space}/tokens"] = torch.tensor([statistics.gram.tokens])
        elif statistics.squares is not None:
            tensors[f"{space}/squares"] = statistics.squares.sums
            tensors[f"{space}/tokens"] = torch.tensor([statistics.squares.tokens])
    return tensors


def _restored(file: Any, space: str, device: torch.device) -> Statistics:
    tokens = int(file.get_tensor(f"{space}/tokens"))
    if f"{space}/squares" in file.keys():  # noqa: SIM118
        return Statistics({"squares": Squares(Energy(file.get_tensor(f"{space}/squares") * 1.0, tokens, 0))})
    stored = file.get_tensor(f"{space}/gram")
    size = int(((8 * stored.numel() + 1) ** 0.5 - 1) / 2 + 0.5)
    mean = torch.zeros(size, size)
    rows, columns = torch.triu_indices(size, size)
    mean[rows, columns] = stored
    mean.T[rows, columns] = stored
    return Statistics({"gram": Gram.of(mean.to(device), tokens)})


def all_statistics(store: Path) -> list[Kept]:
    """All statistics in a directory, in order of their keys; PlanError for one that is damaged."""
    found = []
    for file in sorted(store.glob(f"*/{_ABOUT}")):
        try:
            about = json.loads(file.read_text(encoding="utf-8"))
            int(about["layers"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise PlanError(f"{file} is damaged", f"remove {file.parent}") from None
        found.append(Kept(file.parent, about))
    return found


def statistics_entry(store: Path, about: Mapping[str, Any]) -> Kept:
    """The entry of a store for statistics `about` a run, created unless it exists."""
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    path = store / key
    if not (path / _ABOUT).exists():
        with writing(path):
            if not path.exists():
                make_directory(path)
            partial = path / "about.partial"
            partial.write_text(json.dumps(about, indent=1, sort_keys=True), encoding="utf-8")
            partial.replace(path / _ABOUT)
    return Kept(path, about)
