"""Importance matrices: of every weight matrix, how much energy each of its inputs carried over some text.

That is the mean square of every column of the matrix's input, the diagonal of its Gram matrix, by GGUF tensor name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmcompress.errors import CalibrationError

_OTHER_MODEL = "give the importance matrix of this model, or none"
_MAX_COUNT = 1 << 31  # of chunks and of tokens in one; the files have 32 bits for them


@dataclass(frozen=True, eq=False)
class ImatrixEntry:
    """Of one tensor, which holds one matrix or one of each expert: float32, finite, not negative.

    sum2 [n_mat, n_in]: sums of squares of the inputs, over tokens. counts [n_mat]: tokens, 0 or at least 1.
    """

    sum2: NDArray[np.float32]
    counts: NDArray[np.float32]

    @property
    def importance(self) -> NDArray[np.float32]:
        """Mean squares of the inputs [n_mat, n_in]; zeros where no token was counted."""
        counts = self.counts[:, None]
        return np.divide(self.sum2, counts, out=np.zeros_like(self.sum2), where=counts > 0)


@dataclass(frozen=True, eq=False)
class Imatrix:
    """Entries by GGUF tensor name, and what they were collected from: `chunk_count` chunks of `chunk_size` tokens.

    CalibrationError, naming the entry, for values that no text gives.
    """

    entries: Mapping[str, ImatrixEntry]
    datasets: tuple[str, ...]
    chunk_count: int
    chunk_size: int

    def __post_init__(self) -> None:
        if not (0 <= self.chunk_count < _MAX_COUNT and 1 <= self.chunk_size < _MAX_COUNT):
            raise CalibrationError(
                f"an importance matrix of {self.chunk_count:,} chunks of {self.chunk_size:,} tokens cannot be"
            )
        if not self.entries:
            raise CalibrationError("an importance matrix without entries says nothing", "collect it again")
        for name, entry in self.entries.items():
            wrong = _wrong(entry)
            if wrong is not None:
                raise CalibrationError(f"the importance matrix is damaged: {name} has {wrong}", "collect it again")

    def importance(self, name: str) -> NDArray[np.float32]:
        """Mean squares of the inputs of a tensor [n_mat, n_in]; zeros for a matrix for which no token was counted."""
        return self.entries[name].importance


@dataclass(frozen=True, eq=False)
class Floored:
    """Importance to weigh errors with, and what was made up for it.

    importance: float32 [n_mat, n_in]. experts: numbers of the matrices without data; source: what they were
    given, "mean of the others" or "ones". columns: how many others were raised, to `floor` times the median of their
    matrix.
    """

    importance: NDArray[np.float32]
    experts: tuple[int, ...]
    source: str | None
    columns: int
    floor: float


def floored(entry: ImatrixEntry, floor: float = 1e-3) -> Floored:
    """The importance of an entry, fit to weigh errors with: a zero would leave its column to chance.

    A matrix without data is given the mean of the others, or ones if there are none. Every column is given at least
    `floor` times the median of the columns above zero of its matrix; not the mean, which one column can lift a
    thousandfold.
    """
    importance = entry.importance
    seen = (importance > 0).any(axis=1)
    known = importance[seen]
    median = np.nanmedian(np.where(known > 0, known, np.nan), axis=1, keepdims=True)
    least = np.maximum(floor * median, np.finfo(np.float32).tiny)
    importance[seen] = np.maximum(known, least)
    experts = tuple(np.flatnonzero(~seen).tolist())
    source = None
    if experts:
        source = "mean of the others" if seen.any() else "ones"
        importance[~seen] = importance[seen].mean(axis=0, dtype=np.float64) if seen.any() else 1
    return Floored(importance, experts, source, int((known < least).sum()), floor)


def unfloored(entry: ImatrixEntry) -> Floored:
    """The importance of an entry as llama-quantize takes it: ones for a matrix without data, and zeros stay."""
    unseen = entry.counts == 0
    importance = np.where(unseen[:, None], np.float32(1), entry.importance)
    return Floored(importance, tuple(np.flatnonzero(unseen).tolist()), "ones" if unseen.any() else None, 0, 0.0)


def merge(parts: Sequence[Imatrix]) -> Imatrix:
    """One importance matrix of all the text of several: sums and counts add. Chunks are counted in those of the first.

    CalibrationError if a tensor has not the same sizes in all.
    """
    entries: dict[str, ImatrixEntry] = {}
    for part in parts:
        for name, entry in part.entries.items():
            entries[name] = _added(name, entries[name], entry) if name in entries else entry
    size = parts[0].chunk_size
    chunks = -(-sum(part.chunk_count * part.chunk_size for part in parts) // size)
    datasets = tuple(dict.fromkeys(name for part in parts for name in part.datasets))
    return Imatrix(dict(sorted(entries.items())), datasets, chunks, size)


def check(imatrix: Imatrix, wanted: Mapping[str, tuple[int, int]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names in `wanted` that the importance matrix lacks, in that order; its names that are not wanted, sorted.

    wanted: columns and matrices (n_in, n_mat) by GGUF tensor name. CalibrationError if the importance matrix is of
    another model: no name in common, or other sizes.
    """
    common = [name for name in wanted if name in imatrix.entries]
    if wanted and not common:
        one, other = next(iter(imatrix.entries)), next(iter(wanted))
        raise CalibrationError(
            f"the importance matrix is of another model: it has {one}, for example, but not {other}", _OTHER_MODEL
        )
    for name in common:
        n_mat, n_in = imatrix.entries[name].sum2.shape
        columns, matrices = wanted[name]
        if (n_in, n_mat) not in ((columns, matrices), (columns * matrices, 1)):
            raise CalibrationError(
                f"the importance matrix is of another model: {name} has {n_mat} x {n_in} columns there, "
                f"and {matrices} x {columns} in this model",
                _OTHER_MODEL,
            )
    foreign = sorted(set(imatrix.entries) - set(wanted))
    return tuple(name for name in wanted if name not in imatrix.entries), tuple(foreign)


