"""The work directory: finished sections and the hidden states that enter the next one, each written whole or not.

.llmcompress-work                  locked by the process that works here (store/claim.py)
plan.json                          what the run is; any other is refused, naming the differences
place.json                         where the model lies, for `export`
tokens.safetensors                 windows sampled from the model itself
training.safetensors               what `recover` has learnt so far
guidance-00007.safetensors         what errors in layer 7 do to the prediction, where that is measured
section-00007.safetensors          codes, scales and zero points of layer 7, with its records in the header
hidden-<name>-00008-<crc>.bin      hidden states [samples, length, hidden] that enter layer 8: `compressed`, of the
                                   model as compressed so far, and `original`, where a method asks for it
record-<...>.bin                   what is of use while a layer is worked on, such as inputs of its matrices

Checksums are made with the run and the name of the file, so that a file of another run or another layer is not used.
"""

import json
import os
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmcompress.errors import PlanError, RunError
from llmcompress.grids.coded import Coded
from llmcompress.grids.grid_type import restored, spec_named
from llmcompress.store.claim import Claim, refuse_other
from llmcompress.store.files import writing
from llmcompress.store.folder import Folder, HeldFile
from llmcompress.store.sealed import sealed, unsealed
from llmcompress.store.tensor_file import CheckedTensors, checked_tensors, read_tokens, write_tensors, write_tokens
from llmcompress.store.windows import Windows, WindowsWriter

PLAN, PLACE = "plan.json", "place.json"
_MARK = ".llmcompress-work"
_FACTORS = "factors/"  # before the name of factors, in the name of a tensor
_GAINS = "gains/"  # before that of a norm's weight
_OWN = re.compile(
    r"(plan\.json|place\.json|t(?:okens|raining)\.safetensors|(?:section|guidance)-\d{5,}\.safetensors)(\.partial)?"
    r"|(hidden|record)-.+\.(bin|partial)"
)
_HIDDEN = re.compile(r"hidden-(\w+)-(\d{5,})-([0-9a-f]{8})\.bin")
_TOKENS, _TRAINING = "tokens.safetensors", "training.safetensors"
_SHOWN, _SHORT = 6, 100  # keys that differ, and characters of their values


