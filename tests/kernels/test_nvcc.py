"""Every kernel compiles for every architecture, within the registers there are."""

import re
import shutil
import subprocess

import pytest
import torch

from emulated import CSRC
from llmcompress.kernels import dequantise, ggml_products, int8, matmul, progressive
from llmcompress.kernels.partition import Problem
from llmcompress.kernels.partition import variants as shapes
from llmcompress.kernels.tiles import USUAL, TileSpec

NVCC = shutil.which("nvcc")
OTHERS = [TileSpec(8, 128, None, torch.float32)]
ARCHITECTURES = ["sm_80", "sm_89", "sm_90"]
MOST_REGISTERS = 255

pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc")


def name_of(spec):
    return f"{'fp' if spec.floats else 'int'}{spec.bits}-g{spec.group}-{'asym' if spec.zero is None else 'sym'}"


def registers(kernel, architecture, folder):
    """Registers of a thread, after seeing that none was put into memory."""
    defines = [f"-D{name}={value}" for name, value in kernel.defines]
    target = folder / "kernel.cubin"
    options = [
        "-std=c++17",
        f"-arch={architecture}",
        "-cubin",
        "--fmad=false",
        "-Xptxas",
        "-v",
        "-Werror",
        "all-warnings",
    ]
    command = [str(NVCC), *options, *defines, str(CSRC / kernel.source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stderr + done.stdout
    assert re.findall(r"(\d+) bytes spill", said) == ["0", "0"], f"{kernel}: {said}"
    assert kernel.name.encode() in target.read_bytes()
    return int(re.search(r"Used (\d+) registers", said)[1])


def fits(kernel, architecture, folder):
    used = registers(kernel, architecture, folder)
    blocks, threads = dict(kernel.defines).get("BLOCKS", 1), 256
    assert used <= MOST_REGISTERS, f"{kernel} takes {used} registers for {architecture}"
    assert used * threads * blocks <= 65536, f"{kernel} takes {used} registers for {architecture}"


def in_turn(values):
    """Each value with one architecture, every architecture with some: a compiler of minutes for all of them."""
    return [(value, ARCHITECTURES[number % len(ARCHITECTURES)]) for number, value in enumerate(values)]


def named(value):
    return value if isinstance(value, str) else name_of(value)


@pytest.mark.parametrize(
    ("spec", "architecture"), in_turn([USUAL[1], USUAL[4], USUAL[7], USUAL[9], *OTHERS]), ids=named
)
def test_tiled_products_compile_without_spilling(spec, architecture, tmp_path):
    largest = list(shapes(Problem(1, 1, 1, spec), architecture))[-1]
    fits(matmul.kernel_of(largest, torch.bfloat16), architecture, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "architecture"),
    in_turn([*USUAL, *OTHERS][::2]),
    ids=named,
)
def test_all_variants_compile_without_spilling(spec, architecture, tmp_path):
    for dtype in (torch.float16, torch.bfloat16):
        fits(dequantise.kernel_of(spec, dtype), architecture, tmp_path)
        for plan in shapes(Problem(1, 1, 1, spec), architecture):
            fits(matmul.kernel_of(plan, dtype), architecture, tmp_path)


FAMILIES = [int8, progressive, ggml_products]


@pytest.mark.parametrize(("family", "architecture"), in_turn(FAMILIES), ids=["int8", "progressive", "ggml"])
def test_the_last_kernel_of_every_other_source_compiles_without_spilling(family, architecture, tmp_path):
    for kernel in {kernel.source: kernel for kernel in family.variants(architecture)}.values():
        fits(kernel, architecture, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "architecture"), in_turn(FAMILIES))
def test_every_kernel_of_other_families_compiles_without_spilling(family, architecture, tmp_path):
    for kernel in family.variants(architecture):
        fits(kernel, architecture, tmp_path)