def split_experts(imatrix: Imatrix, wanted: Mapping[str, tuple[int, int]]) -> Imatrix:
    """The same with experts told apart: a legacy file has one row for all of a tensor. Sizes as `check` found them."""
    entries = dict(imatrix.entries)
    for name, (columns, matrices) in wanted.items():
        entry = entries.get(name)
        if entry is not None and entry.sum2.shape != (matrices, columns):
            sum2 = entry.sum2.reshape(matrices, columns)
            entries[name] = ImatrixEntry(sum2, np.repeat(entry.counts, matrices))
    return replace(imatrix, entries=entries)


def numbered(experts: Sequence[int], of: int) -> str:
    """Some of the matrices of a tensor, for people."""
    if of == 1:
        return "it"
    return f"{len(experts)} of {of} experts ({', '.join(map(str, experts[:8]))}{', ...' if len(experts) > 8 else ''})"


def _added(name: str, one: ImatrixEntry, other: ImatrixEntry) -> ImatrixEntry:
    if one.sum2.shape != other.sum2.shape:
        raise CalibrationError(
            f"importance matrices of different models: {name} has {list(one.sum2.shape)} columns in one "
            f"and {list(other.sum2.shape)} in another",
            "merge those of one model",
        )
    return ImatrixEntry(one.sum2 + other.sum2, one.counts + other.counts)


def _wrong(entry: ImatrixEntry) -> str | None:
    """What no text could have given."""
    if entry.sum2.ndim != 2 or entry.counts.shape != entry.sum2.shape[:1] or not entry.sum2.size:
        return f"sums {list(entry.sum2.shape)} for counts {list(entry.counts.shape)}"
    for what, values in (("sums", entry.sum2), ("counts", entry.counts)):
        if not np.isfinite(values).all():
            return f"{what} that are not finite"
        if (values < 0).any():
            return f"{what} below zero"
    if ((entry.counts > 0) & (entry.counts < 1)).any():
        return "counts below one"
    if entry.sum2[entry.counts == 0].any():
        return "sums without a count"
    return None
