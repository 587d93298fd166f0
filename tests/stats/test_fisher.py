"""Fisher information against outer products of every token, and sampled rows against all of them."""

import pytest
import torch

from llmcompress.stats.fisher import coupled_loss, expected_loss, of_matrix, of_table, of_window, sampled_rows


def made(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def test_both_sums_are_those_of_the_outer_products_of_every_token():
    x, g = made(2, 5, 7), made(2, 5, 3)
    diagonal = sum((row.outer(column)) ** 2 for row, column in zip(g.view(10, 3), x.view(10, 7), strict=True))
    found = of_matrix(x, g)
    torch.testing.assert_close(found.outputs, diagonal.sum(dim=1))
    torch.testing.assert_close(found.inputs, diagonal.sum(dim=0))
    twice = found.plus(of_matrix(x, g)).times(0.5)
    torch.testing.assert_close(twice.outputs, found.outputs)


def test_a_table_is_a_matrix_that_reads_one_hot_inputs():
    ids, g = torch.tensor([3, 0, 3, 1]), made(4, 6)
    found = of_table(ids, g, 5)
    same = of_matrix(torch.nn.functional.one_hot(ids, 5).to(torch.float64), g)
    torch.testing.assert_close(found.outputs, same.inputs)  # rows of a table are inputs of its transpose
    torch.testing.assert_close(found.inputs, same.outputs)


def test_the_expected_loss_is_half_the_quadratic_form():
    error, outputs, inputs = made(4, 6), made(4).abs(), made(6).abs()
    full = torch.diag(outputs.outer(inputs).flatten())
    assert expected_loss(error, outputs, inputs) == pytest.approx(float(error.flatten() @ full @ error.flatten()) / 2)


def test_errors_of_a_row_may_depend_on_one_another():
    error, outputs, rows = made(4, 6), made(4).abs(), made(9, 6)
    inputs = rows.T @ rows
    full = torch.kron(torch.diag(outputs), inputs)
    found = coupled_loss(error, outputs, inputs)
    assert found == pytest.approx(float(error.flatten() @ full @ error.flatten()) / 2)
    diagonal = torch.diag(inputs.diagonal())
    assert coupled_loss(error, outputs, diagonal) == pytest.approx(expected_loss(error, outputs, inputs.diagonal()))


def test_tokens_of_a_window_count_together():
    x, g = made(5, 7), made(5, 3)
    found = of_window(g.T @ x)
    pairs = sum(torch.einsum("o,i,p,j->opij", g[a], x[a], g[b], x[b]) for a in range(5) for b in range(5))
    together = torch.einsum("ooii->oi", pairs)
    torch.testing.assert_close(found.outputs, together.sum(dim=1))
    torch.testing.assert_close(found.inputs, together.sum(dim=0))
    one = of_window(g[:1].T @ x[:1])
    torch.testing.assert_close(one.inputs, of_matrix(x[:1], g[:1]).inputs)  # of a single token both are the same


def test_few_rows_are_all_taken_and_many_are_sampled_by_weight():
    weights = made(4000).square()
    weights[7] = 500.0
    rows, share = sampled_rows(weights[:50], 50)
    assert rows.tolist() == list(range(50))
    assert torch.equal(share, weights[:50])
    rows, share = sampled_rows(weights, 400)
    values = made(4001)[1:].abs()
    assert len(rows) == 400
    assert float(share.sum()) == pytest.approx(float(weights.sum()))
    assert float(share @ values[rows]) == pytest.approx(float(weights @ values), rel=0.05)
    assert abs(int((rows == 7).sum()) - 400 * 500 / float(weights.sum())) <= 1


def test_rows_without_weight_are_never_sampled():
    weights = torch.zeros(100, dtype=torch.float64)
    weights[[5, 60, 99]] = 1.0
    rows, _ = sampled_rows(weights, 30)
    assert set(rows.tolist()) == {5, 60, 99}
