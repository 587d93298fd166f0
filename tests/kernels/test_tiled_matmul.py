"""Products with tiled matrices are those in float64, within what rounding the sums and the output can cost."""

import pytest
import torch

from emulated import COMPILER, EmulatedLauncher
from llmcompress.kernels import partition
from llmcompress.kernels.compile_errors import TakesNotError
from llmcompress.kernels.matmul import matmul, plan_of, variants
from llmcompress.kernels.partition import SHAPES
from llmcompress.kernels.tiles import tiled
from llmcompress.kernels.workspace import Workspace
from madegrids import coded, coded_floats, in_tiles

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="no g++"), pytest.mark.usefixtures("poisoned_memory")]
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
TINY = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}


def inputs(rows, width, dtype, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bound(x, weights, exact, group):
    """What y may differ from exact by.

    Products of 16-bit floats and codes are exact. Each instruction cuts its sum of 16 products and the sum so far by
    less than 2^-23 of the largest term; each group adds a product and a sum in float32; warps, blocks and bias, a few.
    """
    steps = x.shape[1] / 16 + 2 * x.shape[1] / group + 64
    sums = x.double().abs() @ weights.double().abs().T
    return UNIT[x.dtype] * exact.abs() + TINY[x.dtype] + steps * 2.0**-23 * sums


def check(matrix, x, launcher, bias=None):
    """y, after comparing it with float64."""
    weight, ran = in_tiles(matrix), len(launcher.launches)
    y = matmul(launcher, x, weight, Workspace(torch.device("cpu")), bias)
    assert [launch.kernel.name for launch in launcher.launches[ran:]] == ["matmul"]
    weights = matrix.decode()
    exact = x.double() @ weights.double().T
    allowed = bound(x, weights, exact, weight.spec.group)
    if bias is not None:
        exact += bias.double()
        allowed += 2 * UNIT[x.dtype] * bias.double().abs()
    assert y.dtype == x.dtype
    assert ((y.double() - exact).abs() <= allowed).all()
    return y


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("group", "symmetric"), [(32, False), (64, True), (128, False), (-1, True)])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_grid_and_type(bits, group, symmetric, dtype):
    matrix = coded(40, 256, bits, group, symmetric, scale=dtype)
    check(matrix, inputs(3, 256, dtype), EmulatedLauncher())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 9, 33, 128])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_floats_of_four_bits(name, rows, dtype):
    matrix = coded_floats(name, 72, 288, divisor=2.9)
    check(matrix, inputs(rows, 288, dtype), EmulatedLauncher())


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 31, 33, 64, 65, 128])
def test_every_number_of_rows(rows):
    matrix = coded(72, 256, 4, 128, True)
    check(matrix, inputs(rows, 256, torch.float16), EmulatedLauncher())


def forced(monkeypatch, shape, slots, stages=3):
    """Lets every product run as one variant on so many blocks."""

    def chosen(problem, architecture, multiprocessors):
        tiles, warps_n, warps_k = shape
        plan = partition.Partition(problem, tiles, warps_n, warps_k, stages, 1, 1)
        return partition.replace(plan, slots=min(slots, plan.columns * plan.depth))

    monkeypatch.setattr(partition, "best", chosen)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_that_share_tiles_add_up_whatever_their_order(shape, monkeypatch):
    matrix, x = coded(300, 1100, 4, 128, False), inputs(11, 1100, torch.float16)
    ragged = torch.cat([x, x.new_full((11, 4), torch.nan)], 1)[:, :1100]
    forced(monkeypatch, shape, 7)
    results = [check(matrix, ragged, EmulatedLauncher(seed=seed)) for seed in (1, 200)]
    assert torch.equal(*results)
    assert plan_of(11, tiled(matrix), EmulatedLauncher()).partial > 0


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 6, 9, 12])
@pytest.mark.parametrize("stages", [2, 6])
def test_every_share_of_work(slots, stages, monkeypatch):
    forced(monkeypatch, (1, 2, 4), slots, stages)
    matrix, workspace, launcher = coded(192, 2048, 2, 64, True), Workspace(torch.device("cpu")), EmulatedLauncher()
    y = check(matrix, inputs(2, 2048, torch.bfloat16), launcher)
    for _ in range(2):  # counters are zeros again
        assert torch.equal(matmul(launcher, inputs(2, 2048, torch.bfloat16), tiled(matrix), workspace), y)


