"""Errors of kernels that cannot be compiled or run."""

from llmcompress.errors import EXIT_FAILED, PlanError

INSTALL = "`pip install nvidia-cuda-nvrtc`, or put nvcc on the PATH"  # where there is no compiler
_LOG_LINES = 6  # of a compiler's words that an error quotes


class KernelsError(PlanError):
    """Kernels cannot run on this machine: no GPU, one that is too old, or nothing to compile them with."""


class CompileError(KernelsError):
    """A source of ours was not compiled, which is a bug, or a compiler that does not know the architecture."""

    exit_code = EXIT_FAILED


class TakesNotError(PlanError):
    """No kernel takes a matrix of this shape, grid or type; torch does."""


def not_compiled(version: str, architecture: str, log: str) -> CompileError:
    """The error for a source that a compiler refuses. version: of the compiler; log: its words."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()] or lines
    return CompileError(
        f"{version} does not compile a kernel for {architecture}: {' | '.join(telling[:_LOG_LINES])}",
        "a newer CUDA may know this GPU; else this is a bug in llmcompress, please report it",
    )
