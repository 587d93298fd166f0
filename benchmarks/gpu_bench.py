"""What the parts of gpu.py share: figures, sizes, commands with a time limit, models, memory as the driver sees it."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_GPU = 2  # exit code of commands that need one


@dataclass(frozen=True)
class Row:
    """A figure. bar: what it should be, if anything; met: whether it is, None where that cannot be told."""

    part: str
    what: str
    value: str
    bar: str = ""
    met: bool | None = None


@dataclass(frozen=True)
class Sizes:
    """What is compressed and how much text it sees."""

    model: str = "llama-2-7b"
    layers: int | None = None
    samples: int = 128
    length: int = 2048
    slice: str = "llama-2-70b"
    slice_layers: int = 2
    compared: str = "small"
    compared_samples: int = 64
    compared_length: int = 512


DRY = Sizes("tiny", 2, 8, 64, "tiny", 2, "tiny", 16, 64)


class PartError(Exception):
    """A part could not be carried out."""


class NoGpuError(PartError):
    """It needs a GPU, and there is none."""


@dataclass
class Bench:
    """What the parts share. end: when all must be over, by `time.monotonic`. limits: bytes per second, by what."""

    folder: Path
    sizes: Sizes
    device: str
    end: float
    limits: dict[str, float] = field(default_factory=dict)

    def call(self, limit: float, *command: object, allowed: tuple[int, ...] = (0,)) -> tuple[float, int, str]:
        """Seconds, exit code and output of a command; PartError if it fails or takes longer than `limit` seconds."""
        limit = min(limit, self.end - time.monotonic())
        if limit <= 0:
            raise PartError("no time was left for it")
        begin = time.monotonic()
        words = [str(word) for word in command]
        with tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
            try:
                printed, _ = child.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                raise PartError(f"ended after {limit:.0f} s") from None
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)  # the session that was started above, and nothing else
                    child.wait()
            errors.seek(0)
            said = errors.read().strip()
        if child.returncode == NO_GPU and "GPU" in said:
            raise NoGpuError(said.splitlines()[0].removeprefix("error: "))
        if child.returncode not in allowed:
            raise PartError(f"{' '.join(words[2:5])} failed ({child.returncode}): {_last(said)}")
        return time.monotonic() - begin, child.returncode, printed

    def made(self, shape: str, *options: object, limit: float = 120) -> Path:
        """A random model, written unless it is there."""
        place = self.folder / "-".join(map(str, (shape, *options))).replace("--", "")
        self.call(limit, sys.executable, ROOT / "scripts" / "make_random_model.py", shape, place, *options)
        return place

    @property
    def main(self) -> Path:
        """The model that most parts compress."""
        sizes = self.sizes
        return self.made(sizes.model, *_layers(sizes.layers), "--samples", sizes.samples, "--length", sizes.length)


def _last(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("error:")), lines[-1] if lines else "without a word")


def _layers(count: int | None) -> tuple[object, ...]:
    return () if count is None else ("--layers", count)


def bytes_of(folder: Path) -> int:
    """Of the weight files in a directory, or of a file."""
    files = folder.glob("*.safetensors") if folder.is_dir() else [folder]
    return sum(file.stat().st_size for file in files if file.name != "ids.safetensors")


class MemoryWatch:
    """The most memory of the GPU in use, as the driver sees it, beyond what was in use before."""

    def __init__(self, device: str) -> None:
        self.most, self._stop = 0, threading.Event()
        self._before = self._used() if device != "cpu" else None
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "MemoryWatch":
        if self._before is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            self.most = max(self.most, (self._used() or 0) - (self._before or 0))

    @staticmethod
    def _used() -> int | None:
        try:
            asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
            return int(subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout) << 20
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
