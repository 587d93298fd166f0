"""TQ1_0 and TQ2_0: bytes as the gguf package has them, scales that no other beats, ternary weights kept."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from llmcompress.grids.coded import Coded
from llmcompress.grids.encoders import encode
from llmcompress.grids.grid_type import gguf_specs, type_of
from llmcompress.grids.integer import IntegerGrid, IntegerSpec
from llmcompress.grids.recode import recode
from llmcompress.grids.ternary import GRID, SPECS, fitted
from llmcompress.packing.ggml import pack, unpack
from llmcompress.solve.refine import row_loss
from llmcompress.workers import SERIAL

NAMES = sorted(SPECS)
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gguf_blocks.json").read_text())


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ternary(rows, width, seed=0):
    """Weights that are minus one, zero or one times a scale of their block that float16 holds."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(-1, 2, (rows, width // 256, 256), generator=generator)
    scales = (0.02 * torch.rand(rows, width // 256, 1, generator=generator) + 0.001).half().float()
    return (signs * scales).view(rows, width)


@pytest.mark.parametrize("name", NAMES)
def test_any_bytes_are_what_the_package_reads(name):
    spec = SPECS[name]
    data = torch.randint(
        0, 256, (16, 3 * spec.block_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
    )
    data.view(16, 3, -1)[..., -1] = 40  # of d, which shall be finite
    coded = unpack(data, spec)
    assert np.array_equal(coded.decode().numpy(), quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[name]))
    again = pack(coded)
    assert torch.equal(again, data) or name == "TQ1_0"  # 243 of 256 bytes are written
    assert torch.equal(unpack(again, spec).codes, coded.codes)


@pytest.mark.parametrize("name", NAMES)
def test_at_level_compat_bytes_are_those_of_llama_quantize_and_come_back(name):
    for key, text in GOLDEN["rows"][name]["plain"].items():
        weight = torch.frombuffer(bytearray.fromhex(GOLDEN["inputs"][key]), dtype=torch.float32).unsqueeze(0)
        coded = encode(weight, SPECS[name], "compat", SERIAL, torch.ones(weight.shape[1]))
        assert bytes(pack(coded)[0].tolist()).hex() == text, key


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_those_of_the_package(name):
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert (SPECS[name].block_size, SPECS[name].block_bytes) == (block, size)
    assert gguf_specs()[name] is SPECS[name]
    assert type_of(SPECS[name]) is GRID


@pytest.mark.parametrize("level", ["compat", "best"])
@pytest.mark.parametrize("name", NAMES)
def test_ternary_weights_are_kept_exactly(name, level):
    weight, importance = ternary(8, 768), drawn(768).exp()
    weight[0, :256] = 0
    assert torch.equal(encode(weight, SPECS[name], level, SERIAL, importance).decode(), weight)


@pytest.mark.parametrize("importance", [None, drawn(512, seed=3).exp()], ids=["alike", "weighed"])
def test_no_other_scale_has_less_error(importance):
    weight = drawn(6, 512, seed=4)
    cost = torch.ones(512) if importance is None else importance

    def losses(values):
        return ((values - weight).square() * cost).view(6, 2, 256).sum(-1)

    found = losses(fitted(weight, SPECS["TQ2_0"], SERIAL, importance).decode())
    least = torch.full_like(found, torch.inf)
    for d in torch.linspace(0.05, 4, 4000):
        least = torch.minimum(least, losses((weight / d).round().clamp(-1, 1) * d))
    assert (found <= least * (1 + 1e-3)).all()  # d is a float16
    assert (found >= least * (1 - 1e-3)).all()


@pytest.mark.parametrize("name", NAMES)
def test_refitted_scales_never_cost_more(name):
    weight, inputs = drawn(24, 512, seed=10), drawn(2048, 512, seed=11) @ (torch.eye(512) + 0.05 * drawn(512, 512))
    hessian = inputs.T @ inputs / len(inputs)
    coded = encode(weight, SPECS[name], "best", SERIAL)
    better = coded.grid.refit(coded.codes, hessian, (weight - coded.decode()) @ hessian, torch.float16)
    assert (row_loss(weight, better, hessian) <= row_loss(weight, coded, hessian) * (1 + 1e-5)).all()
    assert torch.equal(unpack(pack(better), SPECS[name]).decode(), better.decode())


@pytest.mark.parametrize("name", NAMES)
def test_ternary_codes_of_a_checkpoint_are_taken_over(name):
    levels = torch.randint(-1, 2, (4, 512), generator=torch.Generator().manual_seed(5))
    index = torch.arange(512) // 256
    grid = IntegerGrid(IntegerSpec(2, 256, symmetric=True), torch.full((4, 2), 0.25), torch.full((4, 2), 2.0), index)
    coded = Coded((levels + 2).to(torch.uint8), grid)
    taken = recode(coded, SPECS[name])
    assert torch.equal(unpack(pack(taken), SPECS[name]).decode(), 0.25 * levels)
    coded.codes[0, 0] = 0  # minus two
    assert recode(coded, SPECS[name]) is None
