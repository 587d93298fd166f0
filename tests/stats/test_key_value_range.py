"""The range of keys and values, taken batch by batch, against that of all of them at once."""

from concurrent.futures import ThreadPoolExecutor

import torch

from llmcompress.stats.key_value_range import KeyValueRange


def test_batches_in_any_order_and_thread_give_the_maxima_of_all_tokens():
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(12, 2, 9, 8, generator=generator).bfloat16()
    values = -3 * torch.randn(12, 2, 9, 8, generator=generator).bfloat16()
    seen = KeyValueRange()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: seen.update(keys[n : n + 1], values[n : n + 1]), reversed(range(12))))
    assert seen.key is not None
    assert seen.value is not None
    for found, states in ((seen.key, keys), (seen.value, values)):
        wanted = [[states[:, head, :, channel].abs().max().item() for channel in range(8)] for head in range(2)]
        assert found.tolist() == wanted


def test_what_is_no_number_stays_visible():
    seen = KeyValueRange()
    one = torch.ones(1, 1, 2, 2)
    seen.update(one, one)
    seen.update(one * float("nan"), one)
    seen.update(one, one)
    assert seen.key is not None
    assert bool(seen.key.isnan().all())
