"""`kernels check`, `bench` and `cache`: with the emulator in the place of a GPU, and without one."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import llmcompress.cli.kernels
import llmcompress.kernels.check
from emulated import COMPILER, EmulatedLauncher
from llmcompress.errors import LlmcompressError
from llmcompress.grids.integer import IntegerSpec
from llmcompress.kernels import cuda, driver, nvrtc, rivals
from llmcompress.kernels.build import Builder
from llmcompress.kernels.build_cache import Cache, Made
from llmcompress.kernels.check import KernelCase
from llmcompress.kernels.compile_errors import KernelsError
from llmcompress.kernels.gpu_sweep import gpu_sweeper
from llmcompress.kernels.variants import variants

BF16 = torch.bfloat16


class Compiler:
    version = "nvrtc 13.0"

    def __call__(self, text, defines, architecture):
        return b"cubin"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """The emulator as the GPU at hand, and a case to check on it."""
    if COMPILER is None:
        pytest.skip("there is no g++")

    class Emulated(EmulatedLauncher):
        device = torch.device("cpu")
        builder = Builder(Compiler(), Cache(tmp_path / "cache"), "sm_90", print)

    monkeypatch.setattr(cuda, "open_gpu", lambda say, cache: Emulated())
    case = KernelCase(IntegerSpec(4, 64), BF16, shape=(40, 272), tokens=(1, 3))
    monkeypatch.setattr(llmcompress.kernels.check, "cases", lambda: iter([case]))
    return Emulated


def test_check_builds_runs_and_shows_one_table(main, capsys, gpu, tmp_path):
    assert main("kernels", "check") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "int4-g64-sym bfloat16 1, 3 matmul" in shown
    assert "sm_90, nvrtc 13.0" in shown
    assert main("kernels", "check", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    kernels = [kernel for _, kernel in variants("sm_90")]
    assert sum(found["built"].values()) == len(kernels)
    binaries = {(kernel.source, kernel.defines) for kernel in kernels}  # one holds all kernels of its source
    assert len(list((tmp_path / "cache").iterdir())) == len(binaries)
    assert [item["tokens"] for item in found["cases"]] == [1, 3]
    assert all(item["error"] < 1 and item["launches"] == ["matmul"] for item in found["cases"])


def test_a_wrong_kernel_fails_the_check(main, capsys, gpu, monkeypatch):
    real = gpu.__call__

    def wrong(self, launch, *arguments):
        real(self, launch, *arguments)
        y = next(
            item
            for item in arguments
            if isinstance(item, torch.Tensor) and item.shape[-1:] == (40,) and item.dim() == 2
        )
        y.neg_()

    monkeypatch.setattr(gpu, "__call__", wrong)
    assert main("kernels", "check", "--no-build", "--json") == 3
    shown = capsys.readouterr()
    assert json.loads(shown.out)["ok"] is False
    assert "2 of 2 cases are wrong, such as int4-g64-sym bfloat16" in shown.err


@pytest.mark.parametrize("command", ["check", "bench"])
def test_without_a_gpu_there_is_one_line(main, capsys, monkeypatch, command):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main("kernels", command) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("error: kernels need an NVIDIA GPU, and torch ")
    assert all(line.startswith("  hint: ") for line in rest)


def test_too_old_a_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    with pytest.raises(KernelsError, match=r"compute capability 8\.0, Tesla T4 has 7\.5"):
        cuda.open_gpu()


def test_a_gpu_without_a_compiler_is_told_what_to_install(main, capsys, monkeypatch):
    monkeypatch.setattr(cuda, "usable", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "_candidates", lambda: ["libnvrtc.so.0"])
    monkeypatch.setenv("PATH", "")
    assert main("kernels", "check") == 2
    first, hint = capsys.readouterr().err.splitlines()
    assert "nothing to compile kernels with" in first
    assert "pip install nvidia-cuda-nvrtc" in hint


def test_a_compiler_without_a_driver_is_one_line_and_torch_decides(monkeypatch):
    monkeypatch.setattr(cuda, "usable", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda, "find_compiler", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(driver, "_LIBRARY", "libcuda.so.0")
    said = []
    assert gpu_sweeper(torch.device("cuda", 0), said.append) is None
    assert len(said) == 1
    assert "the CUDA driver cannot be used (libcuda.so.0" in said[0]


def test_the_cache_is_shown_and_cleared(main, capsys, tmp_path):
    cache = Cache(tmp_path)
    cache.write(Made("matmul.cu", "0" * 64, (("BITS", 4),), "sm_90", "nvrtc 13.0"), b"cubin")
    (tmp_path / f"{'0' * 64}.cubin").write_bytes(b"damaged")
    assert main("kernels", "cache", "--cache", tmp_path) == 0
    shown = capsys.readouterr().out
    assert "matmul.cu" in shown
    assert "BITS=4" in shown
    assert "damaged" in shown
    assert main("kernels", "cache", "--cache", tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert Counter(item["about"] is None for item in found["files"]) == {True: 1, False: 1}
    assert main("kernels", "cache", "--clear", "--cache", tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["removed"] == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "big"], "is not a shape"),
        (["--shape", "4096x0"], "is not a shape"),
        (["--shape", "4090x4096"], "must be a multiple of 16"),
        (["--only", "w4"], "there is no kernel 'w4' to time"),
    ],
)
def test_what_cannot_be_timed_is_refused(main, capsys, arguments, words):
    assert main("kernels", "bench", *arguments) == 2
    assert words in capsys.readouterr().err


def test_a_matrix_with_two_of_four_is_what_sparse_products_are_checked_with():
    dense = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).to(BF16)
    zeroed = rivals.two_of_four(dense)
    fours = zeroed.view(16, 16, 4)
    assert ((fours != 0).sum(-1) == 2).all()
    kept, lost = fours.abs().amax(-1), (dense - zeroed).view(16, 16, 4).abs().amax(-1)
    assert (kept >= lost).all()
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    y = x @ zeroed.T
    rivals.check_sparse(y, x, zeroed)
    with pytest.raises(LlmcompressError, match="2:4"):
        rivals.check_sparse(x @ dense.T, x, zeroed)


def test_a_gpu_that_runs_out_of_memory_is_one_line(main, capsys, monkeypatch):
    def full(**_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr(cuda, "open_gpu", full)
    assert main("kernels", "check") == 1
    first, hint = capsys.readouterr().err.splitlines()
    assert first == "error: out of GPU memory (CUDA out of memory)"
    assert "finished layers are kept" in hint
