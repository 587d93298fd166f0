"""Functions that TorchScript runs: what they give and what they raise."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.jit.frontend import NotSupportedError

from llmcompress.scripted import scripted


def halved(value: Tensor, times: int, shift: Tensor | None) -> Tensor:
    """Halve a value a number of times, shifted first where a shift is given."""
    if shift is not None:
        value = value + shift
    for _ in range(times):
        value = value / 2
    return value


@pytest.mark.parametrize("shift", [None, torch.ones(3)])
def test_it_gives_what_the_function_gives(shift):
    value = torch.arange(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that torch.jit is deprecated is not the caller's concern
        found = scripted(halved)(value, 3, shift)
    assert torch.equal(found, halved(value, 3, shift))
    assert scripted(halved).__doc__ == halved.__doc__


def test_what_goes_wrong_inside_is_raised():
    with pytest.raises(RuntimeError, match="size of tensor"):
        scripted(halved)(torch.ones(2), 1, torch.ones(3))


def test_on_another_device_the_function_itself_runs():
    """What TorchScript fuses there leaves out conversions to 16 bits and back."""

    def told(value, *others):  # TorchScript takes no such arguments
        return value.device.type, others

    assert scripted(told)(torch.ones(2, device="meta"), 1, 2.0) == ("meta", (1, 2.0))
    with pytest.raises(NotSupportedError):
        scripted(told)(torch.ones(2), 1, 2.0)


def test_threads_that_call_first_at_once_get_the_same():
    made = scripted(halved)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: made(torch.ones(4), 2, None), range(16)))
    assert all(torch.equal(one, torch.full((4,), 0.25)) for one in found)
