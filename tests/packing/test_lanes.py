"""Four codes at once in 32-bit arithmetic, as a kernel decodes them, against the definition one by one."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcompress.packing.lanes import pack_lanes, unpack_lanes

CODES = st.lists(st.integers(0, 15), min_size=8, max_size=8)


def added_by_bytes(left, right):
    """Sums of the four bytes of two words, each modulo 256."""
    return (left.view(np.uint8) + right.view(np.uint8)).view("<u4")


@settings(max_examples=200, deadline=None)
@given(CODES, st.integers(1, 16), st.integers(0, 15))
def test_multiplying_a_word_before_subtracting_decodes_four_codes_at_once(codes, multiple, zero):
    words = pack_lanes(torch.tensor([codes], dtype=torch.uint8)).numpy().view("<u4")[0]
    offset = np.array([(-zero * multiple & 0xFF) * 0x01010101], "<u4")
    halves = []
    for shift in (0, 4):
        four = (words >> np.uint32(shift)) & np.uint32(0x0F0F0F0F)
        product = four * np.uint32(multiple)
        assert int(product[0]) == int(four[0]) * multiple  # no carry leaves the word
        halves.append(added_by_bytes(product.astype("<u4"), offset).view(np.int8))
    wanted = [(code - zero) * multiple for code in codes]
    found = np.concatenate(halves).astype(int).tolist()
    assert [have for have, want in zip(found, wanted, strict=True) if -128 <= want <= 127] == [
        want for want in wanted if -128 <= want <= 127
    ]


def test_values_come_back_and_lie_where_they_should():
    values = torch.randint(0, 16, (3, 24), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    words = pack_lanes(values)
    assert (words.dtype, tuple(words.shape)) == (torch.int32, (3, 3))
    assert torch.equal(unpack_lanes(words), values)
    assert pack_lanes(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])).view(torch.uint8).tolist() == [[0x51, 0x62, 0x73, 0x84]]
