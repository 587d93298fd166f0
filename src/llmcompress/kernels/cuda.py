"""Launching kernels on a GPU, on the stream that torch works on, by way of cuda-core."""

from collections import Counter
from functools import cache as remembered
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcompress.kernels.build import Builder, Say
from llmcompress.kernels.build_cache import Cache, directory_of
from llmcompress.kernels.compile_errors import KernelsError
from llmcompress.kernels.compilers import find_compiler
from llmcompress.kernels.launch import Kernel, Launch

OLDEST = (8, 0)  # compute capability: cp.async and mma.sync of bf16
_STATIC_SHARED = 48 << 10  # bytes of shared memory available without a request


class CudaLauncher:
    """Launches on one GPU; kernels are built when they are first launched. counts: how often each ran."""

    def __init__(self, device: torch.device, builder: Builder) -> None:
        properties = torch.cuda.get_device_properties(device)
        self.device, self.builder = device, builder
        self.architecture = builder.architecture
        self.multiprocessors: int = properties.multi_processor_count
        self.counts: Counter[Kernel] = Counter()
        self._loaded: dict[Kernel, Any] = {}
        self._shared: Counter[Kernel] = Counter()

    def __call__(self, launch: Launch, *arguments: Tensor | int | float) -> None:
        """As `Launcher`. KernelsError for a kernel that does not load; errors of CUDA come as cuda-core raises them."""
        from cuda.core import launch as start

        with torch.cuda.device(self.device):
            kernel = self._kernel(launch.kernel)
            if launch.shared > max(_STATIC_SHARED, self._shared[launch.kernel]):
                self._allow(launch.kernel, kernel, launch.shared)
            start(torch.cuda.current_stream(), _config(launch), kernel, *map(_plain, arguments))
        self.counts[launch.kernel] += 1

    def _kernel(self, wanted: Kernel) -> Any:
        from cuda.core import ObjectCode

        if wanted not in self._loaded:
            cubin = self.builder(wanted)
            try:
                self._loaded[wanted] = ObjectCode.from_cubin(cubin).get_kernel(wanted.name)
            except Exception as error:  # a driver older than the compiler, say; CUDAError's module is not public
                raise KernelsError(
                    f"the driver does not load {wanted.name} as {self.builder.compiler.version} makes it: {error}",
                    "update the driver, or install an NVRTC of its version",
                ) from None
        return self._loaded[wanted]

    def _allow(self, wanted: Kernel, kernel: Any, shared: int) -> None:
        """Let a kernel have more shared memory than others."""
        from cuda.bindings import driver

        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(most, shared, kernel.handle, driver.CUdevice(self.device.index))
        if int(status) != 0:
            raise KernelsError(f"{wanted.name} is refused {shared} bytes of shared memory (error {int(status)})")
        self._shared[wanted] = shared


@remembered
def _config(launch: Launch) -> Any:
    from cuda.core import LaunchConfig

    return LaunchConfig(grid=launch.grid, block=launch.block, shmem_size=launch.shared)


def _plain(argument: Tensor | int | float) -> Any:
    """An argument as cuda-core takes it: whole numbers of Python are addresses there."""
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return np.int32(argument) if isinstance(argument, int) else np.float32(argument)


def open_gpu(
    device: torch.device | None = None, say: Say = lambda line: None, cache: Path | None = None
) -> CudaLauncher:
    """A launcher for a GPU, the current one if none is named.

    KernelsError says why kernels cannot run here. say: told that the cache cannot be written. cache:
    directory of compiled kernels, in place of the usual one.
    """
    device = usable(device)
    major, minor = torch.cuda.get_device_capability(device)
    compiler = find_compiler()
    try:
        import cuda.core  # noqa: F401  # the compiler may be nvcc, which does without it
    except ImportError as error:
        raise KernelsError(
            f"kernels are launched by way of cuda-core, which cannot be imported ({error})",
            "install `llmcompress[gpu]`",
        ) from None
    return CudaLauncher(device, Builder(compiler, Cache(directory_of(cache)), f"sm_{major}{minor}", say))


def usable(device: torch.device | None = None) -> torch.device:
    """A GPU that kernels run on, by its number; KernelsError if it does not exist or is too old."""
    if not torch.cuda.is_available():
        why = "torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
        raise KernelsError(f"kernels need an NVIDIA GPU, and {why}", "`eval --backend torch` runs anywhere")
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST:
        name = torch.cuda.get_device_name(index)
        raise KernelsError(
            f"kernels need a GPU of compute capability {OLDEST[0]}.{OLDEST[1]}, {name} has "
            f"{capability[0]}.{capability[1]}",
            "`eval --backend torch` runs anywhere",
        )
    return torch.device("cuda", index)
