"""How rows are cut for threads to share."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from llmcompress.solve.row_blocks import SERIAL_BLOCKS, SOLVED_ROWS


def blocks_of(rows, most=None):
    return SERIAL_BLOCKS.map(lambda part: part, SimpleNamespace(shape=torch.Size((rows, 8))), most)


@given(rows=st.integers(1, 40_000), most=st.sampled_from([40, 512, SOLVED_ROWS]))
def test_blocks_cover_the_rows_in_order_and_none_is_too_large(rows, most):
    blocks = blocks_of(rows, most)
    assert [row for part in blocks for row in range(rows)[part]] == list(range(rows))
    assert all(part.stop - part.start <= most for part in blocks)


def test_two_threads_have_as_much_to_do():
    assert [part.start for part in blocks_of(1536)] == [0]
    assert [part.start for part in blocks_of(2048)] == [0, 1024]
    assert [part.start for part in blocks_of(4096)] == [0, 1024, 2048, 3072]
