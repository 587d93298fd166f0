"""Linears on codes: by kernels on the emulator, or decoded by torch where no kernel takes them, and then said so."""

from dataclasses import replace

import pytest
import torch

from emulated import COMPILER, EmulatedLauncher
from llmcompress.grids.base import INPUT_SPECS
from llmcompress.grids.blocks import BLOCK_TYPES
from llmcompress.grids.codebook import CodebookSpec
from llmcompress.grids.coded import Coded
from llmcompress.grids.fitting import fit
from llmcompress.grids.float8 import Float8Spec
from llmcompress.grids.inputs import InputGrid
from llmcompress.grids.int8 import Int8Spec
from llmcompress.grids.int8_inputs import ByThreshold
from llmcompress.grids.integer import IntegerSpec
from llmcompress.grids.mxfp4 import Mxfp4Spec
from llmcompress.grids.nf4 import Nf4Spec
from llmcompress.grids.nvfp4 import Nvfp4Spec
from llmcompress.grids.progressive import ProgressiveSpec
from llmcompress.kernels.joined import join
from llmcompress.kernels.linear import Linears

CPU = torch.device("cpu")
BF16 = torch.bfloat16
SPECS = [
    IntegerSpec(4, 64),
    IntegerSpec(3, -1, symmetric=False),
    IntegerSpec(5, 32),
    Float8Spec(),
    ProgressiveSpec(32),
    CodebookSpec(3),
    Nf4Spec(),
    Int8Spec(),
    BLOCK_TYPES["Q4_K"],
    BLOCK_TYPES["IQ4_NL"],
]


def coded_of(spec, rows=48, width=256, order=None):
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(rows, width, generator=generator) * 0.1
    grid = fit(weight, spec, clip="minmax", search="fast", **({} if order is None else {"order": order}))
    return Coded(grid.encode(weight), grid)


def inputs_of(shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("at_once", [1 << 24, 16 * 256])
def test_what_torch_decodes_is_the_decoded_matrix(spec, at_once, monkeypatch):
    monkeypatch.setattr("llmcompress.kernels.decoded._AT_ONCE", at_once)
    coded, bias = coded_of(spec), inputs_of((48,))
    x = inputs_of((2, 3, 256))
    linear = Linears(CPU, None, print)(coded, bias, torch.float32, None)
    assert linear.kernel == "torch"
    assert (linear.weight.shape, linear.weight.dtype) == (coded.codes.shape, x.dtype)  # which some models ask for
    wanted = x.double() @ coded.decode().double().T + bias.double()
    bound = 1e-5 * (x.abs().double() @ coded.decode().abs().double().T + 1)
    assert ((linear(x).double() - wanted).abs() <= bound).all()


def test_codes_of_four_bits_take_half_a_byte():
    linear = Linears(CPU, None, print)(coded_of(IntegerSpec(4, 64)), None, torch.float32, None)
    assert linear.product.words.shape == (48, 128)
    linear = Linears(CPU, None, print)(coded_of(IntegerSpec(8, 64)), None, torch.float32, None)
    assert linear.product.words.shape == (48, 256)


@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
@pytest.mark.parametrize(
    ("spec", "inputs", "kernel", "ran"),
    [
        (IntegerSpec(4, 64), None, "w4a16", {"matmul"}),
        (IntegerSpec(4, 64), "int8-token", "w4a16", {"matmul"}),
        (IntegerSpec(8, -1), "int8-token", "w8a8", {"quantise", "int8_matmul"}),
        (IntegerSpec(8, -1), "fp8-token", "w8a16", {"matmul"}),
        (Nvfp4Spec(), None, "fp4a16", {"matmul"}),
        (Mxfp4Spec(), None, "fp4a16", {"matmul"}),
        (ProgressiveSpec(32), "int8-token", "w4a8", {"quantise", "progressive_matmul"}),
        (BLOCK_TYPES["Q4_K"], None, "Q4_K", {"ggml_matmul"}),
    ],
)
def test_kernels_run_and_agree_with_rounded_inputs_times_the_decoded_matrix(spec, inputs, kernel, ran):
    launcher, said = EmulatedLauncher(), []
    coded, bias = coded_of(spec), inputs_of((48,), BF16)
    rounding = None if inputs is None else InputGrid(INPUT_SPECS[inputs])
    linear = Linears(CPU, launcher, said.append)(coded, bias, BF16, rounding)
    x = inputs_of((1, 3, 256), BF16)
    y = linear(x)
    assert (linear.kernel, linear.rounds, said) == (kernel, inputs is not None, [])
    assert {launch.kernel.name for launch in launcher.launches} == ran
    assert y.shape == (1, 3, 48)
    seen = x.double() if rounding is None else rounding.rounded(x.float()).double()
    wanted = seen @ coded.decode().double().T + bias.double()
    magnitudes = seen.abs() @ coded.decode().abs().double().T
    assert ((y.double() - wanted).abs() <= 2**-7 * wanted.abs() + 2**-8 * magnitudes).all()


def of_one_input(launcher, *rows, spec=None, biased=True):
    """Linears with so many outputs that read one input of 256, and copies of them that are joined."""
    make = Linears(CPU, launcher, print)
    coded = [coded_of(spec or IntegerSpec(4, 64), count) for count in rows]
    biases = [inputs_of((count,), BF16) if biased else None for count in rows]
    alone, joined = ([make(*parts, BF16) for parts in zip(coded, biases, strict=True)] for _ in range(2))
    join(joined)
    return alone, joined


@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("spec", [IntegerSpec(4, 64), IntegerSpec(3, 32, symmetric=False), Nvfp4Spec()], ids=str)
def test_matrices_that_read_one_input_share_a_launch(spec, biased):
    launcher = EmulatedLauncher()
    alone, joined = of_one_input(launcher, 96, 32, 64, spec=spec, biased=biased)
    for rows in (2, 3, 150):  # as many as the kernel takes, and more
        x = inputs_of((1, rows, 256), BF16)
        wanted, ran = [linear(x) for linear in alone], len(launcher.launches)
        found = [linear(x) for linear in joined]
        assert len(launcher.launches) == ran + 1
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-3)
    assert [linear.kernel for linear in joined] == [linear.kernel for linear in alone]
    assert sum(item.packed_bytes for linear in joined for item in linear.modules() if hasattr(item, "packed_bytes"))


