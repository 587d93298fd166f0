"""One scale for a matrix of 8-bit floats: as good as the best of a fine sweep, shared by what engines fuse."""

import pytest
import torch
from safetensors.torch import load_file

from llmcompress.grids.float8_tensor import GRID, Float8TensorSpec
from llmcompress.grids.grid_type import Fitting
from llmcompress.recipe import parse
from tinyruns import compress

SPEC = Float8TensorSpec()


def lost(weight, scale, weigh):
    """By torch's own rounding to E4M3."""
    levels = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return float((((levels * scale - weight) ** 2) * weigh).double().sum())


@pytest.mark.parametrize("rows", [8, 600])  # the second in more than one piece
@pytest.mark.parametrize("weighed", [False, True])
def test_the_scale_loses_hardly_more_than_the_best_of_a_fine_sweep(rows, weighed):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, 512, generator=generator) * torch.rand(512, generator=generator)
    weigh = torch.rand(512, generator=generator) ** 4 if weighed else torch.ones(512)
    grid = GRID.fit(weight, SPEC, Fitting(importance=weigh if weighed else None, scale_dtype=torch.bfloat16))
    scale = grid.scale[0, 0]
    assert torch.equal(grid.scale, scale.expand(rows, 1))
    assert torch.equal(scale, scale.to(torch.bfloat16).float())
    covering = weight.abs().max() / 448
    best = min(lost(weight, covering * 2 ** (step / 200 - 1), weigh) for step in range(401))
    found = float((((grid.decode(grid.encode(weight)) - weight) ** 2) * weigh).double().sum())
    assert found == pytest.approx(lost(weight, scale, weigh), rel=1e-4)
    assert found <= 1.02 * best
    assert found <= lost(weight, GRID.fit(weight, SPEC, Fitting(clip="minmax")).scale[0, 0], weigh)


def test_matrices_that_engines_fuse_share_the_scale(random_model_dir, tmp_path):
    recipe = {"steps": [{"method": "rtn", "type": "fp8-tensor"}]}
    compress(random_model_dir("llama", num_hidden_layers=1), tmp_path / "out", parse(recipe))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    scales = {name.split(".")[-2]: float(part) for name, part in tensors.items() if name.endswith("weight_scale")}
    assert len(scales) == 7
    assert len({scales["q_proj"], scales["k_proj"], scales["v_proj"]}) == 1
    assert len({scales["gate_proj"], scales["up_proj"]}) == 1
    assert len(set(scales.values())) > 2
