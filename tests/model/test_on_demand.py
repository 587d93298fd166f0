"""Embeddings whose rows are read when they are looked up, against the table itself."""

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from llmcompress.model.on_demand import LookedUpRows
from llmcompress.model.whole import whole_model
from llmcompress.store.checkpoint import Checkpoint, StoredRows
from streaming import ids, reference_logits, streamed

TABLE = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


@pytest.fixture
def asked():
    """Numbers of rows that were read so far."""
    return []


@pytest.fixture
def looked_up(tmp_path, asked):
    """The table in a file."""
    save_file({"other": torch.zeros(3), "table": TABLE}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    rows = Checkpoint(tmp_path).rows("table")

    def read(numbers):
        asked.extend(numbers)
        return rows.read(numbers)

    return LookedUpRows.of(StoredRows(rows.shape, read), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("tokens", [[[3, 4, 5, 49], [0, 3, 3, 4]], [[7]], [[0, 49]]], ids=str)
def test_a_lookup_gives_the_rows_of_the_table_and_reads_no_others(looked_up, asked, tokens):
    module = torch.nn.Embedding(50, 6, padding_idx=0, device="meta")
    module._parameters["weight"] = looked_up
    assert torch.equal(module(torch.tensor(tokens)), TABLE[torch.tensor(tokens)].float())
    assert asked == sorted({number for row in tokens for number in row})


@pytest.mark.parametrize("token", [-1, 50])
def test_no_row_beyond_the_table_is_read_from_its_neighbours(looked_up, token):
    with pytest.raises(IndexError, match=f"table has 50 rows, row {token} was asked for"):
        functional.embedding(torch.tensor([[3, token]]), looked_up)


def test_the_table_is_told_without_being_read(looked_up, asked):
    assert looked_up.shape == (50, 6)
    assert (looked_up.dtype, looked_up.device.type, looked_up.is_meta) == (torch.float32, "cpu", False)
    assert (looked_up.size(0), looked_up.dim(), looked_up.numel()) == (50, 2, 300)
    assert not asked


@pytest.mark.parametrize(
    "use",
    [
        lambda table: functional.linear(torch.ones(2, 6), table),
        lambda table: table[3:9],
        lambda table: table * 2,
        lambda table: table.T,
        lambda table: table.data,
        lambda table: functional.embedding(torch.tensor([1, 2]), table.clone(), max_norm=0.5),
        lambda table: torch.cat([table, table]),
    ],
    ids=["linear", "slice", "product", "transposed", "data", "renormalised", "joined"],
)
def test_any_other_use_sees_the_whole_table(looked_up, use):
    assert torch.equal(use(looked_up), use(TABLE.float()))
    assert type(use(looked_up)) is torch.Tensor


@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_model_holds_its_table_and_one_that_is_streamed_does_not(random_model_dir, tied):
    path = random_model_dir("llama", tie_word_embeddings=tied)
    model = streamed(path)
    with model.outer(embed=True, head=False):
        assert isinstance(model.causal.get_input_embeddings().weight, LookedUpRows)
    whole = whole_model(streamed(path, dtype=torch.bfloat16)).float()
    with torch.no_grad():
        assert torch.equal(whole(ids()).logits, reference_logits(path, ids()))