@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
def test_what_was_multiplied_is_not_taken_for_another_input():
    launcher = EmulatedLauncher()
    alone, (first, second) = of_one_input(launcher, 32, 32)
    x, other = inputs_of((2, 256), BF16), inputs_of((2, 256), BF16) + 1
    ran = len(launcher.launches)
    first(x)
    assert torch.equal(second(other), alone[1](other))
    assert torch.equal(second(x), alone[1](x))  # of another input now
    first(x)
    x += 1
    assert torch.equal(second(x), alone[1](x))
    assert torch.equal(first(x), alone[0](x))
    first(x)
    again = len(launcher.launches)
    first(x)  # who asks twice has it made anew
    assert len(launcher.launches) == again + 1 > ran


@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
def test_only_matrices_alike_are_joined():
    make = Linears(CPU, EmulatedLauncher(), print)
    bias = inputs_of((64,), BF16)
    several = [
        make(coded_of(IntegerSpec(4, 64), 64), None, BF16),
        make(coded_of(IntegerSpec(4, 64), 64), bias, BF16),
        make(coded_of(IntegerSpec(3, 64), 64), None, BF16),
        make(coded_of(IntegerSpec(4, 64), 48), None, BF16),  # no whole tiles
        make(coded_of(IntegerSpec(4, 64), 64), None, BF16, InputGrid(INPUT_SPECS["fp8-token"])),
        make(coded_of(BLOCK_TYPES["Q4_K"], 64), None, BF16),
    ]
    products = [linear.product for linear in several]
    join(several)
    assert [linear.product for linear in several] == products


@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
@pytest.mark.parametrize("spec", [IntegerSpec(4, 64), IntegerSpec(8, -1)], ids=lambda spec: spec.name)
@pytest.mark.parametrize("inputs", [None, "int8-token"])
def test_zero_points_beside_the_middle_count_whatever_a_file_calls_its_grid(spec, inputs):
    coded = coded_of(replace(spec, symmetric=False))
    coded = Coded(coded.codes, replace(coded.grid, spec=spec))
    rounding = None if inputs is None else InputGrid(INPUT_SPECS[inputs])
    linear, x = Linears(CPU, EmulatedLauncher(), print)(coded, None, BF16, rounding), inputs_of((3, 256), BF16)
    assert linear.kernel == f"w{spec.bits}a16"
    seen = x.double() if rounding is None else rounding.rounded(x.float()).double()
    wanted = seen @ coded.decode().double().T
    magnitudes = seen.abs() @ coded.decode().abs().double().T
    assert ((linear(x).double() - wanted).abs() <= 2**-7 * wanted.abs() + 2**-8 * magnitudes).all()


@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
def test_groups_in_the_order_of_activations_go_by_kernels():
    coded = coded_of(IntegerSpec(4, 64), order=torch.randperm(256, generator=torch.Generator().manual_seed(1)))
    launcher = EmulatedLauncher()
    linear = Linears(CPU, launcher, print)(coded, None, BF16, None)
    x = inputs_of((2, 256), BF16)
    wanted = x.double() @ coded.decode().double().T
    assert ((linear(x).double() - wanted).abs() <= 2**-7 * wanted.abs() + 1e-4).all()
    many = inputs_of((130, 256), BF16)
    wanted = many.double() @ coded.decode().double().T
    bound = 2**-7 * (wanted.abs() + many.double().abs() @ coded.decode().abs().double().T)
    assert ((linear(many).double() - wanted).abs() <= bound).all()
    assert [launch.kernel.name for launch in launcher.launches] == ["matmul", "dequantise"]


@pytest.mark.parametrize(
    ("spec", "dtype", "inputs", "words"),
    [
        (IntegerSpec(4, 16), BF16, None, "groups"),
        (IntegerSpec(4, 64), torch.float32, None, "float32"),
        (Float8Spec(), BF16, None, "fp8-row"),
        (CodebookSpec(3), BF16, None, "codebook3-row"),
        (Nf4Spec(), BF16, None, "nf4"),
        (Int8Spec(), BF16, ByThreshold(6.0), "int8-absmax"),
        (ProgressiveSpec(32), BF16, None, "int8"),
        (BLOCK_TYPES["IQ4_NL"], BF16, None, "IQ4_NL"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_no_kernel_takes_is_said_once_and_done_by_torch(spec, dtype, inputs, words):
    class Idle:
        architecture, multiprocessors = "sm_90", 132

        def __call__(self, launch, *arguments):
            raise AssertionError("a kernel ran")

    said = []
    make = Linears(CPU, Idle(), said.append)
    linears = [make(coded_of(spec), None, dtype, inputs) for _ in range(3)]
    assert [linear.kernel for linear in linears] == ["torch"] * 3
    assert len(said) == 1
    assert words in said[0]
    assert "\n" not in said[0]
    assert linears[0](inputs_of((1, 256), dtype)).isfinite().all()
