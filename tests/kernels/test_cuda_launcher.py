"""The launcher on a GPU, with CUDA's own parts replaced: what reaches cuda-core, and what is asked of the driver."""

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from llmcompress.kernels.build import Builder
from llmcompress.kernels.build_cache import Cache
from llmcompress.kernels.compile_errors import KernelsError
from llmcompress.kernels.cuda import CudaLauncher
from llmcompress.kernels.launch import Kernel, Launch

SMALL = Launch(Kernel("matmul.cu", "matmul", (("BITS", 4),)), (3, 2, 1), (128, 1, 1), 1024)
LARGE = Launch(Kernel("int8.cu", "int8_matmul"), (1, 1, 1), (256, 1, 1), 100 << 10)


@pytest.fixture
def cuda(monkeypatch, tmp_path):
    """A launcher, and what it had CUDA do."""
    done = SimpleNamespace(launches=[], allowed=[], loaded=[], refuse=None)

    class ObjectCode:
        @staticmethod
        def from_cubin(cubin):
            if done.refuse is not None:
                raise RuntimeError(done.refuse)
            done.loaded.append(cubin)
            return SimpleNamespace(get_kernel=lambda name: SimpleNamespace(handle=name))

    core = ModuleType("cuda.core")
    core.ObjectCode = ObjectCode
    core.LaunchConfig = lambda **about: about
    core.launch = lambda *given: done.launches.append(given)
    bindings = ModuleType("cuda.bindings")
    bindings.driver = SimpleNamespace(
        CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="most"),
        CUdevice=int,
        cuKernelSetAttribute=lambda *given: (done.allowed.append(given) or 0,),
    )
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.core", core), ("cuda.bindings", bindings)):
        monkeypatch.setitem(sys.modules, name, module)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "torch's stream")

    def compiler(text, defines, architecture):
        return f"{defines} {architecture}".encode()

    compiler.version = "nvrtc 13.0"
    builder = Builder(compiler, Cache(tmp_path), "sm_90", print)
    return CudaLauncher(torch.device("cuda", 0), builder), done


def test_arguments_have_the_types_that_kernels_declare(cuda):
    launcher, done = cuda
    x = torch.zeros(4)
    launcher(SMALL, x, -5, 2.5)
    stream, config, kernel, address, whole, real = done.launches[0]
    assert (stream, kernel.handle) == ("torch's stream", "matmul")
    assert config == {"grid": (3, 2, 1), "block": (128, 1, 1), "shmem_size": 1024}
    assert (type(address), address) == (int, x.data_ptr())
    assert (type(whole), whole) == (np.int32, -5)
    assert (type(real), real) == (np.float32, 2.5)


def test_a_kernel_is_loaded_once_and_its_launches_are_counted(cuda):
    launcher, done = cuda
    for _ in range(3):
        launcher(SMALL)
    assert len(done.loaded) == 1
    assert launcher.counts == {SMALL.kernel: 3}
    assert (launcher.architecture, launcher.multiprocessors) == ("sm_90", 132)


def test_more_than_48_kilobytes_of_shared_memory_are_asked_for_once(cuda):
    launcher, done = cuda
    launcher(SMALL)
    assert done.allowed == []
    launcher(LARGE)
    launcher(LARGE)
    assert done.allowed == [("most", 100 << 10, "int8_matmul", 0)]


def test_a_cubin_that_the_driver_does_not_load_is_one_line(cuda):
    launcher, done = cuda
    done.refuse = "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"
    with pytest.raises(KernelsError, match=r"driver does not load matmul as nvrtc 13\.0 makes it") as caught:
        launcher(SMALL)
    assert "update the driver" in str(caught.value.hint)
    assert launcher.counts == {}
