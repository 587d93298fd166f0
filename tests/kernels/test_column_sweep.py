"""The sweep as a kernel gives the codes of the plain one, but for the order of sums, and those of float64 by hand."""

import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from emulated import COMPILER, CSRC, EmulatedLauncher
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.grids.blocks import BLOCK_TYPES
from llmcompress.grids.codebook import CodebookSpec
from llmcompress.grids.coded import Coded
from llmcompress.grids.fitting import fit
from llmcompress.grids.float8 import Float8Spec
from llmcompress.grids.int8 import Int8Spec
from llmcompress.grids.integer import IntegerSpec
from llmcompress.grids.mxfp4 import Mxfp4Spec
from llmcompress.grids.nf4 import Nf4Spec
from llmcompress.grids.nvfp4 import Nvfp4Spec
from llmcompress.grids.progressive import ProgressiveSpec
from llmcompress.kernels.gpu_sweep import KernelSweeper, gpu_sweeper
from llmcompress.methods.base import Statistics
from llmcompress.methods.gptq import Gptq
from llmcompress.recipe import Calibration, Recipe
from llmcompress.solve.column_sweep import Levels, as_stored
from llmcompress.solve.damping import damped, inverse_factor
from llmcompress.solve.gptq import gptq_codes
from llmcompress.solve.prepared import Prepared, column_order
from llmcompress.solve.refine import row_loss
from llmcompress.solve.row_blocks import RowBlocks
from llmcompress.solve.sparsegpt import FixedMask, MaskChoice
from llmcompress.stats.gram import Gram
from llmcompress.workers import SERIAL

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")
GRIDS = {
    "4 bits": IntegerSpec(4, 32),
    "3 bits, zero points": IntegerSpec(3, 64, symmetric=False),
    "8 bits by row": IntegerSpec(8, -1),
    "int8": Int8Spec(),
    "progressive": ProgressiveSpec(64),
    "Q4_K": BLOCK_TYPES["Q4_K"],
    "Q6_K": BLOCK_TYPES["Q6_K"],
    "IQ4_XS": BLOCK_TYPES["IQ4_XS"],
    "NF4": Nf4Spec(),
    "NVFP4": Nvfp4Spec(),
    "MXFP4": Mxfp4Spec(),
    "codebook": CodebookSpec(3),
}
NVCC = shutil.which("nvcc")


