"""The forward of heads of Medusa, against one written token by token in float64, and what config.json may say."""

import json

import pytest
import torch
from safetensors.torch import save_file

from llmcompress.errors import CheckpointError
from llmcompress.model.draft_heads.head_files import is_draft, read_draft
from llmcompress.model.draft_heads.medusa import MedusaShape

SHAPE = MedusaShape(8, 10, 20, (), 3, 2)
ROWS = 6


@pytest.fixture(scope="module")
def weights():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in SHAPE.matrices.items()}


@pytest.fixture(scope="module")
def states():
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))


def naive(weights, block, state):
    """x <- x + SiLU(W x) for each layer of a block (section 3.1), and the logits of the shared head."""
    x = state.double()
    for layer in range(SHAPE.layers):
        inner = weights[f"blocks.{block}.layers.{layer}.weight"].double() @ x
        x = x + inner / (1 + (-inner).exp())
    return weights["lm_head.weight"].double() @ x


def test_row_r_at_depth_d_is_block_d_on_the_state_d_rows_before(weights, states):
    head = SHAPE.head(weights)
    for depth, output in enumerate(head.unrolled(torch.zeros(ROWS, 8), states, SHAPE.most)):
        for row in range(depth, ROWS):
            wanted = naive(weights, depth, states[row - depth])
            torch.testing.assert_close(head.logits(output)[row].double(), wanted, rtol=1e-4, atol=1e-4)


def test_drafting_goes_from_block_to_block_on_the_last_state(weights, states):
    head = SHAPE.head(weights)
    drafting, embedded = head.drafting(), torch.zeros(ROWS, 8)
    for known in (2, 5):
        found = [drafting.read(embedded[:known], states[:known])]
        found += [drafting.read_own(embedded[0]) for _ in range(SHAPE.most - 1)]
        for block, output in enumerate(found):
            wanted = naive(weights, block, states[known - 1])
            torch.testing.assert_close(head.logits(output[None])[0].double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"original_lm_head": False}, "original_lm_head False is not known here"),
        ({"original_lm_head": None}, "original_lm_head False is not known here"),  # as one that does not say it
        ({"medusa_fc_bias": True}, "medusa_fc_bias True is not known here"),
        ({"logit_scale": 0.5}, "logit_scale 0.5 is not known here"),
        ({"num_heads": 0}, "blocks is 0"),
        ({"hidden_size": "wide"}, "hidden is 'wide'"),
        ({"truncated_vocab_size": 11}, "tensor lm_head.weight is [10, 8], config.json asks for [11, 8]"),
        ({"num_hidden_layers": 3}, "tensor blocks.0.layers.2.weight is missing"),
    ],
    ids=str,
)
def test_what_is_read_is_what_is_written_and_anything_else_is_refused(said, words, weights, tmp_path):
    save_file({**weights, "token_map": torch.arange(10)}, tmp_path / "model.safetensors")
    config = SHAPE.config("float32", 3, "target", [])
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert is_draft(tmp_path)
    assert read_draft(tmp_path)[0] == SHAPE
    config |= said
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )
    with pytest.raises(CheckpointError) as raised:
        read_draft(tmp_path)
    assert words in str(raised.value)
