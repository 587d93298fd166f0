"""IQ1_S and IQ1_M: bytes as the gguf package reads them, points that are the nearest."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from llmcompress.grids.encoders import encode
from llmcompress.grids.grid_type import gguf_specs, restored, type_of
from llmcompress.grids.lattice import UNIT
from llmcompress.grids.one_bit import GRID, SPECS, OneBitGrid, fitted
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
    for key, text in GOLDEN["rows"][name]["weighted"].items():
        weight = torch.frombuffer(bytearray.fromhex(GOLDEN["inputs"][key]), dtype=torch.float32).unsqueeze(0)
        width = weight.shape[1]
        period, divisor = (7, 4) if width == 256 else (11, 8)
        importance = torch.tensor([1 + (place % period) ** 2 / divisor for place in range(width)])
        coded = encode(weight, SPECS[name], "compat", SERIAL, importance)
        assert bytes(pack(coded)[0].tolist()).hex() == text, key
        assert coded.grid.numbers(coded.codes)


@pytest.mark.parametrize("name", NAMES)
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
    weight, importance = drawn(16, 512, seed=8), drawn(512, seed=9).exp()
    plain, weighed = (encode(weight, SPECS[name], "best", SERIAL, item) for item in (torch.ones(512), importance))
    cost = [float(((coded.decode() - weight).square() * importance).sum()) for coded in (plain, weighed)]
    assert cost[1] < 0.95 * cost[0]


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
    assert (better.grid.multiples % 2 == 1).all()
    assert better.grid.numbers(better.codes)
    assert (row_loss(weight, better, hessian) <= row_loss(weight, coded, hessian) * (1 + 1e-5)).all()
    assert row_loss(weight, better, hessian).sum() < 0.995 * row_loss(weight, coded, hessian).sum()


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
