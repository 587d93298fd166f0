"""Forwards that a hook ends early."""

import gc
import weakref

import pytest
import torch

from llmcompress.engine.run.current_batch import stop_forward, until_stopped


@pytest.fixture
def no_collector():
    """Python does not look for circles meanwhile."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_what_a_stopped_layer_held_is_freed_at_once():
    held = []

    def hook():
        stop_forward()

    def layer():
        activations = torch.ones(4)
        held.append(weakref.ref(activations))
        hook()
        raise AssertionError(f"{activations} is computed with")

    def one_batch():
        with until_stopped():
            layer()

    one_batch()
    assert held[0]() is None


def test_other_exceptions_are_raised():
    with pytest.raises(ValueError, match="another"), until_stopped():
        raise ValueError("another")
