"""Loops of small tensor operations, run by TorchScript on a processor, so that threads wait for no lock of Python."""

import warnings
from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_COMPILING = Lock()


def scripted(function: Callable[P, R]) -> Callable[P, R]:
    """`function` of positional arguments as TorchScript compiles it, when it is first called; as it is on a GPU.

    It does the same operations in the same order as the function itself. Two threads that run small operations from
    Python take about twice as long as one, since each waits for the other's hold of the interpreter. On a GPU,
    TorchScript would fuse operations, and drop conversions to 16 bits and back, whose rounding is meant.
    """
    compiled: list[Callable[P, R]] = []

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if any(isinstance(item, Tensor) and item.device.type != "cpu" for item in args):
            return function(*args, **kwargs)
        if not compiled:
            with _COMPILING, warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit has no heir that needs no compiler
                if not compiled:
                    compiled.append(torch.jit.script(function))
        return compiled[0](*args, **kwargs)

    return run
