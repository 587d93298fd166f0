"""Types of GGUF that are rounded by eights: bytes as the gguf package reads them, points that are the nearest."""

from itertools import product

import eights
import gguf
import numpy as np
import pytest
import torch
from eights import drawn, of_channels
from gguf import quants

from llmcompress.grids.encoders import encode
from llmcompress.grids.grid_type import gguf_specs, type_of
from llmcompress.grids.lattice import GRID, SPECS, UNIT, LatticeGrid, fitted, nearest, points
from llmcompress.packing.ggml import pack, unpack
from llmcompress.workers import SERIAL

NAMES = sorted(SPECS)


@pytest.mark.parametrize("name", NAMES)
def test_any_bytes_are_what_the_package_reads_and_come_back(name):
    spec = SPECS[name]
    data = torch.randint(
        0, 256, (16, 3 * spec.block_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
    )
    data.view(16, 3, -1)[..., 1] = 40  # of d, which shall be finite
    coded = unpack(data, spec)
    assert np.array_equal(coded.decode().numpy(), quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[name]))
    assert torch.equal(pack(coded), data)
    assert coded.grid.numbers(coded.codes)


@pytest.mark.parametrize("name", NAMES)
def test_bits_per_weight_are_those_of_the_package(name):
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert (SPECS[name].block_size, SPECS[name].block_bytes) == (block, size)
    assert SPECS[name].bits_per_weight(0) == 8 * size / block
    assert gguf_specs()[name] is SPECS[name]
    assert type_of(SPECS[name]) is GRID


def every_point(spec):
    """All points of eight, signs included."""
    table = points(spec.name).magnitudes.double()
    if spec.quad:
        table = torch.cat([table.repeat_interleave(len(table), 0), table.repeat(len(table), 1)], dim=1)
    return table


def least_error(value, metric, spec):
    """The least error of a point for one value [8], over all points and all signs that may be."""
    table, best = every_point(spec), np.inf
    for signs in product((1.0, -1.0), repeat=UNIT):
        if spec.even and np.prod(signs) < 0:
            continue
        delta = value - table * torch.tensor(signs, dtype=torch.float64)
        best = min(best, float(((delta @ metric) * delta).sum(1).min()))
    return best


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ2_XS", "IQ2_S"])
@pytest.mark.parametrize("together", [False, True])
def test_points_are_nearly_the_nearest_of_all(name, together):
    """Without mixed terms, and with free signs, exactly; else signs are chosen before magnitudes."""
    spec, values = SPECS[name], 2.2 * drawn(12, UNIT, seed=3)
    metric = of_channels(UNIT) if together else torch.diag(drawn(UNIT, seed=4).abs() + 0.2)
    found = nearest(values, metric, spec).double()
    delta = values.double() - found
    errors = ((delta @ metric.double()) * delta).sum(1)
    least = torch.tensor([least_error(value, metric.double(), spec) for value in values.double()], dtype=torch.float64)
    assert (errors >= least * (1 - 1e-6)).all()
    if not together and not spec.even:
        assert torch.allclose(errors, least, rtol=1e-5)
    assert errors.sum() <= 1.3 * least.sum()


@pytest.mark.parametrize("name", ["IQ3_XXS", "IQ3_S"])
def test_points_by_fours_are_nearly_the_nearest(name):
    spec, values = SPECS[name], 5.0 * drawn(64, UNIT, seed=3)
    table = points(name).magnitudes.double()
    found = nearest(values, torch.eye(UNIT), spec).double()
    alone = torch.cdist(values.abs().double().view(-1, 4), table).amin(1).square().view(-1, 2).sum(1)
    errors = (values.double() - found).square().sum(1)
    assert (errors >= alone * (1 - 1e-6)).all()  # the least with any signs
    if not spec.even:
        assert torch.allclose(errors, alone, rtol=1e-5)
    assert errors.sum() <= 1.6 * alone.sum()


@pytest.mark.parametrize("name", NAMES)
def test_the_second_four_make_up_for_the_first(name):
    spec, values = SPECS[name], 3 * drawn(200, UNIT, seed=5)
    metric = of_channels(UNIT, seed=6)

    def loss(levels):
        delta = values - levels
        return float(((delta @ metric) * delta).sum())

    assert loss(nearest(values, metric, spec)) < 0.95 * loss(nearest(values, torch.eye(UNIT), spec))


@pytest.mark.parametrize("name", NAMES)
def test_at_level_compat_bytes_are_those_of_llama_quantize(name):
    eights.compat_bytes_are_those_of_llama_quantize(SPECS[name])


def test_at_level_compat_what_stands_behind_zeros_is_where_it_belongs():
    weight = drawn(1, 256, seed=15)
    weight[0, 64:96] = 0
    off = encode(weight, SPECS["IQ3_S"], "compat", SERIAL, torch.ones(256)).decode() - weight
    assert off[0, 64:96].abs().max() < 0.01, "the type has no zero"
    assert off.square().sum() < 0.03 * weight.square().sum()


@pytest.mark.parametrize("name", NAMES)
def test_at_level_compat_rows_do_not_depend_on_their_neighbours_nor_on_threads(name):
    eights.compat_rows_stand_alone(SPECS[name])


# relative squared errors in percent of Gaussian weights, of this encoder
@pytest.mark.parametrize(
    ("name", "most"), [("IQ2_XXS", 12.6), ("IQ2_XS", 9.6), ("IQ2_S", 6.5), ("IQ3_XXS", 3.3), ("IQ3_S", 1.95)]
)
def test_rounding_costs_less_with_more_bits(name, most):
    weight = drawn(32, 1024, seed=7)
    coded = encode(weight, SPECS[name], "best", SERIAL, torch.ones(1024))
    assert 0.8 * most < 100 * float((coded.decode() - weight).square().sum() / weight.square().sum()) < most
    assert torch.equal(coded.codes, fitted(weight, SPECS[name], SERIAL, torch.full((1024,), 7.0)).codes)


@pytest.mark.parametrize("name", NAMES)
def test_importance_moves_errors_to_where_they_cost_less(name):
    eights.importance_moves_errors(SPECS[name], 0.99)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("search", ["fast", "best"])
def test_groups_of_zeros_cost_their_block_nothing(name, search):
    eights.groups_of_zeros_cost_their_block_nothing(SPECS[name], search)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_extremes_become_points(name):
    eights.zeros_and_extremes_become_points(SPECS[name])


@pytest.mark.parametrize("name", NAMES)
def test_refitted_scales_stay_odd_and_never_cost_more(name):
    assert isinstance(eights.refitted(SPECS[name]).grid, LatticeGrid)


@pytest.mark.parametrize("name", NAMES)
def test_codes_that_are_no_point_are_noticed(name):
    coded = encode(drawn(2, 256), SPECS[name], "best", SERIAL)
    wrong = coded.codes.clone()
    table = points(name)
    if SPECS[name].even:
        wrong[0, 0] = 2 * table.base - 1 - wrong[0, 0]  # one more minus sign
    else:
        size = table.magnitudes.shape[1]
        digits = int((table.place < 0).nonzero()[0]) // table.base ** torch.arange(size) % table.base
        wrong[0, :size] = (table.base + digits).to(torch.uint8)
    assert not coded.grid.numbers(wrong)
