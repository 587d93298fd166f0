"""Values as bytes and back: the same to the bit, at places where tensors of their own memory would lie."""

import math

import pytest
import torch

from llmcompress.engine.process.exchange import packed, unpacked
from llmcompress.grids.coded import Coded
from llmcompress.grids.fitting import fit
from llmcompress.grids.integer import IntegerSpec
from llmcompress.solve.damping import Factor
from llmcompress.stats.energy import Energy, energy

CPU = torch.device("cpu")
TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)


def there_and_back(value):
    return unpacked(packed(value, CPU).clone())


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -(1 << 70), 0.1, -0.0, 5e-324, math.inf, "näme\n", [], (), {}, [1, (2, [3]), {"tensor": (None,)}]],
    ids=str,
)
def test_plain_data_is_as_it_was(value):
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_tensors_are_the_same_to_the_bit_and_aligned(dtype):
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(256, (3, 5, 7, 8), generator=generator, dtype=torch.uint8)
    given = bits > 127 if dtype == torch.bool else bits.reshape(3, 5, -1).view(dtype)
    for tensor in (given, given.transpose(0, 1), given[1:1], given[0, 0, 0], given[:, 1::2]):
        first, second = there_and_back([tensor, (tensor, "x")])
        for found in (first, second[0]):
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            same = tensor.contiguous().reshape(-1).view(torch.uint8)
            assert torch.equal(found.reshape(-1).view(torch.uint8), same)
        assert (second[0].data_ptr() - first.data_ptr()) % 64 == 0


def test_codes_factors_and_energies_keep_their_kind():
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(2))
    grid = fit(weight, IntegerSpec(4, 32, True))
    coded = Coded(grid.encode(weight), grid, torch.tensor([0.5]))
    factor = Factor(weight, weight[0], 0.01, 3, 0.5)
    found, factor_found, seen = there_and_back([coded, factor, {"a": energy(weight)}])
    assert torch.equal(found.decode(), coded.decode())
    assert found.stored().keys() == coded.stored().keys()
    assert found.input_scale == 0.5
    assert isinstance(factor_found, Factor)
    assert torch.equal(factor_found.ahead, weight)
    assert (factor_found.percdamp, factor_found.dead, factor_found.shrinkage) == (0.01, 3, 0.5)
    assert isinstance(seen["a"], Energy)
    assert torch.equal(seen["a"].sums, energy(weight).sums)


def test_what_nobody_could_restore_is_refused():
    with pytest.raises(TypeError, match="object cannot be told to another process"):
        packed([object()], CPU)
