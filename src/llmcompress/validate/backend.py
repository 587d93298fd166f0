"""What runs the linears of a checkpoint that is validated: our kernels on a GPU, or torch on any device."""

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
    """name: "kernels" or "torch". launcher: runs kernels, and counts what it ran; None for torch."""

    name: str
    device: torch.device
    launcher: Any = None

    def linears(self, say: Say) -> MakeLinear:
        """A maker of linears of this backend. say: told, once for each reason, what kernels do not take."""
        if self.launcher is None and self.device.type == "cpu":
            return PackedLinear
        return Linears(self.device, self.launcher, say)

    @property
    def launches(self) -> dict[str, int]:
        """How often each kernel ran so far, by the name of its function."""
        found: dict[str, int] = {}
        for kernel, count in self.launcher.counts.items() if self.launcher is not None else ():
            found[kernel.name] = found.get(kernel.name, 0) + count
        return found


def open_backend(asked: BackendChoice, device: str, say: Say) -> Backend:
    """kernels: KernelsError where they cannot run. auto: torch in their place, and `say` is told why.

    device: cpu, cuda or auto.
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
    """The type a model runs in, float32 unless something else is asked for; kernels take types of 16 bits."""
    if backend is None or backend.name != "kernels":
        return getattr(torch, asked or "float32")  # type: ignore[no-any-return]
    if asked == "float32":
        raise RecipeError("kernels compute in 16 bits", "use --compute-dtype bfloat16 or float16")
    return getattr(torch, asked or "bfloat16")  # type: ignore[no-any-return]