class Staging:
    """Finished work of one run, found again by the next start of the same run."""

    def __init__(self, path: Path, identity: Mapping[str, Any], leads: bool = True, restart: bool = False) -> None:
        """Open or create `path`, and hold it until `close`.

        PlanError if another run is at work there, or if it holds another run, naming the keys that differ; unless
        `restart`, which throws finished work away. leads: False for a further process of the same run, which only
        reads; PlanError if there is nothing to read.
        """
        self.path = path
        said = json.loads(json.dumps(identity))
        self._of = sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
        self.folder = self._claimed() if leads else self._followed()
        try:
            _refuse_planted(self.folder)
            if restart and leads:
                self._clear()
            self.resumed = _is_same(self.folder, said)
            if not self.resumed:
                self._write(PLAN, identity)
        except BaseException:
            self.close()
            raise

    def _claimed(self) -> Folder:
        return Claim(self.path, _MARK, f"{self.path} is in use by", "wait for it, or use another --work directory")

    def _followed(self) -> Folder:
        if (self.path / PLAN).exists():
            return Folder(self.path)
        raise PlanError(
            f"{self.path} is not seen by every machine", "use a --work directory on a file system that they share"
        )

    def close(self) -> None:
        """Release the work directory to other runs."""
        self.folder.close()

    def remember_place(self, model: Path, adapter: Path | None, **facts: Any) -> None:
        """Save where model and adapter are, and further facts, for `export`; they are no part of the run's identity."""
        place = {} if adapter is None else {"adapter": str(adapter.absolute())}
        self._write(PLACE, {"model": str(model.absolute()), **place, **facts})

    def _write(self, name: str, data: Mapping[str, Any]) -> None:
        with writing(self.path / name):
            (self.folder / name).write_whole([sealed(data)])

    # -- sections ------------------------------------------------------------------------------------------------------

    def _section(self, number: int) -> HeldFile:
        return self.folder / f"section-{number:05d}.safetensors"

    def missing(self, layers: int) -> list[int]:
        """The numbers of those of `layers` sections that are not staged yet."""
        return [number for number in range(layers) if not self.has(number)]

    def has(self, number: int) -> bool:
        return self._section(number).exists()

    def write_section(
        self,
        number: int,
        coded: Mapping[str, Coded],
        records: Mapping[str, Any],
        factors: Mapping[str, Tensor] | None = None,
        gains: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write a finished section: matrices by on-disk module name, and records (plain data) about the matrices.

        factors: scales of channels, by the names that `read_factors` gives them. gains: factors of those of norms, by
        name of the weight.
        """
        tensors = {f"{_FACTORS}{space}": factor for space, factor in (factors or {}).items()}
        tensors |= {f"{_GAINS}{name}": factor for name, factor in (gains or {}).items()}
        grids = {}
        for module, item in coded.items():
            grids[module] = item.grid.spec.name
            tensors |= {f"{module}.{name}": tensor for name, tensor in item.stored().items()}
        with writing(self._section(number)):
            write_tensors(self._section(number), self._of, tensors, {"grids": grids, "records": records})

    def read_section(self, number: int) -> dict[str, Coded]:
        """All matrices of a finished section."""
        with self._opened(self._section(number)) as file:
            return dict(_matrices(file))

    def read_coded(self, number: int, module: str) -> Coded:
        """One matrix of a finished section."""
        with self._opened(self._section(number)) as file:
            return next(coded for _, coded in _matrices(file, module))

    def read_factors(self, number: int) -> dict[str, Tensor]:
        """The factors of a finished section's channels, by name."""
        return self._read(number, _FACTORS)

    def read_gains(self, number: int) -> dict[str, Tensor]:
        """By name of a norm's weight, the factors of its gains in a finished section."""
        return self._read(number, _GAINS)

    def _read(self, number: int, beginning: str) -> dict[str, Tensor]:
        """The tensors of a section whose names have a beginning, by the rest of it."""
        with self._opened(self._section(number)) as file:
            names = [name for name in file.names if name.startswith(beginning)]
            return {name.removeprefix(beginning): file.read(name) for name in names}

    def records(self, number: int) -> dict[str, Any]:
        """The records of a finished section."""
        with self._opened(self._section(number)) as file:
            return dict(file.facts["records"])

    @contextmanager
    def _opened(self, held: HeldFile) -> Iterator[CheckedTensors]:
        try:
            with checked_tensors(held, self._of) as file:
                yield file
        except (OSError, ValueError) as error:
            raise RunError(f"{held} is damaged: {error}", "remove this file and run again") from None

    # -- guidance ------------------------------------------------------------------------------------------------------

    def _guidance(self, number: int) -> HeldFile:
        return self.folder / f"guidance-{number:05d}.safetensors"

    def has_guidance(self, number: int) -> bool:
        return self._guidance(number).exists()

    def write_guidance(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write what gradients say of a layer, by name."""
        with writing(self._guidance(number)):
            write_tensors(self._guidance(number), self._of, tensors, {})

    def read_guidance(self, number: int) -> dict[str, Tensor]:
        """What was written of a layer; RunError for a damaged file."""
        with self._opened(self._guidance(number)) as file:
            return {name: file.read(name) for name in file.names}

    def remove_guidance(self, layers: Iterable[int]) -> None:
        """Delete what was written of layers, where there is anything."""
        for number in filter(self.has_guidance, layers):
            self._guidance(number).unlink()

    # -- hidden states -------------------------------------------------------------------------------------------------

    def hidden(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, last: int) -> "Hidden | None":
        """The newest hidden states that are whole for every stream in `shapes`, or None; damaged ones are removed.

        last: the first missing section; states that enter later sections are not used.
        """
        positions: dict[int, dict[str, Windows]] = {}
        for match in filter(None, map(_HIDDEN.fullmatch, self.folder.names())):
            name, position = match[1], int(match[2])
            found = Windows(self.folder / match[0], shapes.get(name, (0,)), dtype)
            if position <= last and found.crc(self.seed(f"{name}-{position}")) == int(match[3], 16):
                positions.setdefault(position, {})[name] = found
            else:
                found.file.unlink()
        whole = [position for position, streams in positions.items() if set(shapes) <= set(streams)]
        return Hidden(max(whole), positions[max(whole)]) if whole else None

    def seed(self, name: str) -> int:
        """What the CRC-32 of a file begins with."""
        return zlib.crc32(f"{self._of}/{name}".encode())

    def open_hidden(
        self, position: int, dtype: torch.dtype, places: Mapping[str, tuple[str, tuple[int, ...]]]
    ) -> "Hidden":
        """The hidden states of another process, by its `places`."""
        return Hidden(
            position, {name: Windows(self.folder / file, shape, dtype) for name, (file, shape) in places.items()}
        )

    def keep_hidden(self, position: int, dtype: torch.dtype, streams: Mapping[str, Iterator[Tensor]]) -> "Hidden":
        """Write the hidden states that enter section `position`, batch by batch, then drop those of other positions."""
        kept = {name: self.keep_stream(name, position, dtype, batches) for name, batches in streams.items()}
        files = {item.file.name for item in kept.values()}
        for match in filter(None, map(_HIDDEN.fullmatch, self.folder.names())):
            if match[0] not in files:
                (self.folder / match[0]).rename(f"hidden-{match[1]}.partial")  # to be written over next
        return Hidden(position, kept)

    def keep_stream(self, name: str, position: int, dtype: torch.dtype, batches: Iterable[Tensor]) -> Windows:
        """Write the hidden states of one stream that enter section `position`, which `hidden` finds."""
        writer = WindowsWriter(self.folder / f"hidden-{name}.partial", dtype, self.seed(f"{name}-{position}"))
        for batch in batches:
            writer.append(batch)
        return writer.finish(lambda crc: f"hidden-{name}-{position:05d}-{crc:08x}.bin")

    # -- tokens --------------------------------------------------------------------------------------------------------

    def keep_tokens(self, tokens: Tensor) -> None:
        """Keep windows [samples, length] for the next start, which `kept_tokens` gives back."""
        write_tokens(self.folder / _TOKENS, tokens)

    # -- training ------------------------------------------------------------------------------------------------------

    def keep_training(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Keep what training has come to for the next start, which `training` gives back."""
        with writing(self.folder / _TRAINING):
            write_tensors(self.folder / _TRAINING, self._of, tensors, facts)

    def training(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What was kept of training, tensors and plain data; None if nothing was."""
        file = self.folder / _TRAINING
        if not file.exists():
            return None
        try:
            with checked_tensors(file, self._of) as found:
                return {name: found.read(name) for name in found.names}, found.facts
        except (OSError, ValueError) as error:
            raise RunError(f"{file} is damaged: {error}", "start afresh with --restart") from None

    def remove(self) -> None:
        """Delete the work directory; only files it made itself."""
        self._clear()
        if isinstance(self.folder, Claim) and self.folder.names() == [_MARK]:
            self.folder.remove()

    def _clear(self) -> None:
        own = [name for name in self.folder.names() if _OWN.fullmatch(name) and name != PLAN]
        for name in [*own, PLAN]:  # the plan last: it tells whose the other files are
            (self.folder / name).unlink()


@dataclass(frozen=True)
class Hidden:
    """Hidden states [samples, length, hidden] that enter section `position`, by stream."""

    position: int
    streams: Mapping[str, Windows]

    def places(self) -> tuple[int, dict[str, tuple[str, tuple[int, ...]]]]:
        """The position, and by stream the file's name and shape, for another process to open."""
        return self.position, {name: (item.file.name, tuple(item.shape)) for name, item in self.streams.items()}


def refuse_other_work(path: Path, identity: Mapping[str, Any], restart: bool, unknown: Collection[str] = ()) -> None:
    """PlanError where a run of this identity could not use a work directory. unknown: keys that are not compared."""
    if os.path.lexists(path):
        with closing(Folder(path)) as folder:
            refuse_other(folder, _MARK)
            _refuse_planted(folder)
            if not restart:
                _is_same(folder, json.loads(json.dumps(identity)), unknown)


def _refuse_planted(folder: Folder) -> None:
    """PlanError for a file that this user cannot have written, under a name that work has."""
    try:
        for name in folder.names():
            if _OWN.fullmatch(name):
                (folder / name).exists()
    except RunError as error:
        raise PlanError(error.message, error.hint) from None


def _is_same(folder: Folder, said: Any, unknown: Collection[str] = ()) -> bool:
    """Whether this run is staged here already; False where none is. unknown: keys of it that are not compared."""
    try:
        before = unsealed((folder / PLAN).read_bytes())
    except FileNotFoundError:
        return False
    except ValueError:
        raise PlanError(f"{folder.path / PLAN} is damaged", "start afresh with --restart") from None
    old, new = (dict(_leaves(side)) for side in (before, said))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key) and key not in unknown]
    if not keys:
        return True
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    raise PlanError(
        f"{folder.path} holds another run: {', '.join(_change(key, old, new) for key in keys[:_SHOWN])}{more}",
        "use --restart to throw it away, or another --work directory",
    )


def begun_run(path: Path) -> dict[str, Any]:
    """What the run of a work directory is; empty where none was begun, or where opening it will tell what is wrong."""
    try:
        with closing(Folder(path)) as folder:
            return dict(unsealed((folder / PLAN).read_bytes()))
    except (OSError, ValueError, RunError):
        return {}


def kept_work(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the run of a work directory is, and what it remembered of its place.

    OSError or ValueError if there is none.
    """
    with closing(Folder(path)) as folder:
        plan, place = (unsealed((folder / name).read_bytes()) for name in (PLAN, PLACE))
        return plan, place


def kept_tokens(path: Path) -> Tensor | None:
    """The windows [samples, length] that an earlier start has kept in a work directory, if it has."""
    if not path.is_dir():
        return None
    with closing(Folder(path)) as folder:
        return read_tokens(folder / _TOKENS)


def _matrices(file: CheckedTensors, only: str | None = None) -> Iterator[tuple[str, Coded]]:
    for module, spec in file.facts["grids"].items():
        if only is None or module == only:
            names = [name for name in file.names if name.rpartition(".")[0] == module]
            yield module, restored(spec_named(spec), {name.rpartition(".")[2]: file.read(name) for name in names})


def _leaves(data: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of plain data by its dotted key."""
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(data, dict):
        items = ((f"{key}.{name}" if key else name, value) for name, value in data.items())
    elif isinstance(data, list):
        items = ((f"{key}[{place}]", value) for place, value in enumerate(data))
    if not data or not isinstance(data, dict | list):
        yield key, data
    for name, value in items:
        yield from _leaves(value, name)


def _change(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """A key, with what it was and what it is, where that is short."""
    values = [side.get(key, "not there") for side in (old, new)]
    said = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return f"{key} was {said[0]}, now {said[1]}" if max(map(len, said)) < _SHORT else key
