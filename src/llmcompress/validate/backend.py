"""The choice of what runs the linears of a validated checkpoint: our kernels on a GPU, or torch on any device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from llmcompress.engine.process.ranks import device_of
from llmcompress.errors import RecipeError
from llmcompress.kernels.compile_errors import KernelsError
from llmcompress.kernels.cuda import open_gpu
from llmcompress.kernels.linear import Linears
from llmcompress.validate.load import MakeLinear
from llmcompress.validate.packed import PackedLinear

BackendChoice = Literal["auto", "kernels", "torch"]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Backend:
    """name: "kernels" or "torch". launcher: runs kernels and counts their launches; None for torch."""

    name: str
    device: torch.device
    launcher: Any = None

    def linears(self, say: Say) -> MakeLinear:
        """A maker of linears of this backend. say: told, once for each reason, which linears kernels do not take."""
        if self.launcher is None and self.device.type == "cpu":
            return PackedLinear
        return Linears(self.device, self.launcher, say)

    @property
    def launches(self) -> dict[str, int]:
        """Launches of each kernel so far, by the name of the kernel's function."""
        found: dict[str, int] = {}
        for kernel, count in self.launcher.counts.items() if self.launcher is not None else ():
            found[kernel.name] = found.get(kernel.name, 0) + count
        return found


def open_backend(asked: BackendChoice, device: str, say: Say) -> Backend:
    """The backend that is asked for. device: cpu, cuda or auto.

    Where kernels cannot run, "kernels" raises KernelsError, and "auto" takes torch and tells `say` why.
    """
    if asked == "torch":
        return Backend("torch", device_of(device))
    if device == "cpu":
        if asked == "kernels":
            raise RecipeError("kernels do not run with --device cpu", "leave it out, or use --backend torch")
        return Backend("torch", torch.device("cpu"))
    try:
        launcher = open_gpu(say=say)
    except KernelsError as error:
        if asked == "kernels":
            raise
        say(f"torch multiplies: {error.message}")
        return Backend("torch", device_of(device))
    return Backend("kernels", launcher.device, launcher)


def compute_dtype(asked: str | None, backend: Backend | None) -> torch.dtype:
    """The type in which a model runs: the one asked for, else bfloat16 with kernels and float32 without."""
    if backend is None or backend.name != "kernels":
        return getattr(torch, asked or "float32")  # type: ignore[no-any-return]
    if asked == "float32":
        raise RecipeError("kernels compute in 16 bits", "use --compute-dtype bfloat16 or float16")
    return getattr(torch, asked or "bfloat16")  # type: ignore[no-any-return]
