"""What tests of kernels share."""

import pytest
import torch


@pytest.fixture
def poisoned_memory():
    """torch.empty gives NaN and the largest whole numbers: what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
