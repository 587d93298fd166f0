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

from llmcompress.kernels.compile_errors import INSTALL, KernelsError, not_compiled
from llmcompress.kernels.nvrtc import Nvrtc

Defines = Sequence[tuple[str, int]]


class Compiler(Protocol):
    """version: name and version, such as "nvrtc 13.0"; another one may give other code."""

    version: str

    def __call__(self, text: str, defines: Defines, architecture: str) -> bytes:
        """A cubin; CompileError."""
        ...


class Nvcc:
    """A toolkit's nvcc; KernelsError where there is none on the PATH, or none that runs."""

    def __init__(self) -> None:
        found = shutil.which("nvcc")
        if found is None:
            raise KernelsError("there is no nvcc on the PATH", INSTALL)
        self._path = found
        told = self._run("--version")
        release = re.search(r"release ([\d.]+)", told.stdout)
        if told.returncode != 0 or release is None:
            raise KernelsError(f"{found} does not tell its version", INSTALL)
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
                raise not_compiled(self.version, architecture, done.stderr)
            return cubin.read_bytes()

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run([self._path, *arguments], capture_output=True, text=True, check=False)
        except OSError as error:
            raise KernelsError(f"{self._path} cannot be run: {error.strerror}", INSTALL) from None


def find_compiler() -> Compiler:
    """NVRTC, or nvcc where that is missing; KernelsError says why there is neither."""
    try:
        return Nvrtc()
    except KernelsError as error:
        try:
            return Nvcc()
        except KernelsError as other:
            raise KernelsError(
                f"there is nothing to compile kernels with: {error.message}; {other.message}", INSTALL
            ) from None
