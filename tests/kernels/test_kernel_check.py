"""`kernels check`, run by the emulator: every family is right there, and a kernel that is wrong is found."""

from dataclasses import replace

import pytest
import torch

from emulated import COMPILER, EmulatedLauncher
from llmcompress.grids.blocks import BLOCK_TYPES
from llmcompress.grids.integer import IntegerSpec
from llmcompress.grids.progressive import ProgressiveSpec
from llmcompress.kernels.build import Builder
from llmcompress.kernels.build_cache import Cache
from llmcompress.kernels.check import KernelCase, build_all, cases, check
from llmcompress.kernels.compile_errors import CompileError
from llmcompress.kernels.variants import variants

CPU = torch.device("cpu")
SHAPE = (40, 272)
BF16, FP16 = torch.bfloat16, torch.float16

emulated = pytest.mark.skipif(COMPILER is None, reason="there is no g++")


@emulated
@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        (KernelCase(IntegerSpec(4, 64), BF16), "matmul"),
        (KernelCase(IntegerSpec(3, -1, symmetric=False), FP16), "matmul"),
        (KernelCase(IntegerSpec(8, -1), BF16, "int8-token"), "int8_matmul"),
        (KernelCase(IntegerSpec(8, -1), FP16, "int8-tensor"), "int8_matmul"),
        (KernelCase(ProgressiveSpec(64), BF16, "int8-token"), "progressive_matmul"),
        (KernelCase(BLOCK_TYPES["Q4_K"], BF16), "ggml_matmul"),
    ],
    ids=lambda value: getattr(getattr(value, "spec", None), "name", value),
)
def test_kernels_are_right_where_they_ran(case, kernel):
    found = list(check(replace(case, shape=SHAPE, tokens=(3,)), EmulatedLauncher(), CPU))
    assert [item.failed for item in found] == [None]
    assert found[0].ok
    assert kernel in found[0].launches
    assert 0 < found[0].error < 1


@emulated
def test_more_tokens_than_a_kernel_takes_go_by_written_out_weights():
    (found,) = check(KernelCase(IntegerSpec(4, 64), BF16, shape=SHAPE, tokens=(130,)), EmulatedLauncher(), CPU)
    assert found.ok
    assert found.launches == ("dequantise",)


class Wrong(EmulatedLauncher):
    """Has a number of the result changed by one part in ten."""

    def __call__(self, launch, *arguments):
        super().__call__(launch, *arguments)
        tensors = [
            item for item in arguments if isinstance(item, torch.Tensor) and item.dtype == BF16 and item.dim() == 2
        ]
        largest = tensors[-1].view(-1).abs().argmax()
        tensors[-1].view(-1)[largest] *= 1.1


@emulated
def test_one_wrong_number_is_found():
    (found,) = check(KernelCase(IntegerSpec(4, 64), BF16, shape=SHAPE, tokens=(3,)), Wrong(), CPU)
    assert not found.ok
    assert found.error > 1


def test_what_did_not_run_is_not_right():
    class Idle(EmulatedLauncher):
        def __call__(self, launch, *arguments):
            raise CompileError("nvrtc 13.0 does not compile a kernel for sm_90: no")

    (found,) = check(KernelCase(IntegerSpec(4, 64), BF16, shape=SHAPE, tokens=(3,)), Idle(), CPU)
    assert not found.ok
    assert "does not compile" in found.failed


def test_all_families_are_among_the_cases():
    names = {case.spec.name for case in cases()}
    assert {"int2-g32-sym", "int3-g64-asym", "int4-row-sym", "int8-g128-asym", "progressive-g128", "Q6_K"} <= names
    assert {case.inputs for case in cases()} == {None, "int8-token", "int8-tensor"}


def test_every_variant_is_built_once(tmp_path):
    class Counting:
        version = "counting"

        def __init__(self):
            self.made = []

        def __call__(self, text, defines, architecture):
            self.made.append((text, defines))
            return b"cubin"

    compiler, seen = Counting(), []
    counts = build_all(Builder(compiler, Cache(tmp_path), "sm_90", print), 1, lambda done, of: seen.append((done, of)))
    kernels = {kernel for _, kernel in variants("sm_90")}
    assert sum(counts.values()) == len(kernels) == seen[-1][0]
    assert len(compiler.made) == len(set(compiler.made)) == len({(kernel.source, kernel.defines) for kernel in kernels})