@pytest.mark.parametrize(("outputs", "width"), [(1, 8), (5, 100), (33, 129), (97, 255), (130, 300)])
def test_sizes_need_not_fit_the_tiles(outputs, width):
    for rows in (1, 9):
        matrix = coded(outputs, width, 3, -1, True)
        check(matrix, inputs(rows, width, torch.float16), EmulatedLauncher())


def test_rows_may_lie_apart_and_nothing_between_them_is_read():
    wide = inputs(6, 400, torch.float16)
    wide[:, 250:] = torch.nan
    matrix = coded(40, 250, 4, -1, True)
    for x in (wide[:, :250], wide[::2, :250], wide[:, :256].t().contiguous().t()[:, :250]):
        check(matrix, x, EmulatedLauncher())
    wide[:, 0] = torch.nan
    check(coded(40, 249, 4, -1, True), wide[:, 1:250], EmulatedLauncher())  # not on 16 bytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outliers_and_zero_scales(dtype):
    matrix = coded(64, 512, 4, 32, False)
    matrix.grid.scale[5] = 0.0
    matrix.grid.scale[:, 3] = 0.0
    matrix.grid.scale[7, 2] = 3000.0
    x = inputs(4, 512, dtype) * 0.01
    x[2, 70] = 60000.0
    x[1, 200] = -6.0e-5
    y = check(matrix, x[[0, 1, 3]], EmulatedLauncher())
    assert (y[:, 5] == 0).all()
    if dtype == torch.bfloat16:
        check(matrix, x, EmulatedLauncher())


def test_sums_beyond_float16_are_infinite():
    matrix = coded(32, 128, 4, 128, True)
    matrix.codes[:], matrix.grid.scale[:] = 15, 1000.0
    y = matmul(EmulatedLauncher(), torch.ones(1, 128).half(), tiled(matrix), Workspace(torch.device("cpu")))
    assert torch.isposinf(y).all()


@pytest.mark.parametrize("slots", [1, 4])
def test_bias_is_added_before_the_sum_is_rounded(slots, monkeypatch):
    forced(monkeypatch, (1, 2, 4), slots)
    matrix = coded(70, 1024, 4, 64, False)
    check(matrix, inputs(3, 1024, torch.bfloat16), EmulatedLauncher(), torch.randn(70).bfloat16())


def test_channels_in_the_order_of_activation():
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    check(coded(40, 256, 4, 64, False, order=order), inputs(2, 256, torch.float16), EmulatedLauncher())


@pytest.mark.parametrize("scale", [torch.bfloat16, torch.float32])
def test_scales_of_every_type(scale):
    check(coded(40, 256, 8, 32, True, scale=scale), inputs(2, 256, torch.float16), EmulatedLauncher())


def test_what_no_kernel_takes_is_refused():
    weight, workspace = tiled(coded(40, 256, 4, 64, True)), Workspace(torch.device("cpu"))
    with pytest.raises(TakesNotError, match="1 to 128 tokens, not 129"):
        matmul(EmulatedLauncher(), inputs(129, 256, torch.float16), weight, workspace)
    with pytest.raises(TakesNotError, match="float16 and bfloat16, not float32"):
        matmul(EmulatedLauncher(), torch.ones(1, 256), weight, workspace)
    with pytest.raises(TakesNotError, match="do not fit a weight with 256 inputs"):
        matmul(EmulatedLauncher(), torch.ones(1, 128).half(), weight, workspace)
    assert matmul(EmulatedLauncher(), inputs(0, 256, torch.float16), weight, workspace).shape == (0, 40)


def test_variants_are_what_is_launched():
    launcher = EmulatedLauncher("sm_90", 132)
    check(coded(64, 256, 4, 128, True), inputs(1, 256, torch.bfloat16), launcher)
    assert launcher.launches[0].kernel in list(variants("sm_90"))
