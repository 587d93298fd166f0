"""The interface of kernels: source to compile, a grid to run, and a launcher."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Kernel:
    """A kernel, compiled once per source, defines and architecture.

    source: file of csrc/, such as "matmul.cu". name: its extern "C" __global__ function. defines: macros and values.
    """

    source: str
    name: str
    defines: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Launch:
    """A kernel and the shape it runs in. shared: bytes of dynamic shared memory.

    overlaps: the kernel waits itself for the launches before it to end, so that it may begin earlier.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int = 0
    overlaps: bool = False


class Launcher(Protocol):
    """Runs launches, one after another, on one device's current stream.

    architecture: such as "sm_90". multiprocessors: of the device.
    """

    architecture: str
    multiprocessors: int

    def __call__(self, launch: Launch, *arguments: Tensor | int | float) -> None:
        """Run a launch: a Tensor is passed as the pointer to its data, an int as int32, a float as float32."""
