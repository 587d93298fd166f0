"""Timings: time and memory of each layer, as lines of JSON. They have a file of their own, since a report must not
depend on either."""

import json
import os
import time
from collections.abc import Callable, Mapping
from errno import EMLINK
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcompress import __version__
from llmcompress.engine.process.process_memory import peak_device_memory, peak_memory
from llmcompress.engine.process.progress import Progress
from llmcompress.engine.write.report_schema import TIMINGS_SCHEMA
from llmcompress.errors import PlanError
from llmcompress.store.files import EVERYBODY, make_parent, writing

if TYPE_CHECKING:
    from llmcompress.engine.plan.plan import Plan


def run_sha256(headers_sha256: str, recipe: Mapping[str, Any], compute_dtype: str) -> str:
    """SHA-256 (hex) that identifies a run by its model, recipe and compute type, which its report holds as well."""
    said = json.dumps([headers_sha256, recipe, compute_dtype], sort_keys=True)
    return sha256(said.encode()).hexdigest()


class Timings(Progress):
    """Appends a line to a file at each start, finished layer and end, and passes every call on to another Progress.

    RunError if the system does not let the file be written.
    """

    def __init__(
        self, file: Path, plan: "Plan", watch: Progress, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.file, self.plan, self.watch, self.clock = file, plan, watch, clock
        self.begun = self.last = self.written = clock()

    def start(self, layers: int, done: int) -> None:
        plan, self.begun = self.plan, self.clock()
        self.last = self.begun
        self._append(
            event="start",
            schema_version=TIMINGS_SCHEMA,
            llmcompress=__version__,
            layers=layers,
            done=done,
            threads=plan.resources.threads,
            device=plan.options.device,
        )
        self.watch.start(layers, done)

    def gradients(self, done: int, of: int) -> None:
        if done == of:
            now = self.clock()
            self._append(event="gradients", seconds=now - self.last, **_memory())
            self.last = now
        self.watch.gradients(done, of)

    def layer(self, number: int) -> None:
        self.watch.layer(number)

    def stage(self, space: str, matrices: int) -> None:
        self.watch.stage(space, matrices)

    def matrix(self, record: dict[str, Any]) -> None:
        self.watch.matrix(record)

    def tokens(self, count: int) -> None:
        self.watch.tokens(count)

    def layer_done(self, number: int, seconds: float) -> None:
        now = self.clock()
        self._append(event="layer", layer=number, seconds=now - self.last, solving=seconds, **_memory())
        self.last = now
        self.watch.layer_done(number, seconds)

    def writing(self, total_bytes: int) -> None:
        self.written = self.clock()
        self.watch.writing(total_bytes)

    def end(self) -> None:
        """Say that the output is complete."""
        now = self.clock()
        self._append(event="end", seconds=now - self.begun, writing=now - self.written, **_memory())

    @cached_property
    def run(self) -> str:
        return run_sha256(self.plan.headers.fingerprint, self.plan.recipe.as_data(), self.plan.dtype)

    def _append(self, **line: Any) -> None:
        said = {key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()}
        said["run"] = self.run  # runs side by side may share a file
        with writing(self.file):
            make_parent(self.file)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW  # whoever planted a link there
            with os.fdopen(os.open(self.file, flags, 0o666 & ~EVERYBODY), "ab") as handle:
                if os.fstat(handle.fileno()).st_nlink > 1:
                    raise OSError(EMLINK, "it is another file's second name")
                handle.write(json.dumps(said).encode() + b"\n")


def refuse_place(file: Path, plan: "Plan") -> None:
    """PlanError for a file inside the output or the work directory, and for a path that is not a file."""
    for place in (plan.out, plan.work):
        if file.resolve() == place.resolve() or place.resolve() in file.resolve().parents:
            raise PlanError(f"--timings {file} lies in {place}, which holds no times", "give a file elsewhere")
    if os.path.lexists(file) and (file.is_symlink() or not file.is_file() or file.stat().st_nlink > 1):
        raise PlanError(f"--timings {file} is not a file with this name alone", "give another one")


def _memory() -> dict[str, int]:
    device = peak_device_memory()
    return {"peak_memory_bytes": peak_memory(), **({} if device is None else {"device_peak_bytes": device})}
