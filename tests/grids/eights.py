"""What holds of all types of GGUF that are rounded by eights, for their tests."""

import json
from pathlib import Path

import torch

from llmcompress.grids.encoders import encode
from llmcompress.packing.ggml import pack, unpack
from llmcompress.solve.refine import row_loss
from llmcompress.workers import SERIAL

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gguf_blocks.json").read_text())


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_channels(size, seed=1):
    """A Gram matrix of inputs that go together."""
    x = drawn(4 * size, size, seed=seed) @ (torch.eye(size) + 0.5 * drawn(size, size, seed=seed + 1) / size**0.5)
    return x.T @ x / len(x)


def compat_bytes_are_those_of_llama_quantize(spec):
    for kind, rows in GOLDEN["rows"][spec.name].items():
        for key, text in rows.items():
            weight = torch.frombuffer(bytearray.fromhex(GOLDEN["inputs"][key]), dtype=torch.float32).unsqueeze(0)
            width = weight.shape[1]
            period, divisor = (7, 4) if width == 256 else (11, 8)
            importance = torch.tensor([1 + (place % period) ** 2 / divisor for place in range(width)])
            coded = encode(weight, spec, "compat", SERIAL, importance if kind == "weighted" else None)
            assert bytes(pack(coded)[0].tolist()).hex() == text, (kind, key)
            assert coded.grid.numbers(coded.codes)


def compat_rows_stand_alone(spec):
    """Of their neighbours, and of threads."""
    weight, importance = 0.1 * drawn(300, 512, seed=13), drawn(512, seed=14).exp()
    weight[7, :256], weight[8, 256:300], weight[9] = 0, 0, 1e-9 * weight[9]
    whole = pack(encode(weight, spec, "compat", SERIAL, importance))
    with SERIAL.with_threads(2) as workers:
        assert torch.equal(pack(encode(weight, spec, "compat", workers, importance)), whole)
    for row in (0, 7, 8, 9, 299):
        assert torch.equal(pack(encode(weight[row : row + 1], spec, "compat", SERIAL, importance))[0], whole[row])


def importance_moves_errors(spec, share):
    """To where they cost less, which then is at most `share` of what it was."""
    weight, importance = drawn(16, 512, seed=8), drawn(512, seed=9).exp()
    plain, weighed = (encode(weight, spec, "best", SERIAL, item) for item in (torch.ones(512), importance))
    cost = [float(((coded.decode() - weight).square() * importance).sum()) for coded in (plain, weighed)]
    assert cost[1] < share * cost[0]


def zeros_and_extremes_become_points(spec):
    weight = torch.zeros(3, 512)
    weight[1, :256], weight[2] = 1e4, 1e-6 * drawn(512)
    coded = encode(weight, spec, "best", SERIAL)
    assert torch.isfinite(coded.decode()).all()
    assert coded.grid.numbers(coded.codes)
    assert torch.equal(coded.decode()[0], torch.zeros(512))
    assert torch.equal(unpack(pack(coded), spec).decode(), coded.decode())


def groups_of_zeros_cost_their_block_nothing(spec, search):
    """Beside groups of other weights, which keep their scales."""
    weight = 0.02 * drawn(4, 512, seed=12)
    alone = encode(weight, spec, search, SERIAL).decode()
    weight[:, :32] = 0
    beside = encode(weight, spec, search, SERIAL).decode()
    for found in (alone, beside):
        error = (found - weight)[:, 32:256].square().sum() / weight[:, 32:256].square().sum()
        assert error < 0.3


def refitted(spec):
    """A matrix whose scales were fitted anew on a Gram matrix: they stay odd, and no row costs more."""
    weight, hessian = drawn(24, 512, seed=10), of_channels(512, seed=11)
    coded = encode(weight, spec, "best", SERIAL, torch.ones(512))
    better = coded.grid.refit(coded.codes, hessian, (weight - coded.decode()) @ hessian, torch.float16)
    assert (better.grid.multiples % 2 == 1).all()
    assert (row_loss(weight, better, hessian) <= row_loss(weight, coded, hessian) * (1 + 1e-5)).all()
    assert row_loss(weight, better, hessian).sum() < 0.995 * row_loss(weight, coded, hessian).sum()
    return better
