"""Integers with a scale and an offset: what is chosen, beside exhaustive search, float64 and other grids."""

import pytest
import torch

from llmcompress.errors import RecipeError
from llmcompress.grids.coded import Coded
from llmcompress.grids.fitting import fit
from llmcompress.grids.grid_type import spec_named, type_of
from llmcompress.grids.offset import OffsetGrid, OffsetSpec


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lost(weight, grid, weigh):
    return float(((grid.decode(grid.encode(weight)) - weight).double() ** 2 * weigh).sum())


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_it_loses_less_than_zero_points_that_are_whole(bits, size):
    weight, weigh = normal(24, 256) + 0.3, normal(256, seed=1).square()
    errors = {
        name: lost(weight, fit(weight, spec_named(name), importance=weigh, scale_dtype=torch.float16), weigh.double())
        for name in (f"int{bits}-g{size}-asym", f"int{bits}-g{size}-offset")
    }
    assert errors[f"int{bits}-g{size}-offset"] < 0.995 * errors[f"int{bits}-g{size}-asym"]


def test_a_search_is_near_the_best_of_all_ranges():
    weight = normal(1, 32)
    spec = OffsetSpec(3, 32)
    low, high = float(weight.min()), float(weight.max())
    grids = [
        OffsetGrid(spec, torch.tensor([[(end - start) / 7]]), torch.tensor([[start]]))
        for start in torch.linspace(low, low + 1, 120).tolist()
        for end in torch.linspace(high - 1, high, 120).tolist()
    ]
    best = min(lost(weight, grid, 1.0) for grid in grids)
    assert lost(weight, fit(weight, spec, scale_dtype=torch.float32), 1.0) <= 1.05 * best


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_stored_is_exact_and_covers_every_weight(dtype):
    weight = normal(16, 128) * torch.logspace(-4, 4, 16).unsqueeze(1)
    weight[3] = 0.25  # all alike
    grid = fit(weight, OffsetSpec(4, 64), clip="minmax", scale_dtype=dtype)
    for part in (grid.scale, grid.start):
        assert torch.equal(part.to(dtype).float(), part)
        assert torch.equal(part.half().float(), part)
    error = (grid.decode(grid.encode(weight)) - weight).abs().view(16, 2, 64).amax(-1)
    slack = 2.0 ** (-10 if dtype == torch.float16 else -7)  # of rounding both ends of a range
    assert (error <= grid.scale / 2 + slack * weight.abs().view(16, 2, 64).amax(-1)).all()
    assert torch.equal(grid.decode(grid.encode(weight))[3], weight[3])


def test_values_are_the_formula():
    grid = fit(normal(4, 64), OffsetSpec(4, 32), scale_dtype=torch.float16)
    codes = torch.arange(256).reshape(4, 64).remainder(16).to(torch.uint8)
    by_hand = [
        [float(grid.scale[r, k // 32]) * int(codes[r, k]) + float(grid.start[r, k // 32]) for k in range(64)]
        for r in range(4)
    ]
    torch.testing.assert_close(grid.decode(codes).double(), torch.tensor(by_hand, dtype=torch.float64))
    again = type_of(grid.spec).restored(grid.spec, 64, grid.stored())
    assert torch.equal(again.decode(codes), grid.decode(codes))
    assert spec_named(grid.spec.name) == grid.spec


def test_refitting_lowers_the_loss_of_every_row_towards_least_squares():
    inputs = normal(512, 128, seed=2) @ normal(128, 128, seed=3)
    hessian = inputs.T @ inputs / 512
    weight = normal(8, 128)
    grid = fit(weight, OffsetSpec(3, 32), clip="minmax", scale_dtype=torch.float32)
    codes = grid.encode(weight)

    def losses(coded):
        off = (coded.decode() - weight).double()
        return ((off @ hessian.double()) * off).sum(1)

    before = losses(Coded(codes, grid))
    after = losses(grid.refit(codes, hessian, (weight - grid.decode(codes)) @ hessian, torch.float32))
    assert (after <= before * (1 + 1e-6)).all()
    root = torch.linalg.cholesky(hessian.double() + 1e-9 * torch.eye(128, dtype=torch.float64)).T
    for row in range(8):  # the exact solution over all groups at once
        basis = torch.zeros(128, 8, dtype=torch.float64)
        for group in range(4):
            basis[32 * group : 32 * group + 32, group] = codes[row, 32 * group : 32 * group + 32].double()
            basis[32 * group : 32 * group + 32, 4 + group] = 1
        solved = torch.linalg.lstsq(root @ basis, root @ weight[row].double()).solution
        off = basis @ solved - weight[row].double()
        least = float((off @ hessian.double()) @ off)
        assert least - 1e-6 <= float(after[row]) <= least + 0.7 * (float(before[row]) - least)


def test_channels_that_count_more_are_nearer():
    weight, weigh = normal(64, 64), torch.full((64,), 0.01)
    weigh[:8] = 100.0
    by, plain = (
        lost(weight, fit(weight, OffsetSpec(3, 64), importance=importance, scale_dtype=torch.float16), weigh.double())
        for importance in (weigh, None)
    )
    assert by < 0.8 * plain


@pytest.mark.parametrize(("bits", "size"), [(7, 64), (1, 64), (4, 16), (4, 256), (4, -1)])
def test_what_mlx_has_not_is_refused(bits, size):
    with pytest.raises(RecipeError, match="choose one of them") as error:
        OffsetSpec(bits, size)
    assert f"{bits} bits" in str(error.value)
