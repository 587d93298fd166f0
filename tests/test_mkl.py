"""Sums of products of bfloat16 in float32, against float64."""

import pytest
import torch

from llmcompress.mkl import add_product, adds_bfloat16

pytestmark = pytest.mark.skipif(not adds_bfloat16(), reason="needs a processor with AMX, and MKL in torch")


def made(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize("size", [(1, 1, 1), (3, 5, 7), (64, 32, 16), (1024, 96, 200), (0, 4, 4), (1, 257, 257)])
def test_a_product_is_added_without_rounding_its_factors_or_its_terms(size):
    depth, rows, columns = size
    left, right = made(depth, rows), made(depth, columns, seed=1)
    start = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2))
    total = start.clone()
    add_product(total, left, right)
    exact = left.double().T @ right.double() + start.double()
    room = 1e-6 * (left.double().abs().T @ right.double().abs() + start.double().abs())
    assert bool(((total.double() - exact).abs() <= room).all())


def test_parts_of_larger_matrices_are_read_and_written_where_they_are():
    tokens, whole = made(50, 40), torch.zeros(40, 40)
    add_product(whole[8:16, 8:], tokens[:, 8:16], tokens[:, 8:])
    exact = tokens.double().T @ tokens.double()
    torch.testing.assert_close(whole[8:16, 8:].double(), exact[8:16, 8:], rtol=1e-5, atol=1e-5)
    whole[8:16, 8:] = 0
    assert not bool(whole.any())


@pytest.mark.parametrize(
    "tokens",
    [
        made(1, 40),
        made(40, 1).T,  # one row, of which torch says that the next one begins after one number
        made(40, 7).T,
        made(7, 80)[:, ::2],
        made(1, 40).expand(7, 40),
    ],
    ids=["row", "turned row", "turned", "with gaps", "one row many times"],
)
def test_rows_may_lie_in_any_way(tokens):
    total = torch.zeros(9, 40)
    add_product(total, tokens[:, :9], tokens)
    torch.testing.assert_close(total, tokens[:, :9].float().T @ tokens.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("total", "left", "right"),
    [
        (torch.zeros(4, 4), made(8, 4), made(7, 4)),
        (torch.zeros(4, 5), made(8, 4), made(8, 4)),
        (torch.zeros(4, 4), made(8, 4), made(8, 4).float()),
        (torch.zeros(4, 4).double(), made(8, 4), made(8, 4)),
        (torch.zeros(4, 4).T, made(8, 4), made(8, 4)),
        (torch.zeros(1, 4).expand(4, 4), made(8, 4), made(8, 4)),
    ],
)
def test_what_the_routine_would_write_wrongly_is_refused(total, left, right):
    with pytest.raises(ValueError, match="no product of bfloat16"):
        add_product(total, left, right)
