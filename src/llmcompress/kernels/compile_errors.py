"""Errors of kernels that cannot be compiled or run."""

from llmcompress.errors import EXIT_FAILED, PlanError


class KernelsError(PlanError):
    """Kernels cannot run on this machine: no GPU, one that is too old, or nothing to compile them with."""


class CompileError(KernelsError):
    """A source of ours was not compiled, which is a bug, or a compiler that does not know the architecture."""

    exit_code = EXIT_FAILED


class TakesNotError(PlanError):
    """No kernel takes a matrix of this shape, grid or type; torch does."""
