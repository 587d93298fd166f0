"""Runs CUDA sources on the processor: a Launcher over CPU tensors, which checks every access (`kernels/emulator/`)."""

import ctypes
import functools
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from threading import Lock

from torch import Tensor

from llmcompress.kernels.launch import Launch

HERE = Path(__file__).parent / "kernels" / "emulator"
CSRC = Path(__file__).parents[1] / "src" / "llmcompress" / "kernels" / "csrc"
COMPILER = shutil.which("g++")
FLAGS = ("-std=c++17", "-O0", "-fPIC", "-shared", "-U_FORTIFY_SOURCE")  # compiling takes longer than running


class EmulatorError(Exception):
    """A kernel did what it must not: read or wrote out of bounds, raced, left a barrier unmet."""


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="llmcompress-emulator-")


def _compile(target: str, *arguments: str) -> Path:
    path = Path(_folder().name) / target
    command = [str(COMPILER), *FLAGS, *arguments, "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorError(f"{' '.join(command)}\n{done.stderr}")
    return path


@functools.cache
def _scheduler() -> ctypes.CDLL:
    """What runs blocks; with it the header that all kernels include is compiled, for speed."""
    _compile("emulator.h.gch", "-w", "-x", "c++-header", str(HERE / "emulator.h"))
    library = ctypes.CDLL(str(_compile("scheduler.so", str(HERE / "scheduler.cpp"))))
    library.emulator_run.restype = ctypes.c_char_p
    return library


@functools.cache
def _built(source: Path, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """A source as a library with all of its kernels; built once per session."""
    scheduler = Path(_scheduler()._name)
    kernels = re.findall(r"^KERNEL (?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(", source.read_text(), re.MULTILINE)
    variant = "-".join([source.parent.name, source.stem, *(f"{name}{value}" for name, value in defines)])
    wrapper = Path(_folder().name) / f"{variant}.cpp"
    wrapper.write_text(f'#include "{source}"\n' + "".join(f"EMULATE({name})\n" for name in kernels))
    macros = [f"-D{name}={value}" for name, value in defines]
    options = [f"-I{_folder().name}", "-include", "emulator.h", f"-I{CSRC}", *macros, str(wrapper), str(scheduler)]
    library = ctypes.CDLL(str(_compile(f"{variant}.so", *options)))
    for name in kernels:
        getattr(library, f"emulator_kinds_{name}").restype = ctypes.c_char_p
    return library


class EmulatedLauncher:
    """A `Launcher` whose device is this processor. launches: what has run. seed: of the order of blocks and threads."""

    def __init__(self, architecture: str = "sm_90", multiprocessors: int = 4, *, seed: int = 0, csrc: Path = CSRC):
        self.architecture, self.multiprocessors = architecture, multiprocessors
        self.launches: list[Launch] = []
        self.seed, self.csrc = seed, csrc
        self._device = Lock()  # the scheduler runs one launch at a time, whichever thread it comes from

    def __call__(self, launch: Launch, *arguments: Tensor | int | float) -> None:
        with self._device:
            self._run(launch, *arguments)

    def _run(self, launch: Launch, *arguments: Tensor | int | float) -> None:
        name = launch.kernel.name
        library = _built(self.csrc / launch.kernel.source, launch.kernel.defines)
        kinds = "".join(map(_kind, arguments))
        expected = getattr(library, f"emulator_kinds_{name}")().decode()
        if kinds != expected:
            raise EmulatorError(f"{name} takes arguments {expected}, not {kinds}")
        tensors = [_range(item) for item in arguments if isinstance(item, Tensor)]
        flat = [number for item in tensors for number in item]
        values = [_bits(item) for item in arguments]
        self.launches.append(launch)
        failure = _scheduler().emulator_run(
            getattr(library, f"emulator_call_{name}"),
            (ctypes.c_uint64 * max(len(values), 1))(*values),
            kinds.encode(),
            (ctypes.c_uint64 * max(len(flat), 1))(*flat),
            len(tensors),
            (ctypes.c_uint * 6)(*launch.grid, *launch.block),
            launch.shared,
            self.seed + len(self.launches),
            launch.overlaps,
        )
        if failure:
            raise EmulatorError(f"{name}: {failure.decode()}")


def _kind(argument: Tensor | int | float) -> str:
    if isinstance(argument, Tensor):
        assert argument.device.type == "cpu"
        return "p"
    return "f" if isinstance(argument, float) else "i"


def _bits(argument: Tensor | int | float) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    packed = struct.pack("<f" if isinstance(argument, float) else "<i", argument)
    return int.from_bytes(packed, "little")


def _range(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes from the first to the last element."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()
