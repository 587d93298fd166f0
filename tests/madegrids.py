"""Matrices of codes on grids of integers and of small floats, for tests of kernels."""

import torch

from llmcompress.grids.coded import Coded
from llmcompress.grids.integer import IntegerGrid, IntegerSpec
from llmcompress.grids.mxfp4 import Mxfp4Grid, Mxfp4Spec
from llmcompress.grids.nvfp4 import Nvfp4Grid, Nvfp4Spec
from llmcompress.grids.scales import natural_groups
from llmcompress.kernels.tiles import tiled, tiled_floats


def finite_bits(shape, dtype, generator, largest=4.0):
    """Any finite numbers of a 16-bit type up to `largest`, zeros and subnormal ones among them, as float32."""
    values = torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16).view(dtype).to(torch.float32)
    values = torch.where(values.abs() <= largest, values, torch.full_like(values, 2.0**-24))
    values.view(-1)[::7] = 0.0
    return values


def coded(outputs, inputs, bits, group, symmetric, *, scale=torch.float16, seed=0, order=None):
    """Random codes and zero points; scales of any bits. order: input channels in the order of their groups."""
    generator = torch.Generator().manual_seed(seed)
    spec = IntegerSpec(bits, group, symmetric)
    groups = -(-inputs // spec.width(inputs))
    codes = torch.randint(0, spec.levels, (outputs, inputs), generator=generator).to(torch.uint8)
    zero = torch.randint(0, spec.levels, (outputs, groups), generator=generator).to(torch.float32)
    zero = torch.full_like(zero, spec.middle) if symmetric else zero
    if scale == torch.float32:
        scales = torch.randn(outputs, groups, generator=generator)
    else:
        scales = finite_bits((outputs, groups), scale, generator)
    index = natural_groups(spec, inputs)
    if order is not None:
        index = index[torch.argsort(order)]
    return Coded(codes, IntegerGrid(spec, scales, zero, index))


def coded_floats(name, outputs, inputs, *, divisor=4.0, seed=0):
    """Random codes of mxfp4 or nvfp4, with scales of all sizes: of E4M3 one after another, from the smallest on."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator).to(torch.uint8)
    if name == "mxfp4":
        exponent = torch.randint(-30, 8, (outputs, inputs // 32), generator=generator)
        return Coded(codes, Mxfp4Grid(Mxfp4Spec(), exponent.to(torch.float32)))
    bytes_ = torch.arange(outputs * inputs // 16).remainder(0x7F).to(torch.uint8)
    small = bytes_.view(torch.float8_e4m3fn).to(torch.float32).view(outputs, -1)
    return Coded(codes, Nvfp4Grid(Nvfp4Spec(), small, torch.tensor([divisor])))


def in_tiles(matrix):
    """A matrix of either kind as the kernels read it."""
    return tiled_floats(matrix) if matrix.grid.spec.type in ("mxfp4", "nvfp4") else tiled(matrix)
