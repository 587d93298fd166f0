"""Switches of the process for products of float32 are as asked for within, and as they were after."""

import pytest
import torch

from llmcompress.hardware import exact_float32, quick_type, rounded_float32, rounds_float32

BACKEND = torch.backends.mkldnn.matmul


@pytest.fixture(params=["ieee", "bf16"])
def before(request):
    """What the process had asked for."""
    found = BACKEND.fp32_precision
    BACKEND.fp32_precision = request.param
    yield request.param
    BACKEND.fp32_precision = found
    torch.get_float32_matmul_precision()  # raises where the new and the old setting disagree


@pytest.mark.parametrize(("within", "wanted"), [(exact_float32, "ieee"), (rounded_float32, "bf16")])
def test_the_precision_of_products_is_put_back(within, wanted, before):
    def failing():
        assert BACKEND.fp32_precision == wanted
        raise KeyError

    with pytest.raises(KeyError), within():
        failing()
    assert BACKEND.fp32_precision == before


def test_exact_products_are_those_of_float64_whatever_was_asked_for(before):
    left, right = (torch.randn(256, 256, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    with exact_float32():
        found = left @ right
    assert torch.allclose(found.double(), left.double() @ right.double(), atol=1e-4)


@pytest.mark.parametrize("within", [exact_float32, rounded_float32])
def test_torch_without_the_switch_is_served(within, monkeypatch):
    monkeypatch.delattr(type(torch.backends.mkldnn), "matmul")
    with within():
        assert float(torch.ones(2) @ torch.ones(2)) == 2


def test_where_products_are_worth_rounding(monkeypatch):
    processor = torch.device("cpu")
    assert not rounds_float32(torch.device("cuda"))
    assert rounds_float32(processor) == (quick_type(processor) == torch.bfloat16)
    monkeypatch.delattr(type(torch.backends.mkldnn), "matmul")
    assert not rounds_float32(processor)


@pytest.mark.skipif(not rounds_float32(torch.device("cpu")), reason="needs a processor with bfloat16 instructions")
def test_rounded_products_are_those_of_inputs_in_bfloat16():
    left, right = (torch.randn(256, 256, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    with rounded_float32():
        found = left @ right
    wanted = left.bfloat16().double() @ right.bfloat16().double()
    assert torch.allclose(found.double(), wanted, atol=1e-3)
    assert not torch.allclose(found.double(), left.double() @ right.double(), atol=1e-3)
