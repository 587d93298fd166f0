"""IQ1_S and IQ1_M: bytes as the gguf package reads them, points that are the nearest."""

import eights
import gguf
import numpy as np
import pytest
import torch
from eights import drawn, of_channels
from gguf import quants

from llmcompress.grids.encoders import encode
from llmcompress.grids.grid_type import gguf_specs, restored, type_of
from llmcompress.grids.lattice import UNIT
from llmcompress.grids.one_bit import GRID, SPECS, OneBitGrid, fitted
from llmcompress.packing.ggml import pack, unpack
from llmcompress.workers import SERIAL

NAMES = sorted(SPECS)


def any_bytes(spec):
    data = torch.randint(
        0, 256, (16, 3, spec.block_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
    )
    last = data[..., -1] if spec.name == "IQ1_M" else data[..., 1]  # of d, which shall be finite
    last.copy_(last & 0x0F | 0x20)
    return data.flatten(1)


@pytest.mark.parametrize("name", NAMES)
def test_any_bytes_are_what_the_package_reads_and_come_back(name):
    data = any_bytes(SPECS[name])
    coded = unpack(data, SPECS[name])
    assert np.array_equal(coded.decode().numpy(), quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[name]))
    assert torch.equal(pack(coded), data)
    assert coded.grid.numbers(coded.codes)
    again = restored(SPECS[name], coded.stored())
    assert torch.equal(pack(again), data)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_those_of_the_package(name):
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert (SPECS[name].block_size, SPECS[name].block_bytes) == (block, size)
    assert gguf_specs()[name] is SPECS[name]
    assert type_of(SPECS[name]) is GRID


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_points_are_the_nearest_of_all(name, together):
    quants.IQ1_S.init_grid()
    table = torch.from_numpy(quants.IQ1_S.grid.reshape(-1, UNIT)).double()
    values = 1.2 * drawn(24, UNIT, seed=3)
    metric = of_channels(UNIT) if together else torch.diag(drawn(UNIT, seed=4).abs() + 0.2)
    raised = (torch.arange(24) % 2).float().unsqueeze(1) if SPECS[name].shared else None
    grid = OneBitGrid(SPECS[name], torch.ones(24, 1), torch.ones(24, 8), raised=raised)
    found = grid.snapped(values, metric, 0).double()
    for row, value in enumerate(values.double()):
        signs = (1, -1) if raised is None else (2 * int(raised[row]) - 1,)
        every = torch.cat([table + sign * 0.125 for sign in signs]) - value
        least = ((every @ metric.double()) * every).sum(1).min()
        delta = found[row] - value
        assert torch.isclose(delta @ metric.double() @ delta, least, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_at_level_compat_bytes_are_those_of_llama_quantize(name):
    eights.compat_bytes_are_those_of_llama_quantize(SPECS[name])


@pytest.mark.parametrize("name", NAMES)
def test_at_level_compat_rows_do_not_depend_on_their_neighbours_nor_on_threads(name):
    eights.compat_rows_stand_alone(SPECS[name])


# relative squared errors in percent of Gaussian weights, of this encoder; 19 is that of the best three levels
@pytest.mark.parametrize(("name", "most"), [("IQ1_S", 19.9), ("IQ1_M", 17.2)])
def test_rounding_costs_less_with_more_bits(name, most):
    weight = drawn(32, 1024, seed=7)
    coded = encode(weight, SPECS[name], "best", SERIAL, torch.ones(1024))
    assert 0.9 * most < 100 * float((coded.decode() - weight).square().sum() / weight.square().sum()) < most
    assert torch.equal(coded.codes, fitted(weight, SPECS[name], SERIAL, torch.full((1024,), 7.0)).codes)


@pytest.mark.parametrize("name", NAMES)
def test_codes_of_a_fitted_grid_are_points(name):
    weight = drawn(8, 512, seed=12)
    coded = fitted(weight, SPECS[name], SERIAL, torch.ones(512))
    codes = coded.grid.encode(weight)
    assert coded.grid.numbers(codes)
    loss = (coded.grid.decode(codes) - weight).square().sum()
    assert loss <= (coded.decode() - weight).square().sum() * (1 + 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_importance_moves_errors_to_where_they_cost_less(name):
    eights.importance_moves_errors(SPECS[name], 0.95)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("search", ["fast", "best"])
def test_groups_of_zeros_cost_their_block_nothing(name, search):
    eights.groups_of_zeros_cost_their_block_nothing(SPECS[name], search)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_extremes_become_points(name):
    eights.zeros_and_extremes_become_points(SPECS[name])


@pytest.mark.parametrize("name", NAMES)
def test_refitted_scales_stay_odd_and_never_cost_more(name):
    better = eights.refitted(SPECS[name])
    assert better.grid.numbers(better.codes)


@pytest.mark.parametrize("name", NAMES)
def test_codes_that_are_no_point_are_noticed(name):
    coded = encode(drawn(2, 256), SPECS[name], "best", SERIAL)
    flipped, mixed = coded.codes.clone(), coded.codes.clone()
    mixed[0, 0] ^= 1  # raised apart from its neighbours
    flipped[0, :UNIT] ^= 1  # eight apart from their group
    assert not coded.grid.numbers(mixed)
    assert coded.grid.numbers(flipped) is not SPECS[name].shared
    quants.IQ1_S.init_grid()
    known = {tuple(row) for row in quants.IQ1_S.grid.reshape(-1, UNIT).astype(int).tolist()}
    wrong = next(row for row in torch.cartesian_prod(*[torch.arange(-1, 2)] * UNIT).tolist() if tuple(row) not in known)
    outside = coded.codes.clone()
    outside[0, :UNIT] = 2 * (torch.tensor(wrong, dtype=torch.uint8) + 1) | coded.codes[0, 0] & 1
    assert not coded.grid.numbers(outside)
