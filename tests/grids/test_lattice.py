"""Types of GGUF that are rounded by eights: bytes as the gguf package reads them, points that are the nearest."""

import json
from itertools import product
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from llmcompress.grids.encoders import encode
from llmcompress.grids.grid_type import gguf_specs, type_of
from llmcompress.grids.lattice import GRID, SPECS, UNIT, LatticeGrid, fitted, nearest, points
from llmcompress.packing.ggml import pack, unpack
from llmcompress.solve.refine import row_loss
from llmcompress.workers import SERIAL

NAMES = sorted(SPECS)
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gguf_blocks.json").read_text())


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_channels(size, seed=1):
    """A Gram matrix of inputs that go together."""
    x = drawn(4 * size, size, seed=seed) @ (torch.eye(size) + 0.5 * drawn(size, size, seed=seed + 1) / size**0.5)
    return x.T @ x / len(x)


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


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ2_XS"])
def test_at_level_compat_bytes_are_those_of_llama_quantize(name):
    for key, text in GOLDEN["rows"][name]["weighted"].items():
        weight = torch.frombuffer(bytearray.fromhex(GOLDEN["inputs"][key]), dtype=torch.float32).unsqueeze(0)
        width = weight.shape[1]
        period, divisor = (7, 4) if width == 256 else (11, 8)
        importance = torch.tensor([1 + (place % period) ** 2 / divisor for place in range(width)])
        coded = encode(weight, SPECS[name], "compat", SERIAL, importance)
        assert bytes(pack(coded)[0].tolist()).hex() == text, key
        assert coded.grid.numbers(coded.codes)


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ2_XS"])
def test_at_level_compat_rows_do_not_depend_on_their_neighbours_nor_on_threads(name):
    weight, importance = 0.1 * drawn(300, 512, seed=13), drawn(512, seed=14).exp()
    weight[7, :256], weight[8, 256:300], weight[9] = 0, 0, 1e-9 * weight[9]
    whole = pack(encode(weight, SPECS[name], "compat", SERIAL, importance))
    with SERIAL.with_threads(2) as workers:
        assert torch.equal(pack(encode(weight, SPECS[name], "compat", workers, importance)), whole)
    for row in (0, 7, 8, 9, 299):
        assert torch.equal(
            pack(encode(weight[row : row + 1], SPECS[name], "compat", SERIAL, importance))[0], whole[row]
        )


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
    weight, importance = drawn(16, 512, seed=8), drawn(512, seed=9).exp()
    plain, weighed = (encode(weight, SPECS[name], "best", SERIAL, item) for item in (torch.ones(512), importance))
    cost = [float(((coded.decode() - weight).square() * importance).sum()) for coded in (plain, weighed)]
    assert cost[1] < 0.99 * cost[0]


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_extremes_become_points(name):
    weight = torch.zeros(3, 512)
    weight[1, :256], weight[2] = 1e4, 1e-6 * drawn(512)
    coded = encode(weight, SPECS[name], "best", SERIAL)
    assert torch.isfinite(coded.decode()).all()
    assert coded.grid.numbers(coded.codes)
    assert torch.equal(coded.decode()[0], torch.zeros(512))
    assert torch.equal(unpack(pack(coded), SPECS[name]).decode(), coded.decode())


@pytest.mark.parametrize("name", NAMES)
def test_refitted_scales_stay_odd_and_never_cost_more(name):
    weight, hessian = drawn(24, 512, seed=10), of_channels(512, seed=11)
    coded = encode(weight, SPECS[name], "best", SERIAL, torch.ones(512))
    better = coded.grid.refit(coded.codes, hessian, weight @ hessian, torch.float16)
    assert isinstance(better.grid, LatticeGrid)
    assert (better.grid.multiples % 2 == 1).all()
    assert (row_loss(weight, better, hessian) <= row_loss(weight, coded, hessian) * (1 + 1e-5)).all()
    assert row_loss(weight, better, hessian).sum() < 0.995 * row_loss(weight, coded, hessian).sum()


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
