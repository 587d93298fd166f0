"""The work directory: finished sections and the hidden states that enter the next one, each written whole or not.

plan.json                          what the run is; any other is refused, naming the difference
place.json                         where the model lies, for `export`
tokens.safetensors                 windows sampled from the model itself
section-00007.safetensors          codes, scales and zero points of layer 7, with its records in the header
hidden-<name>-00008-<crc>.bin      hidden states [samples, length, hidden] that enter layer 8: `compressed`, of the
                                   model as compressed so far, and `original`, where a method asks for it
record-<...>.bin                   inputs of a layer's matrices while it is worked on (engine/run/forward.py)
"""

import errno
import fcntl
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from llmcompress.errors import PlanError, RunError
from llmcompress.grids.coded import Coded
from llmcompress.grids.grid_type import restored, spec_named
from llmcompress.store.files import bytes_of, create, file_mode, make_directory, writing
from llmcompress.store.windows import Windows, WindowsWriter

_FACTORS = "factors/"  # before the name of a space, in the name of a tensor


class Staging:
    """Finished work of one run, found again by the next start of the same run."""

    def __init__(self, path: Path, identity: Mapping[str, Any], leads: bool = True) -> None:
        """Open or create `path`; PlanError if it holds another run, naming the first key that differs.

        leads: False for a further process of the same run, which only reads; PlanError if there is nothing to read.
        """
        self.path = path
        stored = path / "plan.json"
        self._lock: int | None = None
        if stored.exists():
            try:
                before = json.loads(stored.read_text(encoding="utf-8"))
            except (ValueError, RecursionError):
                raise PlanError(f"{stored} is damaged", f"remove {path} to start afresh") from None
            difference = _difference(before, json.loads(json.dumps(identity)))
            if difference is not None:
                key, old, new = difference
                raise PlanError(
                    f"{path} holds another run: {key} was {old}, now {new}",
                    f"remove {path}, or use another --work directory",
                )
            self.resumed = True
        elif not leads:
            raise PlanError(
                f"{path} is not seen by every machine", "use a --work directory on a file system that they share"
            )
        else:
            begun = stored.with_suffix(".partial")  # the only file of a run that was killed as it began
            if path.exists() and any(file != begun for file in path.iterdir()):
                raise PlanError(f"{path} is not empty and not a work directory", "use another --work directory")
            with writing(path):
                if not path.exists():
                    make_directory(path)
            _write_atomically(stored, json.dumps(identity, indent=1).encode())
            self.resumed = False
        if leads:
            self._claim(stored)

    def _claim(self, stored: Path) -> None:
        """Hold the work directory for this process as long as it lives; PlanError if another one does."""
        self._lock = os.open(stored, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # some network file systems have no locks: run without one
            self.close()
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise PlanError(
                    f"{self.path} is in use by another run", "wait for it, or use another --work directory"
                ) from None

    def close(self) -> None:
        """Release the work directory to other runs."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __del__(self) -> None:
        self.close()

    def remember_place(self, model: Path, **facts: Any) -> None:
        """Save the model's place and further facts for `export`; they are not part of the run's identity."""
        place = {"model": str(model.absolute()), **facts}
        _write_atomically(self.path / "place.json", json.dumps(place, indent=1).encode())

    # -- sections ------------------------------------------------------------------------------------------------------

    def _section(self, number: int) -> Path:
        return self.path / f"section-{number:05d}.safetensors"

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
    ) -> None:
        """Write a finished section: matrices by on-disk module name, and records (plain data) about the matrices.

        factors: by space, the scales of the space's channels.
        """
        tensors = {f"{_FACTORS}{space}": factor.contiguous() for space, factor in (factors or {}).items()}
        specs = {}
        for module, item in coded.items():
            specs[module] = item.grid.spec.name
            tensors |= {f"{module}.{name}": tensor.contiguous() for name, tensor in item.stored().items()}
        target = self._section(number)
        partial = target.with_suffix(".partial")
        facts = {"grids": json.dumps(specs), "records": json.dumps(records)}
        sums = {name: _crc_of(item) for name, item in tensors.items()} | {
            name: zlib.crc32(text.encode()) for name, text in facts.items()
        }
        with writing(target):
            save_file(tensors, partial, metadata={**facts, "crc": json.dumps(sums)})
            partial.chmod(file_mode())  # the library lets only the owner read its files
            _publish(partial, target)

    def read_section(self, number: int) -> dict[str, Coded]:
        """All matrices of a finished section."""
        return dict(self._read(number))

    def read_coded(self, number: int, module: str) -> Coded:
        """One matrix of a finished section."""
        return next(item for name, item in self._read(number, module) if name == module)

    def _read(self, number: int, only: str | None = None) -> Iterator[tuple[str, Coded]]:
        try:
            with safe_open(self._section(number), framework="pt") as file:
                facts, sums = _checked(file.metadata())

                def tensor(name: str) -> Tensor:
                    read: Tensor = file.get_tensor(name)
                    if _crc_of(read) != sums[name]:
                        raise ValueError(f"{name} is not what was written")
                    return read

                for module, spec in facts["grids"].items():
                    if only is not None and module != only:
                        continue
                    names = [name for name in sums if name.rpartition(".")[0] == module]
                    parts = {name.rpartition(".")[2]: tensor(name) for name in names}
                    yield module, restored(spec_named(spec), parts)
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise RunError(f"{self._section(number)} is damaged: {error}", "remove this file and run again") from None

    def read_factors(self, number: int) -> dict[str, Tensor]:
        """By space, the factors of a finished section's channels."""
        try:
            with safe_open(self._section(number), framework="pt") as file:
                _, sums = _checked(file.metadata())
                found = {}
                for name in sums:
                    if name.startswith(_FACTORS):
                        found[name.removeprefix(_FACTORS)] = file.get_tensor(name)
                        if _crc_of(found[name.removeprefix(_FACTORS)]) != sums[name]:
                            raise ValueError(f"{name} is not what was written")
                return found
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise RunError(f"{self._section(number)} is damaged: {error}", "remove this file and run again") from None

    def records(self, number: int) -> dict[str, Any]:
        """The records of a finished section."""
        try:
            with safe_open(self._section(number), framework="pt") as file:
                facts, _ = _checked(file.metadata())
                return facts["records"]  # type: ignore[no-any-return]
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise RunError(f"{self._section(number)} is damaged: {error}", "remove this file and run again") from None

    # -- hidden states -------------------------------------------------------------------------------------------------

    def hidden(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, last: int) -> "Hidden | None":
        """The newest hidden states that are whole for every stream in `shapes`, or None; damaged ones are removed.

        last: the first missing section; states that enter later sections are not used.
        """
        positions: dict[int, dict[str, Windows]] = {}
        for file in sorted(self.path.glob("hidden-*.bin")):
            _, name, position, crc = file.stem.split("-")
            found = Windows(file, shapes.get(name, (0,)), dtype)
            if int(position) <= last and file.stat().st_size == found.nbytes and f"{_crc(file):08x}" == crc:
                positions.setdefault(int(position), {})[name] = found
            else:
                file.unlink()
        whole = [position for position, streams in positions.items() if set(shapes) <= set(streams)]
        return Hidden(max(whole), positions[max(whole)]) if whole else None

    def open_hidden(
        self, position: int, dtype: torch.dtype, places: Mapping[str, tuple[str, tuple[int, ...]]]
    ) -> "Hidden":
        """The hidden states of another process, by its `places`."""
        return Hidden(
            position, {name: Windows(self.path / file, shape, dtype) for name, (file, shape) in places.items()}
        )

    def keep_hidden(self, position: int, dtype: torch.dtype, streams: Mapping[str, Iterator[Tensor]]) -> "Hidden":
        """Write the hidden states that enter section `position`, batch by batch, then drop those of other positions."""
        kept = {}
        for name, batches in streams.items():
            writer = WindowsWriter(self.path / f"hidden-{name}.partial", dtype, checked=True)
            for batch in batches:
                writer.append(batch)
            kept[name] = writer.finish(self.path / f"hidden-{name}-{position:05d}-{writer.crc:08x}.bin")
        files = {item.file for item in kept.values()}
        for file in sorted(self.path.glob("hidden-*.bin")):
            if file not in files:
                file.replace(self.path / f"hidden-{file.stem.split('-')[1]}.partial")  # to be written over next
        return Hidden(position, kept)

    def remove(self) -> None:
        """Delete the work directory; only files it made itself."""
        for pattern in (
            "place.json",
            "tokens.safetensors",
            "section-*.safetensors",
            "hidden-*.bin",
            "record-*.bin",
            "*.partial",
            "plan.json",  # last: plan.json tells whose the other files are
        ):
            for file in self.path.glob(pattern):
                file.unlink()
        if not any(self.path.iterdir()):
            self.path.rmdir()


@dataclass(frozen=True)
class Hidden:
    """Hidden states [samples, length, hidden] that enter section `position`, by stream."""

    position: int
    streams: Mapping[str, Windows]

    def places(self) -> tuple[int, dict[str, tuple[str, tuple[int, ...]]]]:
        """The position, and by stream the file's name and shape, for another process to open."""
        return self.position, {name: (item.file.name, tuple(item.shape)) for name, item in self.streams.items()}


def _difference(old: Any, new: Any, key: str = "") -> tuple[str, Any, Any] | None:
    """First place at which two plain values differ: (dotted key, old, new)."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            found = _difference(old.get(name), new.get(name), f"{key}.{name}" if key else str(name))
            if found is not None:
                return found
        return None
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, (left, right) in enumerate(zip(old, new, strict=True)):
            found = _difference(left, right, f"{key}[{place}]")
            if found is not None:
                return found
        return None
    return None if old == new else (key, old, new)


def _checked(metadata: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, int]]:
    """The records and the checksums in a section's header; ValueError if the header is damaged."""
    sums: dict[str, int] = json.loads(metadata["crc"])
    facts = {}
    for name in ("grids", "records"):
        if zlib.crc32(metadata[name].encode()) != sums[name]:
            raise ValueError(f"{name} are not what was written")
        facts[name] = json.loads(metadata[name])
    return facts, sums


def _crc_of(tensor: Tensor) -> int:
    return zlib.crc32(bytes_of(tensor))


def _crc(file: Path) -> int:
    crc = 0
    with file.open("rb") as handle:
        while chunk := handle.read(1 << 24):
            crc = zlib.crc32(chunk, crc)
    return crc


def _write_atomically(target: Path, data: bytes) -> None:
    partial = target.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with writing(target):
        with create(partial) as handle:
            handle.write(data)
        _publish(partial, target)


def _publish(partial: Path, target: Path) -> None:
    """Rename a finished file to its name and flush it, so that it survives a power cut."""
    handle = os.open(partial, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    partial.replace(target)
