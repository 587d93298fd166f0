"""Integer grids: stored scales, full ranges, and a search that never loses to min-max on what it minimises."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcompress.errors import RecipeError
from llmcompress.grids.integer import INTEGER_BITS, IntegerSpec, fit
from llmcompress.grids.scales import storable

SPECS = [IntegerSpec(bits, group, sym) for bits in INTEGER_BITS for group in (16, -1) for sym in (True, False)]


def weights(rows=24, width=64, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, width, generator=generator) * 0.05
    w[:, 3] *= 8  # an outlier channel
    return w.to(dtype).to(torch.float32)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("clip", ["search", "minmax"])
def test_decoded_values_lie_on_the_grid_the_runtime_computes(spec, clip):
    w = weights()
    grid = fit(w, spec, clip=clip, scale_dtype=torch.bfloat16)
    codes = grid.encode(w)
    assert codes.dtype == torch.uint8
    assert int(codes.max()) < spec.levels
    group = spec.width(w.shape[1])
    for j in (0, 15, 16, 63):
        expected = (codes[:, j].double() - grid.zero[:, j // group].double()) * grid.scale[:, j // group].double()
        assert torch.equal(grid.decode(codes)[:, j].double(), expected.float().double())


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_are_exact_in_float16_and_in_the_models_type(spec, dtype):
    scale = fit(weights() * 1e-3, spec, scale_dtype=dtype).scale
    assert torch.equal(scale, scale.to(torch.float16).float())
    if dtype == torch.bfloat16:
        assert torch.equal(scale, scale.to(torch.bfloat16).float())
    assert (scale != 0).all()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_search_never_loses_to_minmax_on_the_weighted_error(spec):
    w, importance = weights(), torch.rand(64, generator=torch.Generator().manual_seed(1)) ** 4 + 1e-3
    weigh = importance + 1e-3 * importance.mean()  # what the search itself weighs by

    def loss(clip):
        grid = fit(w, spec, clip=clip, importance=importance)
        return ((grid.decode(grid.encode(w)) - w).square() * weigh).sum()

    assert loss("search") <= loss("minmax") * (1 + 1e-5)
    if spec.bits <= 4:
        assert loss("search") < 0.95 * loss("minmax")


@pytest.mark.parametrize("sym", [True, False])
def test_minmax_keeps_every_weight_within_half_a_step(sym):
    w = weights()
    grid = fit(w, IntegerSpec(4, 16, sym), clip="minmax")
    step = grid.scale[:, grid.group_index]
    slack = (
        1.01 if sym else 1.02 + 0.5
    )  # symmetric: the positive extreme is clipped by half a step; asymmetric: so is the zero point
    assert ((grid.decode(grid.encode(w)) - w).abs() <= step * 0.5 * slack + step * 0.01).all()


def test_one_sided_groups_keep_their_range():
    w = torch.tensor([[2.3, 1.7, 2.0, 1.9]])
    grid = fit(w, IntegerSpec(4, 4, symmetric=False), clip="minmax")
    assert (grid.decode(grid.encode(w)) - w).abs().max() <= 2.3 / 15


def test_zero_groups_and_tiny_weights_stay_finite():
    w = torch.zeros(4, 32)
    w[1] = 1e-9
    for spec in (IntegerSpec(4, 16), IntegerSpec(4, 16, symmetric=False)):
        grid = fit(w, spec)
        decoded = grid.decode(grid.encode(w))
        assert torch.isfinite(decoded).all()
        assert (decoded[0] == 0).all()


def test_groups_in_another_order_are_the_same_groups_of_permuted_columns():
    w, order = weights(), torch.randperm(64, generator=torch.Generator().manual_seed(2))
    grid = fit(w, IntegerSpec(3, 16), order=order)
    assert grid.group_index[order].tolist() == [k // 16 for k in range(64)]
    assert torch.equal(grid.scale, fit(w[:, order], IntegerSpec(3, 16)).scale)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=8, max_size=8), st.sampled_from(INTEGER_BITS), st.booleans())
def test_any_finite_row_decodes_finitely_and_zero_stays_zero(row, bits, sym):
    w = torch.tensor([row])
    grid = fit(w, IntegerSpec(bits, 8, sym))
    decoded = grid.decode(grid.encode(w))
    assert torch.isfinite(decoded).all()
    assert (decoded[w == 0] == 0).all()


def test_storable_is_idempotent_and_never_zero():
    x = torch.tensor([0.0, 1e-12, -3e-9, 0.1234567, 7e4, -1.0])
    once = storable(x, torch.bfloat16)
    assert torch.equal(once, storable(once, torch.bfloat16))
    assert (once != 0).all()


def test_unknown_widths_and_groups_are_refused():
    with pytest.raises(RecipeError, match="7"):
        IntegerSpec(7, 64)
    with pytest.raises(RecipeError, match="group size 0"):
        IntegerSpec(4, 0)


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("order", ["natural", "permuted", "backwards"])
@pytest.mark.parametrize("points", ["fitted", "others"])
def test_codes_levels_and_values_go_by_the_group_of_each_column(sym, order, points):
    generator, weight = torch.Generator().manual_seed(1), weights()
    spec = IntegerSpec(4, 16, sym)
    grid = fit(weight, spec)
    index = grid.group_index
    index = {
        "natural": index,
        "permuted": index[torch.randperm(len(index), generator=generator)],
        "backwards": index.flip(0),
    }[order]
    zero = grid.zero if points == "fitted" else (grid.zero + 3) % spec.levels  # as files of others may have them
    grid = replace(grid, group_index=index, zero=zero)
    codes = torch.randint(0, spec.levels, weight.shape, dtype=torch.uint8, generator=generator)
    scale = grid.scale.double()[:, index]
    levels = codes.double() - zero.double()[:, index]
    assert torch.equal(grid.levels(codes).double(), levels)
    assert torch.equal(grid.codes(grid.levels(codes)), codes)
    assert torch.allclose(grid.decode(codes).double(), levels * scale, rtol=1e-6)
    nearest = (weight.double() / scale + zero.double()[:, index]).round().clamp(0, spec.levels - 1)
    assert (grid.encode(weight).double() != nearest).double().mean() < 1e-3  # but for ties
    assert torch.equal(grid.encode(weight.T.contiguous().T), grid.encode(weight))
