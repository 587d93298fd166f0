"""The compatible encoder writes the bytes that llama-quantize writes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from blockdata import awkward, gaussian, importance, student

from llmcompress.grids.blocks import BLOCK_TYPES
from llmcompress.grids.compat import encode
from llmcompress.packing.ggml import pack
from llmcompress.workers import SERIAL

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gguf_blocks.json").read_text())
ALL = pytest.mark.parametrize("spec", BLOCK_TYPES.values(), ids=BLOCK_TYPES)
BY_ROW = ("Q4_0", "Q4_1", "Q5_0", "Q5_1")  # an importance weighs them by the energy of the whole row


def golden_importance(width):
    period, divisor = (7, 4) if width == 256 else (11, 8)
    return torch.tensor([1 + (place % period) ** 2 / divisor for place in range(width)])


def row_of(name):
    return torch.frombuffer(bytearray.fromhex(GOLDEN["inputs"][name]), dtype=torch.float32).unsqueeze(0)


@ALL
@pytest.mark.parametrize("how", ["plain", "weighted"])
def test_bytes_are_those_of_llama_quantize(spec, how):
    rows = GOLDEN["rows"][spec.name]
    for name, text in rows.get(how, rows["plain"]).items():
        weight = row_of(name)
        coded = encode(weight, spec, SERIAL, golden_importance(weight.shape[1]) if how == "weighted" else None)
        assert bytes(pack(coded)[0].tolist()).hex() == text, name


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_simple_types_agree_with_the_gguf_package(name):
    quants = pytest.importorskip("gguf.quants")
    gguf = pytest.importorskip("gguf")
    for weight in (gaussian(8, 256), student(8, 256, 3)):
        expected = quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[name])
        assert np.array_equal(pack(encode(weight, BLOCK_TYPES[name], SERIAL)).numpy(), expected)


@ALL
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_do_not_depend_on_their_neighbours_nor_on_threads(spec, weighted):
    weight, weigh = student(600, 512, 3), importance(512) if weighted else None
    whole = pack(encode(weight, spec, SERIAL, weigh))
    with SERIAL.with_threads(2) as workers:
        assert torch.equal(pack(encode(weight, spec, workers, weigh)), whole)
    for row in (0, 255, 256, 599):
        assert torch.equal(pack(encode(weight[row : row + 1], spec, SERIAL, weigh))[0], whole[row])


@ALL
def test_blocks_do_not_depend_on_their_neighbours(spec):
    weight, weigh = gaussian(4, 512), importance(512)
    size, count = spec.block_size, spec.block_bytes
    for given in (None, weigh):
        if given is not None and spec.name in BY_ROW:
            continue
        whole = pack(encode(weight, spec, SERIAL, given))
        alone = pack(
            encode(weight[:, size : 2 * size], spec, SERIAL, None if given is None else given[size : 2 * size])
        )
        assert torch.equal(whole[:, count : 2 * count], alone)


@ALL
@pytest.mark.parametrize("weighted", [False, True])
def test_awkward_rows_stay_finite_and_close(spec, weighted):
    for name, row in awkward().items():
        if name in ("near the largest float", "subnormal floats"):
            continue  # llama-quantize has no answer to these
        coded = encode(row.view(1, -1), spec, SERIAL, importance(512) if weighted else None)
        values = coded.decode()
        assert torch.isfinite(values).all(), name
        if row.abs().max() < 1e3:
            assert (values - row).abs().max() <= 0.6 * row.abs().max() + 1e-5, name


def test_a_block_without_importance_decodes_to_zero_as_it_does_there():
    weigh = importance(512)
    weigh[:256] = 0
    for name in ("Q2_K", "Q4_K", "Q5_K"):
        values = encode(gaussian(4, 512), BLOCK_TYPES[name], SERIAL, weigh).decode()
        assert (values[:, :256] == 0).all()
        assert (values[:, 256:] != 0).any()
