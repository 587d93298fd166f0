"""The launcher on a GPU, with a C library in place of the driver that writes down its calls: so the ABI is tested."""

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from emulated import COMPILER
from llmcompress.kernels import driver
from llmcompress.kernels.build import Builder
from llmcompress.kernels.build_cache import Cache
from llmcompress.kernels.compile_errors import KernelsError
from llmcompress.kernels.cuda import CudaLauncher
from llmcompress.kernels.launch import Kernel, Launch

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")

SMALL = Launch(Kernel("matmul.cu", "matmul", (("BITS", 4),)), (3, 2, 1), (128, 4, 2), 1024)
LARGE = Launch(Kernel("int8.cu", "int8_matmul"), (1, 1, 1), (256, 1, 1), 100 << 10)
STREAM = 0x7F0012345678


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The recording driver."""
    path = tmp_path_factory.mktemp("driver") / "libcuda.so"
    source = Path(__file__).parent / "driver" / "recording.cpp"
    subprocess.run([COMPILER, "-std=c++17", "-Wall", "-Werror", "-shared", "-fPIC", source, "-o", path], check=True)
    return path


@pytest.fixture
def calls(library, monkeypatch, tmp_path):
    """What the driver has been asked since the last look: lines that begin with one of the names, or all."""
    record = tmp_path / "calls.txt"
    record.touch()
    monkeypatch.setenv("RECORD", str(record))
    monkeypatch.setattr(driver, "_LIBRARY", str(library))

    def look(*names):
        lines = record.read_text().splitlines()
        record.write_text("")
        return [line for line in lines if not names or line.split()[0] in names]

    return look


@pytest.fixture
def launcher(calls, monkeypatch, tmp_path):
    """A launcher on the third GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM + device.index))

    def compiler(text, defines, architecture):
        return f"{dict(defines)}{architecture}".replace(" ", "").encode()

    compiler.version = "nvrtc 13.0"
    return CudaLauncher(torch.device("cuda", 2), Builder(compiler, Cache(tmp_path / "cache"), "sm_90", print))


def test_the_context_is_the_one_that_torch_uses(launcher, calls):
    assert calls() == ["cuInit 0", "cuDeviceGet 2", "cuDevicePrimaryCtxRetain 42"]
    launcher(SMALL)
    made = calls()
    assert (made[0], made[-1]) == ("cuCtxPushCurrent 0x100000002a", "cuCtxPopCurrent 0")
    assert (launcher.architecture, launcher.multiprocessors) == ("sm_90", 132)


def test_shape_stream_and_arguments_reach_the_driver(launcher, calls, monkeypatch):
    monkeypatch.setenv("ARGUMENTS", "1")
    x, y = torch.zeros(4), torch.zeros(4)
    launcher(SMALL, x, -5, 2.7, y)
    shape = "grid 3 2 1 block 128 4 2 shared 1024 stream 0x7f001234567a attributes 0 extra 0 1"
    assert calls("cuLaunchKernelEx", "arguments") == [
        f"cuLaunchKernelEx 0x3000000006 {shape}",
        f"arguments {x.data_ptr():#x} -5 2.70000005 {y.data_ptr():#x}",
    ]


@pytest.mark.parametrize(("architecture", "early"), [("sm_89", False), ("sm_90", True), ("sm_120", True)])
def test_a_launch_that_waits_itself_may_begin_early_where_the_gpu_can(launcher, calls, architecture, early):
    launcher.architecture = architecture
    launcher(SMALL)
    launcher(replace(SMALL, overlaps=True))
    launched = [line.split("attributes ")[1][0] for line in calls("cuLaunchKernelEx", "attribute") if "grid" in line]
    assert launched == ["0", str(int(early))]
    launcher(replace(SMALL, overlaps=True))
    assert calls("attribute") == ["attribute 6 1"] * early  # programmatic stream serialization


def test_a_kernel_is_loaded_once_and_its_launches_are_counted(launcher, calls):
    for _ in range(3):
        launcher(SMALL)
    loaded = calls("cuModuleLoadData", "cuModuleGetFunction")
    assert loaded == ["cuModuleLoadData {'BITS':4}sm_90 1", "cuModuleGetFunction 0x2000000000 matmul"]
    assert launcher.counts == {SMALL.kernel: 3}


def test_more_than_48_kilobytes_of_shared_memory_are_asked_for_once(launcher, calls):
    launcher(SMALL)
    assert calls("cuFuncSetAttribute") == []
    launcher(LARGE)
    launcher(LARGE)
    assert calls("cuFuncSetAttribute") == [f"cuFuncSetAttribute 0x300000000b 8 {100 << 10}"]


def test_a_cubin_that_the_driver_does_not_load_is_one_line(launcher, calls, monkeypatch):
    monkeypatch.setenv("REFUSE", "cuModuleLoadData")
    with pytest.raises(
        KernelsError, match=r"driver does not load matmul as nvrtc 13\.0 makes it: .*INVALID_IMAGE"
    ) as told:
        launcher(SMALL)
    assert "update the driver" in str(told.value.hint)
    assert launcher.counts == {}
    assert calls()[-1] == "cuCtxPopCurrent 0"


@pytest.mark.parametrize("call", ["cuLaunchKernelEx", "cuFuncSetAttribute"])
def test_what_the_driver_refuses_is_said_in_its_words(launcher, monkeypatch, call):
    monkeypatch.setenv("REFUSE", call)
    with pytest.raises(KernelsError, match=f"{call} fails: CUDA_ERROR_INVALID_IMAGE, device kernel image is invalid"):
        launcher(LARGE)
    assert launcher.counts == {}


def test_a_library_that_is_no_driver_is_one_line(monkeypatch):
    monkeypatch.setattr(driver, "_LIBRARY", "libm.so.6")
    with pytest.raises(KernelsError, match="the CUDA driver cannot be used"):
        driver.Driver(0)
