"""Loops of small tensor operations that TorchScript runs, so that threads do not wait for Python's lock."""

import warnings
from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_COMPILING = Lock()


def scripted(function: Callable[P, R]) -> Callable[P, R]:
    """`function` of positional arguments as TorchScript compiles it, when it is first called.

    It does the same operations in the same order as the function itself. Two threads that run small operations from
    Python take about twice as long as one, since each waits for the other's hold of the interpreter.
    """
    compiled: list[Callable[P, R]] = []

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not compiled:
            with _COMPILING, warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit has no heir that needs no compiler
                if not compiled:
                    compiled.append(torch.jit.script(function))
        return compiled[0](*args, **kwargs)

    return run
