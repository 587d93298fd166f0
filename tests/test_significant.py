"""Figures of reports are plain numbers of few digits."""

import math

import numpy as np
import pytest
import torch

from llmcompress.significant import significant


@pytest.mark.parametrize("value", [123456.7, np.float32(123456.7), torch.tensor(123456.7)])
def test_figures_are_plain_numbers_of_six_digits(value):
    assert type(significant(value)) is float
    assert significant(value) == 123457.0


def test_so_many_digits_stay():
    assert significant(-0.00123456, 2) == -0.0012
    assert significant(0) == 0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(value):
    assert str(significant(value)) == str(value)
