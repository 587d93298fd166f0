"""Memory that kernels share stays where CUDA graphs saw it."""

import weakref

import torch

from llmcompress.kernels.workspace import Workspace


def test_memory_stays_in_place_until_more_is_asked_for_and_outlives_that():
    workspace = Workspace(torch.device("cpu"))
    for ask in (workspace.counters, workspace.partial):
        first = ask(8)
        address, alive = first.data_ptr(), weakref.ref(first)
        assert ask(4).data_ptr() == address
        del first
        assert ask(1 << 20).data_ptr() != address
        assert alive() is not None
        assert ask(8).numel() == 1 << 20


def test_counters_are_zeros_after_growing():
    workspace = Workspace(torch.device("cpu"))
    workspace.counters(3)
    assert torch.equal(workspace.counters(100), torch.zeros(100, dtype=torch.int32))
