"""Compilers of kernels: NVRTC, which comes with CUDA builds of torch, or else a toolkit's nvcc.

Both get one self-contained text and give a cubin for one architecture. Neither needs a GPU. Products and sums are fused
only where a source says so, so that a kernel computes the same wherever it runs.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from llmcompress.kernels.compile_errors import CompileError, KernelsError

_HINT = "install `llmcompress[gpu]`, or put nvcc on the PATH"
_LOG_LINES = 6  # of a compiler's words that an error quotes

Defines = Sequence[tuple[str, int]]


class Compiler(Protocol):
    """version: name and version, such as "nvrtc 13.0"; another one may give other code."""

    version: str

    def __call__(self, text: str, defines: Defines, architecture: str) -> bytes:
        """A cubin; CompileError."""
        ...


class Nvrtc:
    """NVRTC by way of cuda-core; KernelsError where either is missing."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import nvrtc
            from cuda.core import Program, ProgramOptions
        except ImportError as error:
            raise KernelsError(f"cuda-core cannot be imported ({error})", _HINT) from None
        try:
            status, major, minor = nvrtc.nvrtcVersion()
        except Exception as error:  # cuda-pathfinder has errors of its own for libraries it does not find
            raise KernelsError(f"NVRTC was not found ({_first_line(error)})", _HINT) from None
        if int(status) != 0:
            raise KernelsError(f"NVRTC answers with error {int(status)}", _HINT)
        self.version = f"nvrtc {major}.{minor}"
        self._program, self._options = Program, ProgramOptions

    def __call__(self, text: str, defines: Defines, architecture: str) -> bytes:
        macros = [(name, str(value)) for name, value in defines]
        options = self._options(arch=architecture, std="c++17", fma=False, define_macro=macros or None)
        try:
            return bytes(self._program(text, "c++", options).compile("cubin").code)
        except Exception as error:  # NVRTCError, whose module is not public
            raise _failed(self.version, architecture, str(error)) from None


class Nvcc:
    """A toolkit's nvcc; KernelsError where there is none on the PATH, or none that runs."""

    def __init__(self) -> None:
        found = shutil.which("nvcc")
        if found is None:
            raise KernelsError("there is no nvcc on the PATH", _HINT)
        self._path = found
        told = self._run("--version")
        release = re.search(r"release ([\d.]+)", told.stdout)
        if told.returncode != 0 or release is None:
            raise KernelsError(f"{found} does not tell its version", _HINT)
        self.version = f"nvcc {release[1]}"

    def __call__(self, text: str, defines: Defines, architecture: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="llmcompress-nvcc-") as place:
            source, cubin = Path(place, "kernel.cu"), Path(place, "kernel.cubin")
            source.write_text(text, encoding="utf-8")
            macros = [f"-D{name}={value}" for name, value in defines]
            done = self._run(
                f"-arch={architecture}", "-std=c++17", "--fmad=false", "-cubin", *macros, "-o", str(cubin), str(source)
            )
            if done.returncode != 0:
                raise _failed(self.version, architecture, done.stderr)
            return cubin.read_bytes()

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self._path, *arguments], capture_output=True, text=True, check=False)


def find_compiler() -> Compiler:
    """NVRTC, or nvcc where that is missing; KernelsError says why there is neither."""
    try:
        return Nvrtc()
    except KernelsError as error:
        try:
            return Nvcc()
        except KernelsError as other:
            raise KernelsError(
                f"there is nothing to compile kernels with: {error.message}; {other.message}", _HINT
            ) from None


def _failed(version: str, architecture: str, log: str) -> CompileError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()] or lines
    return CompileError(
        f"{version} does not compile a kernel for {architecture}: {' | '.join(telling[:_LOG_LINES])}",
        "a newer CUDA may know this GPU; else this is a bug in llmcompress, please report it",
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
