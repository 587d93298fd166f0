"""What each pruner keeps and makes of it, against its paper's definition, weight by weight in float64."""

from functools import partial
from itertools import chain

import pytest
import torch

from llmcompress.methods.base import Statistics
from llmcompress.pruners.magnitude import Magnitude
from llmcompress.pruners.sparsegpt import SparseGpt
from llmcompress.pruners.wanda import Wanda
from llmcompress.stats.gram import Gram
from llmcompress.workers import SERIAL

ROWS, WIDTH, TOKENS = 6, 32, 200


def problem(seed=0):
    """Weights [out, in] and the inputs [tokens, in] that they meet, channels of very different sizes, correlated."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, WIDTH, generator=g) @ (torch.eye(WIDTH) + 0.3 * torch.randn(WIDTH, WIDTH, generator=g))
    return torch.randn(ROWS, WIDTH, generator=g), x * torch.logspace(-1, 1, WIDTH)[torch.randperm(WIDTH, generator=g)]


def statistics(x):
    gram = Gram(WIDTH, SERIAL)
    gram.update(x)
    return Statistics({"gram": gram})


def magnitude(weight, x):
    return weight.abs().double()


def wanda(weight, x):
    """|w_ij| ||x_j||, section 3 of arXiv:2306.11695."""
    return magnitude(weight, x) * x.double().norm(dim=0)


def ria(weight, x):
    """(|w_ij| / sum of its row + |w_ij| / sum of its column) ||x_j||^0.5, equation 4 of RIA."""
    size = magnitude(weight, x)
    relative = torch.empty_like(size)
    for i in range(ROWS):
        for j in range(WIDTH):
            relative[i, j] = size[i, j] / size[i].sum() + size[i, j] / size[:, j].sum()
    return relative * x.double().norm(dim=0) ** 0.5


def largest(scores, share):
    """The places of all scores but a share of the smallest."""
    ranked = sorted(scores, key=scores.__getitem__)
    return set(ranked[round(share * len(ranked)) :])


PRUNERS = {
    "magnitude": (Magnitude, {}, magnitude),
    "wanda": (Wanda, {}, wanda),
    "ria": (Wanda, {"score": "ria"}, ria),
}


@pytest.mark.parametrize("among", ["row", "matrix", "2:4", "1:8"])
@pytest.mark.parametrize("name", PRUNERS)
def test_what_stays_has_the_largest_scores_of_the_paper(name, among):
    pruner, options, score = PRUNERS[name]
    weight, x = problem()
    scores = score(weight, x).tolist()
    if ":" in among:
        kept, of = map(int, among.split(":"))
        groups = [[(i, j + k) for k in range(of)] for i in range(ROWS) for j in range(0, WIDTH, of)]
        share, asked = 1 - kept / of, {"pattern": among}
    else:
        groups = [[(i, j) for j in range(WIDTH)] for i in range(ROWS)]
        groups = groups if among == "row" else [list(chain(*groups))]
        share, asked = 0.5, {"sparsity": 0.5, "compare": among}
    wanted = set().union(*(largest({(i, j): scores[i][j] for i, j in group}, share) for group in groups))
    [found] = pruner(**asked, **options).prune([weight], statistics(x), SERIAL)
    assert set(map(tuple, found.keep.nonzero().tolist())) == wanted
    assert torch.equal(found.weight, weight * found.keep)


def best_of(weight, keep, hessian):
    """The kept weights of each row that lose least of its outputs, by least squares in float64."""
    out = torch.zeros_like(weight, dtype=torch.float64)
    for i, kept in enumerate(keep):
        wanted = weight[i].double() @ hessian[:, kept]
        out[i, kept] = torch.linalg.solve(hessian[kept][:, kept], wanted)
    return out


def loss(weight, other, hessian):
    delta = other.double() - weight.double()
    return float(((delta @ hessian) * delta).sum())


@pytest.mark.parametrize("pruner", [Magnitude, Wanda, partial(SparseGpt, shrinkage=0)])
def test_a_refit_comes_to_the_least_squares_of_what_stays(pruner):
    weight, x = problem(1)
    [found] = pruner(sparsity=0.5, refit=4 * WIDTH).prune([weight], statistics(x), SERIAL)
    hessian = (x.double().T @ x.double()) / TOKENS
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(WIDTH)
    best = loss(weight, best_of(weight, found.keep, hessian), hessian)
    assert loss(weight, found.weight, hessian) == pytest.approx(best, rel=1e-3)  # conjugate gradients in float32
    assert best < 0.9 * loss(weight, weight * found.keep, hessian)
    assert ((found.weight != 0) == found.keep).all()


def test_plain_sparsegpt_is_the_loop_of_the_paper():
    """Algorithm 1 of arXiv:2301.00774 in float64: one block, columns as the inputs' energy has them."""
    weight, x = problem(2)
    [found] = SparseGpt(sparsity=0.5, refit=0, shrinkage=0).prune([weight], statistics(x), SERIAL)
    hessian = (x.double().T @ x.double()) / TOKENS
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(WIDTH)
    order = SparseGpt(sparsity=0.5).choice.order((x**2).mean(dim=0))
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian[order][:, order]), upper=True)
    work = weight[:, order].double()
    scores = work**2 / upper.diagonal() ** 2
    gone = scores <= scores.flatten().sort().values[ROWS * WIDTH // 2 - 1]  # of all rows of a block together
    for j in range(WIDTH):
        left = torch.where(gone[:, j], 0.0, work[:, j])
        work[:, j + 1 :] -= ((work[:, j] - left) / upper[j, j])[:, None] * upper[j, j + 1 :]
        work[:, j] = left
    assert torch.equal(found.weight[:, order] == 0, gone)
    assert torch.allclose(found.weight[:, order].double(), work, rtol=1e-3, atol=1e-4)
