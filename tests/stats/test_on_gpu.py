"""Statistics on a GPU, on tensors that have shapes and no values and say they are there: asking for a value raises."""

import pytest
import torch

from llmcompress.stats.drift import Drift
from llmcompress.stats.finite import only_finite
from llmcompress.stats.gram import Gram, add_products
from llmcompress.workers import SERIAL

GPU = torch.device("meta")


@pytest.fixture(autouse=True)
def _meta_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: self.device == GPU), raising=False)


def test_what_these_tests_go_by_raises_where_a_gpu_would_be_waited_for():
    with pytest.raises(RuntimeError, match="meta"):
        bool(torch.isfinite(torch.empty(4, device=GPU).sum()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_over_batches_never_wait_for_a_gpu(dtype):
    gram, drift = Gram(512, SERIAL, GPU), Drift(512, SERIAL, GPU)
    for _ in range(3):
        x = torch.empty(4, 100, 512, dtype=dtype, device=GPU)
        gram.update(x)
        drift.update(x, x)
    with pytest.raises(RuntimeError, match="meta"):
        _ = gram.tokens  # asked for when all batches are in


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_16_bits_are_added_up_in_float32_in_place(dtype, monkeypatch):
    rows, total, asked = torch.empty(64, 32, dtype=dtype, device=GPU), torch.empty(32, 32, device=GPU), []
    monkeypatch.setattr(torch, "addmm", lambda *args, **options: asked.append((args, options)))
    add_products(total, rows, rows)
    (((added, left, right), options),) = asked
    assert added is options["out"] is total
    assert options["out_dtype"] == torch.float32
    assert (left.shape, left.dtype, right.dtype) == ((32, 64), dtype, dtype)


def test_tokens_that_are_not_finite_count_for_nothing(monkeypatch):
    rows = torch.randn(6, 8)
    rows[1, 3], rows[4, 0] = torch.inf, torch.nan
    (kept,), lost = only_finite(rows)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)  # zeroed there, and dropped here
    (zeroed,), there = only_finite(rows)
    assert (kept.shape, zeroed.shape) == ((4, 8), (6, 8))
    assert lost == int(there) == 2
    torch.testing.assert_close(kept.T @ kept, zeroed.T @ zeroed)