def problem(rows, width, seed=0):
    """A weight, and what GPTQ makes of a Gram matrix whose inputs are related and of unlike size."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator) * width**-0.5 + torch.eye(width)
    inputs = torch.randn(4 * width, width, generator=generator) @ mixing
    inputs[:, ::37] *= 12
    hessian = inputs.T @ inputs / len(inputs)
    order = column_order(hessian, by_energy=True)
    weight = torch.randn(rows, width, generator=generator) * 0.02
    return weight, Prepared(damped(hessian, 0.01), order, inverse_factor(hessian, 0.01, order=order))


def sweeper(seed=0):
    return KernelSweeper(EmulatedLauncher(seed=seed), torch.device("cpu"))


def solved(weight, ready, grid, mask, by, **options):
    coded = gptq_codes(weight, grid, ready.factor, ready.order, mask=mask, sweeper=by, **options)
    keep, gradient = None if mask is None else mask.keep, ready.refiner.gradient(weight, coded)
    return coded, ready.refiner.descend_codes(coded, gradient, keep, sweeper=by)[0]


@pytest.mark.parametrize("masked", [False, True], ids=["dense", "masked"])
@pytest.mark.parametrize("name", GRIDS)
def test_codes_are_those_of_the_plain_sweep_but_for_the_order_of_sums(name, masked):
    spec = GRIDS[name]
    weight, ready = problem(24, 256)
    grid = fit(weight, spec, importance=ready.cost)
    generator = torch.Generator().manual_seed(1)
    keep = (torch.rand(256, 24, generator=generator) > 0.4).to(torch.float32)
    mask = FixedMask(keep) if masked else None
    by = sweeper()
    for kernel, plain in zip(
        solved(weight, ready, grid, mask, by), solved(weight, ready, grid, mask, None), strict=True
    ):
        levels = grid.levels(kernel.codes) - grid.levels(plain.codes)
        # of 24 rows: where two levels are equally near, the order of sums decides, and the rest of the row follows
        assert int((levels != 0).any(dim=1).sum()) <= 2
        torch.testing.assert_close(
            row_loss(weight, kernel, ready.refiner.hessian).sum(),
            row_loss(weight, plain, ready.refiner.hessian).sum(),
            rtol=3e-3,  # a row that goes another way ends a little better or worse
            atol=0,
        )
        if masked and grid.offset is None and (grid.table is None or bool((grid.table == 0).any())):
            assert (grid.levels(kernel.codes).T[ready.order][keep == 0] == 0).all()
    assert [launch.kernel.name for launch in by.launcher.launches] == ["round_block"] * 2 + ["move_block"] * 2


@pytest.mark.parametrize(("rows", "width"), [(1, 32), (9, 96), (17, 160), (8, 320)])
def test_any_number_of_rows_and_columns(rows, width):
    weight, ready = problem(rows, width, seed=rows)
    grid = fit(weight, IntegerSpec(4, 32), importance=ready.cost)
    for kernel, plain in zip(
        solved(weight, ready, grid, None, sweeper(seed=3)), solved(weight, ready, grid, None, None), strict=True
    ):
        assert int((kernel.codes != plain.codes).sum()) <= max(2, 0.001 * weight.numel())


def test_a_block_is_what_float64_makes_of_it_by_hand():
    """Column by column on one row, no blocks: errors and levels of round_block, values and levels of move_block."""
    weight, ready = problem(5, 128)
    grid = fit(weight, IntegerSpec(4, 32), importance=ready.cost)
    steps = Levels.of(grid, ready.order)
    columns = weight.T[ready.order].contiguous()
    levels, errors = torch.full_like(columns, torch.nan), torch.full_like(columns, torch.nan)
    sweeper().round_block(columns, levels, None, ready.factor.ahead, steps, 0, errors)
    ahead = ready.factor.ahead.double().numpy()
    scale, low, high = (part[steps.index.long()].double().numpy() for part in (steps.scale, *steps.bounds))
    for row in range(5):
        values = columns[:, row].double().numpy().copy()
        for j in range(128):
            level = np.clip(np.rint(values[j] / scale[j, row]), low[j, row], high[j, row])
            error = values[j] - level * scale[j, row]
            assert levels[j, row] == level
            assert errors[j, row] == pytest.approx(error, abs=1e-6)
            values[j + 1 :] -= ahead[j, j + 1 :] * error

    slopes = (torch.randn(128, 5, generator=torch.Generator().manual_seed(2)) * 0.003).contiguous()
    moved, moves = levels.clone(), torch.full_like(columns, torch.nan)
    sweeper().move_block(slopes, moved, None, ready.refiner.ordered, ready.refiner.curve, steps, 0, moves)
    bend, curve = ready.refiner.ordered.double().numpy(), ready.refiner.curve.double().numpy()
    assert (moved != levels).any()
    for row in range(5):
        slope = slopes[:, row].double().numpy().copy()
        for j in range(128):
            old = float(levels[j, row])
            level = np.clip(np.rint(old + slope[j] * curve[j] / scale[j, row]), low[j, row], high[j, row])
            assert moved[j, row] == level
            assert moves[j, row] == pytest.approx((level - old) * scale[j, row], abs=1e-7)
            slope[j + 1 :] -= bend[j, j + 1 :] * (level - old) * scale[j, row]


@pytest.mark.parametrize("masked", [False, True], ids=["dense", "masked"])
@pytest.mark.parametrize(("name", "rows", "width"), [("NVFP4", 17, 96), ("MXFP4", 8, 160)])
def test_scales_are_chosen_together_with_codes_as_by_torch(name, rows, width, masked):
    weight, ready = problem(rows, width, seed=2)
    keep = (torch.rand(width, rows, generator=torch.Generator().manual_seed(1)) > 0.4).float() if masked else None
    aim = weight if keep is None else weight * keep.T
    grid = fit(aim, GRIDS[name], importance=ready.cost)
    codes, found = grid.encode(aim), {}
    for who, by in (("kernel", sweeper()), ("torch", None)):
        coded = Coded(codes, grid)
        slopes = as_stored(ready.refiner.gradient(weight, coded), ready.order)
        stay, rescale = None if keep is None else keep.T, None if by is None else by.rescale
        found[who] = grid.refit_all(codes, ready.refiner.hessian, slopes, torch.float16, stay, rescale)
        if by is not None:
            assert [launch.kernel.name for launch in by.launcher.launches] == ["rescale"]
    kernel, plain = found["kernel"], found["torch"]
    assert (plain.grid.scale != grid.scale).any()
    assert (plain.codes != codes).any()
    same = (kernel.grid.scale == plain.grid.scale).all(1) & (kernel.codes == plain.codes).all(1)
    assert int((~same).sum()) <= 1  # where two are equally good, the order of sums decides
    if keep is not None:
        assert not kernel.decode()[keep.T == 0].any()


def test_what_the_kernel_does_not_know_is_left_to_torch():
    weight, ready = problem(8, 256)
    by = sweeper()
    fp8 = fit(weight, Float8Spec())
    chosen = MaskChoice(0.5, None).mask(ready.factor.pivots, 8)
    whole = fit(weight, IntegerSpec(4, 32))
    for grid, mask in ((fp8, None), (whole, chosen)):
        gptq_codes(weight, grid, ready.factor, ready.order, mask=mask, sweeper=by)
    assert not by.takes(weight.double(), Levels.of(whole, ready.order))
    assert by.launcher.launches == []


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90"])
@pytest.mark.parametrize(("source", "kernels"), [("sweep.cu", 2), ("rescale.cu", 1)])
def test_it_compiles_without_spills(source, kernels, architecture, tmp_path):
    command = [NVCC, f"-arch={architecture}", "-cubin", "-Xptxas", "-v", "-o", tmp_path / "cubin", CSRC / source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(\d+) bytes spill", done.stderr) == ["0"] * 2 * kernels
    assert re.findall(r"(\d+) bytes stack", done.stderr) == ["0"] * kernels
    assert all(int(count) <= 64 for count in re.findall(r"Used (\d+) registers", done.stderr)), done.stderr


def test_without_kernels_torch_goes_on_and_one_line_says_why():
    said = []
    assert gpu_sweeper(torch.device("cuda"), said.append) is None
    assert len(said) == 1
    assert said[0].startswith("torch decides column by column, which is slower: kernels need an NVIDIA GPU")


def test_kernels_are_tried_before_a_run_goes_by_them(monkeypatch):
    launcher = EmulatedLauncher()
    monkeypatch.setattr("llmcompress.kernels.cuda.open_gpu", lambda device, say: launcher)
    assert gpu_sweeper(torch.device("cpu"), pytest.fail).launcher is launcher
    assert [launch.kernel.name for launch in launcher.launches] == ["round_block", "move_block", "rescale"]


@pytest.mark.parametrize("count", [1, 2])
def test_every_block_of_rows_goes_by_the_kernels_in_whichever_thread(count, monkeypatch):
    monkeypatch.setattr("llmcompress.solve.row_blocks.SOLVED_ROWS", 40)
    weight, ready = problem(2 * 40 + 8, 32)
    by, stats = sweeper(), Statistics({"gram": Gram.of(ready.refiner.hessian, 1 << 10)})
    method = Gptq(group_size=32, sym=True, clip="minmax")
    with SERIAL.with_threads(count) as workers:
        method.solve(weight, stats, torch.float16, RowBlocks(workers, sweeper=by))
    assert sorted(launch.kernel.name for launch in by.launcher.launches) == ["move_block"] * 3 + ["round_block"] * 3


def test_a_method_hands_the_choice_of_scales_to_the_kernel():
    weight, ready = problem(16, 64)
    stats, found = Statistics({"gram": Gram.of(ready.refiner.hessian, 1 << 10)}), {}
    for kind, scales in (("nvfp4", ["rescale"]), ("mxfp8", [])):  # floats of 8 bits are left to torch
        by = sweeper()
        for who, chosen in (("kernel", by), ("torch", None)):
            solved = Gptq(type=kind).solve(weight, stats, torch.float16, RowBlocks(SERIAL, sweeper=chosen))
            found[who] = row_loss(weight, solved.coded, ready.refiner.hessian).sum()
        assert [launch.kernel.name for launch in by.launcher.launches if launch.kernel.name == "rescale"] == scales
        torch.testing.assert_close(found["kernel"], found["torch"], rtol=1e-2, atol=0)


def test_a_whole_run_goes_by_the_kernels(random_model_dir, tmp_path):
    """Given the same inputs, the codes are those of torch; each that is not changes the inputs of what follows."""
    recipe = Recipe(
        calibration=Calibration(source=str(ids_in(tmp_path)), samples=64, length=32),
        steps=[{"method": "gptq", "bits": 4, "group_size": 32}],
    )
    by, found = sweeper(), {}
    for name, chosen in (("kernel", by), ("torch", None)):
        options = Options(out=tmp_path / name, threads=1, keep_work=True, device="cpu", compute_dtype="float32")
        plan = make_plan(recipe, random_model_dir("llama", num_hidden_layers=1), options)
        run(plan, sweeper=chosen)
        found[name] = [load_file(file) for file in sorted(plan.work.glob("section-*.safetensors"))]
    assert by.launcher.launches
    differing = {
        f"{key} of layer {number}": (ours[key] != theirs[key]).float().mean().item()
        for number, (ours, theirs) in enumerate(zip(found["kernel"], found["torch"], strict=True))
        for key in theirs
        if key.endswith(".codes")
    }
    assert len(differing) == 7
    first = [share for key, share in differing.items() if "layer 0" in key and key.split(".")[-2][0] in "qkv"]
    assert len(first) == 3
    assert max(first) < 0.001
    assert max(differing.values()) < 0.02


def ids_in(folder):
    """A file of token ids for a random model."""
    ids = torch.randint(96, (64, 32), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, folder / "ids.safetensors")
    return folder / "ids.safetensors"
