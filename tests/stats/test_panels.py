"""Panels of sums, added up by several parts and put together: every number is what one part would have."""

import pytest
import torch

from llmcompress.stats.drift import Drift
from llmcompress.stats.gram import Gram
from llmcompress.stats.panels import owners
from llmcompress.workers import SERIAL, Part


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [7, 500])
def test_every_panel_belongs_to_one_part_and_has_the_sum_of_all_tokens(parts, dtype, size):
    generator = torch.Generator().manual_seed(size)
    batches = [torch.randn(40, size, generator=generator).to(dtype) for _ in range(3)]
    alone, drift = Gram(size, SERIAL), Drift(size, SERIAL)
    every = [Part(number, parts) for number in range(parts)]
    shared = [(Gram(size, SERIAL, part=part), Drift(size, SERIAL, part=part)) for part in every]
    for batch in batches:
        for gram, moved in ((alone, drift), *shared):
            gram.update(batch)
            moved.update(batch * 1.25, batch)
    for whole, theirs in ((alone, [gram for gram, _ in shared]), (drift, [moved for _, moved in shared])):
        total = sum(item.sum for item in theirs)  # zero where another part adds up
        assert torch.equal(total, whole.sum)
        covered = sum(view.numel() for number in range(parts) for view in theirs[0].views(number))
        assert covered == sum(view.numel() for view in whole.views(0))
        assert [item.tokens for item in theirs] == [whole.tokens] * parts


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 20])
def test_no_part_has_much_more_to_do_than_another(parts):
    costs = list(range(8, 0, -1))
    load = [0] * parts
    for cost, owner in zip(costs, owners(costs, parts), strict=True):
        load[owner] += cost
    assert sum(load) == sum(costs)
    assert max(load) <= max(max(costs), 4 / 3 * sum(costs) / parts)  # the bound of longest first (Graham, 1969)
