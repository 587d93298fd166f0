"""Losses by type of tensors on which no information is gathered: those of the others, for each of their weights."""

import pytest
import torch

from llmcompress.engine.budget.type_losses import candidates, measured_losses
from llmcompress.formats.gguf.tensors import GGUFTensor
from llmcompress.stats.fisher import Fisher
from llmcompress.workers import SERIAL

TOKENS, WIDTH = 64, 256
KNOWN = {
    "token_embd.weight": (TOKENS, WIDTH),
    "blk.0.attn_q.weight": (WIDTH, WIDTH),
    "blk.0.ffn_up.weight": (2 * WIDTH, WIDTH),
}
TABLE, MATRIX, NARROW = "per_layer_token_embd.weight", "output_hc_up.weight", "output_hc_down.weight"
UNKNOWN = {TABLE: (TOKENS, 2 * WIDTH), MATRIX: (8, WIDTH), NARROW: (WIDTH, 32)}


@pytest.fixture(scope="module")
def losses():
    generator = torch.Generator().manual_seed(0)
    shapes = KNOWN | UNKNOWN
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    known = {
        name: [[Fisher(torch.rand(shape[0], generator=generator).double(), torch.ones(shape[1]).double())]]
        for name, shape in KNOWN.items()
    }
    tensors = [GGUFTensor(name, shape, (name,)) for name, shape in shapes.items()]
    return measured_losses(tensors, known | dict.fromkeys(UNKNOWN, ()), values.__getitem__, False, SERIAL)


def test_a_table_of_tokens_loses_as_much_for_each_weight_as_the_embedding(losses):
    assert losses[TABLE] == pytest.approx({kind: 2 * loss for kind, loss in losses["token_embd.weight"].items()})


def test_another_matrix_loses_as_much_for_each_weight_as_all_that_were_measured(losses):
    weights = (TOKENS + 3 * WIDTH) * WIDTH
    for kind, loss in losses[MATRIX].items():
        assert loss == pytest.approx(sum(losses[name][kind] for name in KNOWN) * 8 * WIDTH / weights)


def test_types_that_no_other_has_lose_what_the_nearest_in_size_does(losses):
    assert losses[NARROW].keys() == set(candidates(32, False))
    assert losses[NARROW]["Q4_0"] == losses[NARROW]["IQ4_NL"] > losses[NARROW]["Q8_0"] > losses[NARROW]["F16"] > 0
    assert losses[NARROW]["Q4_0"] == pytest.approx(losses[MATRIX]["Q4_K"] * 4)
