"""Hadamard rotations: orthogonal, flat, and the widths of real models have one of full order."""

import pytest
import torch

from llmcompress.solve.hadamard import Rotation, largest_order

WIDTHS = [1, 2, 12, 20, 24, 28, 36, 40, 44, 60, 64, 80, 128, 576, 768, 896, 960, 1536]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_rotation_is_orthogonal_and_spreads_every_channel_evenly(width):
    matrix = Rotation(width, seed=3).matrix()
    assert torch.allclose(matrix @ matrix.T, torch.eye(width, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(matrix.abs(), torch.full_like(matrix, width**-0.5), atol=1e-12)


@pytest.mark.parametrize(("width", "order"), [(3, 1), (6, 2), (24 * 7, 168), (2 * 23, 2), (4 * 29, 4), (7 * 64, 448)])
def test_other_widths_are_rotated_in_blocks_of_the_largest_order_that_divides_them(width, order):
    assert largest_order(width) == order
    matrix = Rotation(width, seed=0).matrix()
    assert torch.allclose(matrix @ matrix.T, torch.eye(width, dtype=torch.float64), atol=1e-12)
    assert int((matrix.abs() > 1e-9).sum(dim=1).unique()) == order


def test_turning_is_multiplying_by_the_matrix_and_leaves_the_global_random_state_alone():
    before = torch.random.get_rng_state()
    rotation = Rotation(60, seed=1)
    x = torch.randn(5, 2, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(rotation.turn(x), x @ rotation.matrix(), atol=1e-12)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(Rotation(60, seed=2).signs, rotation.signs)
