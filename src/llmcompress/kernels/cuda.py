"""Launching kernels on a GPU, on the stream that torch works on."""

from collections import Counter
from ctypes import c_void_p
from pathlib import Path

import torch
from torch import Tensor

from llmcompress.kernels.build import Builder, Say
from llmcompress.kernels.build_cache import Cache, directory_of
from llmcompress.kernels.compile_errors import KernelsError
from llmcompress.kernels.compilers import find_compiler
from llmcompress.kernels.driver import Driver, config_of
from llmcompress.kernels.launch import Kernel, Launch
from llmcompress.kernels.tensor_checks import begins_early

OLDEST = (8, 0)  # compute capability: cp.async and mma.sync of bf16
_STATIC_SHARED = 48 << 10  # bytes of shared memory available without a request


class CudaLauncher:
    """Launches on one GPU; kernels are built when they are first launched. counts: how often each ran."""

    def __init__(self, device: torch.device, builder: Builder) -> None:
        """KernelsError where the driver cannot be used."""
        properties = torch.cuda.get_device_properties(device)
        self.device, self.builder = device, builder
        self.architecture = builder.architecture
        self.multiprocessors: int = properties.multi_processor_count
        self.counts: Counter[Kernel] = Counter()
        self._driver = Driver(device.index)
        self._loaded: dict[Kernel, c_void_p] = {}
        self._shared: Counter[Kernel] = Counter()

    def __call__(self, launch: Launch, *arguments: Tensor | int | float) -> None:
        """As `Launcher`. KernelsError for a kernel that does not load, and in the driver's words if it cannot start."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with self._driver:
            kernel = self._kernel(launch.kernel)
            if launch.shared > max(_STATIC_SHARED, self._shared[launch.kernel]):
                self._driver.allow(kernel, launch.shared)
                self._shared[launch.kernel] = launch.shared
            early = launch.overlaps and begins_early(self.architecture)
            self._driver.start(kernel, config_of(launch, stream, early), arguments)
        self.counts[launch.kernel] += 1

    def _kernel(self, wanted: Kernel) -> c_void_p:
        if wanted not in self._loaded:
            cubin = self.builder(wanted)
            try:
                self._loaded[wanted] = self._driver.load(cubin, wanted.name)
            except KernelsError as error:  # a driver older than the compiler, say
                raise KernelsError(
                    f"the driver does not load {wanted.name} as {self.builder.compiler.version} makes it: "
                    f"{error.message}",
                    "update the driver, or install an NVRTC of its version",
                ) from None
        return self._loaded[wanted]


def open_gpu(
    device: torch.device | None = None, say: Say = lambda line: None, cache: Path | None = None
) -> CudaLauncher:
    """A launcher for a GPU, the current one if none is named.

    KernelsError says why kernels cannot run here. say: told that the cache cannot be written. cache:
    directory of compiled kernels, in place of the usual one.
    """
    device = usable(device)
    major, minor = torch.cuda.get_device_capability(device)
    builder = Builder(find_compiler(), Cache(directory_of(cache)), f"sm_{major}{minor}", say)
    return CudaLauncher(device, builder)


def usable(device: torch.device | None = None) -> torch.device:
    """A GPU that kernels run on, by its number; KernelsError if it does not exist or is too old."""
    if not torch.cuda.is_available():
        why = "torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
        raise KernelsError(f"kernels need an NVIDIA GPU, and {why}", "`eval --backend torch` runs anywhere")
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise KernelsError(f"there is no GPU {index}: torch sees {torch.cuda.device_count()}")
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST:
        name = torch.cuda.get_device_name(index)
        raise KernelsError(
            f"kernels need a GPU of compute capability {OLDEST[0]}.{OLDEST[1]}, {name} has "
            f"{capability[0]}.{capability[1]}",
            "`eval --backend torch` runs anywhere",
        )
    return torch.device("cuda", index)
