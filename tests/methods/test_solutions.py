"""What methods make of one matrix, against their definitions in float64."""

import pytest
import torch

from llmcompress.errors import RunError
from llmcompress.methods.base import Statistics
from llmcompress.methods.gptq import Gptq
from llmcompress.methods.rtn import Rtn
from llmcompress.methods.unrounded import Unrounded
from llmcompress.solve.prune import Pruned
from llmcompress.solve.row_blocks import SERIAL_BLOCKS
from llmcompress.stats.gram import Gram
from llmcompress.workers import SERIAL

ROWS, WIDTH, GROUP = 12, 32, 8


def problem(seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(400, WIDTH, generator=g) @ (torch.eye(WIDTH) + 0.2 * torch.randn(WIDTH, WIDTH, generator=g))
    gram = Gram(WIDTH, SERIAL)
    gram.update(x)
    return torch.randn(ROWS, WIDTH, generator=g), Statistics({"gram": gram}), x.double().T @ x.double() / len(x)


def covering(weight, bits, symmetric):
    """Scales [out, groups, 1], stored in 16 bits, and zero points of ranges that cover every weight of a group."""
    groups = weight.view(len(weight), -1, GROUP)
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    if symmetric:
        high = groups.abs().amax(-1, keepdim=True)
        low = -high
    scale = ((high - low) / ((1 << bits) - 1)).to(torch.float16).double()
    return scale, torch.full_like(scale, 1 << bits - 1) if symmetric else (-low.double() / scale).round()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rtn_takes_the_nearest_of_all_values(bits, symmetric):
    weight, stats, _ = problem()
    solved = Rtn(bits=bits, group_size=GROUP, sym=symmetric, clip="minmax").solve(
        weight, stats, torch.float16, SERIAL_BLOCKS
    )
    wide = weight.double().view(ROWS, -1, GROUP)
    scale, zero = covering(weight, bits, symmetric)
    values = (torch.arange(1 << bits) - zero.unsqueeze(-1)) * scale.unsqueeze(-1)
    nearest = (wide.unsqueeze(-1) - values).abs().amin(-1)
    found = (solved.coded.decode().double().view_as(wide) - wide).abs()
    assert ((found - nearest).abs() <= 2**-11 * (1 << bits) * scale).all()  # a scale of 16 bits, times a code


def test_a_row_alone_is_solved_like_a_row_of_many():
    weight, stats, _ = problem()
    alone, many = (
        Gptq(bits=4, group_size=GROUP).solve(w, stats, torch.float16, SERIAL_BLOCKS) for w in (weight[:1], weight)
    )
    assert (
        alone.coded.codes == many.coded.codes[:1]
    ).float().mean() > 0.98  # a product of one row sums in another order


@pytest.mark.parametrize("shrinkage", [0.0, 0.5])
@pytest.mark.parametrize("bits", [2, 4])
def test_plain_gptq_is_the_loop_of_the_paper(bits, shrinkage):
    """arXiv:2210.17323, with columns as stored and nothing of ours: no search of ranges, no descent."""
    weight, stats, hessian = problem()
    plain = {"clip": "minmax", "actorder": "none", "descent": 0, "qep_alpha": 0}
    method = Gptq(bits=bits, group_size=GROUP, shrinkage=shrinkage, **plain)
    solved = method.solve(weight, stats, torch.float16, SERIAL_BLOCKS)
    scale, zero = (value[..., 0] for value in covering(weight, bits, symmetric=True))
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(WIDTH) + shrinkage * hessian.diagonal().diag()
    upper = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    work = weight.double().clone()
    for j in range(WIDTH):
        step, middle = scale[:, j // GROUP], zero[:, j // GROUP]
        code = (work[:, j] / step + middle).round().clamp(0, (1 << bits) - 1)
        work[:, j + 1 :] -= ((work[:, j] - (code - middle) * step) / upper[j, j])[:, None] * upper[j, j + 1 :]
        assert torch.equal(solved.coded.codes[:, j].double(), code)
    assert solved.percdamp == 0.01


def test_shrinkage_serves_inputs_whose_correlations_are_others():
    """Codes that descend on a shrunk Gram matrix lose more on its text, and less where channels are not correlated."""
    weight, stats, hessian = problem()
    others, lost = hessian.diagonal().diag(), {}
    for shrinkage in (0.0, 1.0):
        method = Gptq(bits=3, group_size=GROUP, shrinkage=shrinkage)
        missed = weight.double() - method.solve(weight, stats, torch.float16, SERIAL_BLOCKS).coded.decode()
        lost[shrinkage] = [float(((missed @ gram) * missed).sum()) for gram in (hessian, others)]
    assert lost[0.0][0] < lost[1.0][0]
    assert lost[1.0][1] < lost[0.0][1]


@pytest.mark.parametrize("method", [Rtn, Gptq])
def test_weights_that_were_pruned_stay_zero(method):
    weight, stats, _ = problem()
    keep = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    solved = method(bits=4, group_size=GROUP).solve(
        weight, stats, torch.float16, SERIAL_BLOCKS, Pruned(weight * keep, keep)
    )
    assert not solved.coded.decode()[~keep].any()
    assert (solved.coded.decode()[keep] != 0).float().mean() > 0.5


@pytest.mark.parametrize(("name", "dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)])
def test_what_is_not_rounded_is_what_its_type_holds(name, dtype):
    weight, stats, _ = problem()
    keep = weight > 0
    solved = Unrounded(dtype=name).solve(weight, stats, torch.float16, SERIAL_BLOCKS, Pruned(weight * keep, keep))
    assert torch.equal(solved.coded.decode(), (weight * keep).to(dtype).float())


def test_what_cannot_be_solved_is_refused_by_name():
    weight, _, _ = problem()
    with pytest.raises(RunError, match="gptq needs the statistics"):
        Gptq(bits=4, group_size=GROUP).solve(weight, Statistics(), torch.float16, SERIAL_BLOCKS)
    with pytest.raises(RunError, match="clip: output needs the statistics"):
        Rtn(bits=4, group_size=GROUP, clip="output").solve(weight, Statistics(), torch.float16, SERIAL_BLOCKS)
    with pytest.raises(RunError, match="overflow F16"):
        Unrounded(dtype="F16").solve(weight * 1e6, Statistics(), torch.float16, SERIAL_BLOCKS)
