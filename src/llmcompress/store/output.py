"""Writing a model directory so that it appears whole or not at all.

OUT.partial beside OUT is claimed before anything is computed (store/unfinished.py), and holds all that is unfinished:

files/      what becomes OUT; `commit` makes it durable and renames it
replaced/   what was OUT before, for the moment between two renames
scratch/    hidden states of commands that keep nothing for a later start

Weights are safetensors whose headers are known before the first tensor, so that tensors pass through memory one by one.
If the system refuses a write, as on a full disk, a RunError names the file.
"""

import hashlib
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from llmcompress.errors import ExistsError, PlanError, RunError
from llmcompress.formats.base import TensorSpec
from llmcompress.store.files import bytes_of, create, json_bytes, make_parent, refuse_unwritable, writing
from llmcompress.store.folder import Folder
from llmcompress.store.side_files import read_side_file, side_files
from llmcompress.store.unfinished import claimed, refuse_foreign, unfinished
from llmcompress.store.weight_files import WeightFile, index_bytes, shards

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_FILES, _REPLACED, _DELETED, _SCRATCH = "files", "replaced", "deleted", "scratch"


class OutputDirectory:
    """A directory that is being written; use as a context manager and `commit` at the end, or nothing remains.

    path: the final place. It must not exist, unless `overwrite`: then `commit` replaces the model directory there.
    Permissions follow the umask of the process, but never let everybody write. told_by: files any of which marks a
    directory as one that may be replaced. files: what report.json will say of each file written so far.
    """

    told_by: tuple[str, ...] = ("config.json", "llmcompress.yaml")  # the second alone beside GGUF files

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        if path.name in ("", ".."):
            raise PlanError(f"{path} is not a name for a new directory", "give another directory")
        self.path = path
        self.partial = unfinished(path) / _FILES
        self.overwrite = overwrite
        self.files: dict[str, dict[str, Any]] = {}
        self._refuse_existing()
        refuse_unwritable(unfinished(path))
        refuse_foreign(path)

    def __enter__(self) -> "OutputDirectory":
        """Claim the path. PlanError if another run has it, or if it must not be written to."""
        self._refuse_existing()
        with writing(self.partial):
            self.claim = claimed(self.path)
            try:
                self._put_back()
                self.claim.clear(but=self.claim.mark)
                self._refuse_existing()
                self.claim.made(_FILES).close()
            except BaseException:
                self.claim.remove()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()
        self.claim.remove()

    def scratch(self) -> Folder:
        """A new directory for what is of no use to a later start."""
        return self.claim.made(_SCRATCH)

    def write_weights(
        self,
        specs: Sequence[TensorSpec],
        tensors: "Iterable[tuple[str, Tensor]]",
        shard_bytes: int | None = None,
        stem: str = "model",
    ) -> dict[str, str]:
        """Write `tensors` as `specs` (same names, same order) announce them; SHA-256 (hex) of each one's bytes by name.

        Files are model.safetensors, or model-00001-of-0000N.safetensors with an index; `stem` takes the place of
        "model". RunError if a tensor is missing,
        superfluous, out of order, or not of the announced type and shape.
        """
        files = shards(specs, shard_bytes, stem)
        place = {name: file for file in files for name in file.begins}
        hashes: dict[str, str] = {}
        arriving = iter(tensors)
        handle: BinaryIO | None = None
        current: WeightFile | None = None
        try:
            for spec in specs:
                name, tensor = next(arriving, (None, None))
                if tensor is None or name != spec.name:
                    raise RunError(f"tensor {spec.name} was expected and {name or 'nothing'} came")
                with writing(self.partial / place[spec.name].name):
                    if current is not place[spec.name]:
                        if handle is not None:
                            handle.close()
                        current = place[spec.name]
                        handle = create(self.partial / current.name)
                        handle.write(current.header)
                    if handle is None:
                        raise RunError(f"no file is open for tensor {spec.name}")
                    data = _raw(spec, tensor)
                    handle.seek(current.begins[spec.name])
                    handle.write(data)
                hashes[spec.name] = hashlib.sha256(data).hexdigest()
                del tensor, data
        finally:
            if handle is not None:
                with writing(self.partial / current.name if current is not None else self.partial):
                    handle.close()
        extra = next(arriving, None)
        if extra is not None:
            raise RunError(f"tensor {extra[0]} came after all announced ones")
        for file in files:
            path = self.partial / file.name
            if not path.exists():  # no tensors at all
                self._write(file.name, file.header)
            if path.stat().st_size != file.nbytes:
                raise RunError(f"{path.name} has {path.stat().st_size} bytes instead of {file.nbytes}")
            # tensors come in another order than they lie in, so a hash of the whole would read the file again
            self.files[file.name] = {"bytes": file.nbytes, "header_sha256": _sha256(file.header)}
        if len(files) > 1:
            self._write(f"{stem}.safetensors.index.json", index_bytes(files, specs))
        return hashes

    def write_json(self, name: str, value: Any) -> None:
        """JSON with an indent of 2 and a newline at the end; keys keep their order."""
        self._write(name, json_bytes(value))

    def write_text(self, name: str, text: str) -> None:
        self._write(name, text.encode(errors="backslashreplace"))

    def write_arrays(self, name: str, arrays: "Mapping[str, NDArray[Any]]") -> None:
        """Write arrays as numpy's .npz, which no loader of models takes for weights."""
        import numpy as np

        whole = io.BytesIO()
        np.savez(whole, **arrays)  # type: ignore[arg-type]
        self._write(name, whole.getvalue())

    def write_pieces(self, name: str, pieces: "Iterable[bytes | memoryview]") -> None:
        """Write a file from pieces that arrive one by one."""
        digest, nbytes = hashlib.sha256(), 0
        with writing(self.partial / name), create(self.partial / name) as handle:
            for piece in pieces:
                handle.write(piece)
                digest.update(piece)
                nbytes += memoryview(piece).nbytes
        self.files[name] = {"bytes": nbytes, "sha256": digest.hexdigest()}

    def _write(self, name: str, data: bytes) -> None:
        self.write_pieces(name, (data,))

    def copy_side_files(self, source: Path) -> list[str]:
        """Copy tokenizer, chat templates, generation config, licences and custom code, byte for byte; never weights.

        Returns the names, sorted. Links are followed, but not out of the model directory.
        """
        found = [str(file.relative_to(source)) for file in side_files(source)]
        for name in found:
            self.copy_file(source, name)
        return found

    def copy_file(self, source: Path, name: str) -> None:
        """Copy a file of a model directory, byte for byte."""
        content = read_side_file(source, source / name)
        with writing(self.partial / name):
            make_parent(self.partial / name)
        self._write(name, content)

    def write_report(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Write report.json, after all other files: it records them, and a digest of its own text; returns it."""
        whole = {**report, "files": dict(sorted(self._recorded().items()))}
        whole["sha256"] = _sha256(json_bytes(whole))
        self.write_json("report.json", whole)
        return whole

    def _recorded(self) -> dict[str, dict[str, Any]]:
        """What the report says of the files that will appear."""
        return self.files

    def commit(self) -> Path:
        """Flush everything to disk, then rename the directory to `path`; returns `path`."""
        self._refuse_existing()
        with writing(self.path):
            return self._appear()

    def _appear(self) -> Path:
        for directory, _, files in os.walk(self.partial):
            for file in files:
                flush(Path(directory) / file)
            flush(Path(directory))
        if not self.claim.linked():
            raise RunError(f"{self.partial} was taken away meanwhile", "run the same command again")
        inside = self.claim.fd
        replaces = self.path.exists()
        if replaces:
            os.rename(self.path, _REPLACED, dst_dir_fd=inside)
        os.rename(_FILES, self.path, src_dir_fd=inside)
        flush(self.path.parent)
        if replaces:  # what is half deleted is not put back
            os.rename(_REPLACED, _DELETED, src_dir_fd=inside, dst_dir_fd=inside)
        return self.path

    def _put_back(self) -> None:
        """Give what was to be replaced its name again, where nothing took its place."""
        if _REPLACED in self.claim.names() and not os.path.lexists(self.path):
            os.rename(_REPLACED, self.path, src_dir_fd=self.claim.fd)

    def _refuse_existing(self) -> None:
        if not os.path.lexists(self.path):
            return
        if not self.overwrite:
            raise ExistsError(f"{self.path} already exists", "give another directory, or --overwrite")
        if self.path.is_symlink() or not self.path.is_dir():
            raise PlanError(f"{self.path} is not a directory, so it is not overwritten", "give another directory")
        if any(self.path.iterdir()) and not any((self.path / name).exists() for name in self.told_by):
            raise PlanError(f"{self.path} does not hold a model, so it is not overwritten", "give another directory")
        if os.path.ismount(self.path):
            raise PlanError(
                f"{self.path} is where a disk is mounted, so it cannot be replaced", "give a directory in it"
            )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _raw(spec: TensorSpec, tensor: "Tensor") -> memoryview:
    """The bytes of a tensor as safetensors stores them, or RunError if the tensor does not fit its spec."""
    from llmcompress.store.checkpoint import NAMES

    dtype = NAMES.get(tensor.dtype, str(tensor.dtype))
    if dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
        announced = f"{spec.dtype} {list(spec.shape)}"
        raise RunError(f"tensor {spec.name} is {dtype} {list(tensor.shape)}, announced was {announced}")
    return bytes_of(tensor)


def flush(path: Path) -> None:
    """Have the system write a file or directory out, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
