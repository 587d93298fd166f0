"""Matrices of codes on integer grids, for tests of kernels."""

import torch

from llmcompress.grids.coded import Coded
from llmcompress.grids.integer import IntegerGrid, IntegerSpec
from llmcompress.grids.scales import natural_groups


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
