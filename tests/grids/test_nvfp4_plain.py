"""NVFP4 without a factor: scales that are floats of 8 bits themselves, against brute force over all of them."""

import numpy as np
import torch

from llmcompress.grids.grid_type import Fitting, spec_named
from llmcompress.grids.nvfp4 import fit as fit_factored
from llmcompress.grids.nvfp4_plain import GRID, PlainNvfp4Spec

LEVELS = np.array([s * m for s in (1, -1) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])
SCALES = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()


def weight(size, rows=6, width=64):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)) * size


def error(values, weight):
    return float(((values - weight) ** 2).sum())


def test_the_best_scale_of_each_group_is_found_as_by_trying_all():
    w = weight(3.0)
    grid = GRID.fit(w, GRID.made, Fitting(clip="search"))
    found = grid.decode(grid.encode(w))
    groups = w.double().numpy().reshape(-1, 16)
    best = 0.0
    for group in groups:
        best += min(((np.abs(group[:, None] - LEVELS * scale).min(1)) ** 2).sum() for scale in SCALES)
    assert best <= error(found, w) <= best * 1.02  # ten scales beside the one that covers a group are tried
    assert torch.equal(grid.scale, grid.scale.to(torch.float8_e4m3fn).float())


def test_small_weights_lose_more_than_with_a_factor():
    w = weight(0.02)
    plain = GRID.fit(w, GRID.made, Fitting(clip="search"))
    factored = fit_factored(w)
    assert error(plain.decode(plain.encode(w)), w) > 1.2 * error(factored.decode(factored.encode(w)), w)


def test_weights_beyond_the_largest_scale_are_clamped():
    w = weight(1.0) * 0 + 4000.0
    grid = GRID.fit(w, GRID.made, Fitting(clip="minmax"))
    assert torch.equal(grid.decode(grid.encode(w)), torch.full_like(w, 448.0 * 6))


def test_nothing_is_shared_by_rows_or_matrices():
    spec = spec_named("nvfp4-plain")
    assert spec == PlainNvfp4Spec()
    assert not spec.joins_rows
    assert not spec.joins_matrices
    assert spec.gguf_type is None
    assert set(spec.parts(8, 64)) == {"weight_packed", "weight_scale"}
    assert spec.bits_per_weight(64) == 4.5
