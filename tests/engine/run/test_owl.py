"""How sparse each layer becomes: means and bounds by numbers written here."""

import numpy as np
import pytest

from llmcompress.engine.run.owl import layer_sparsities

CASES = [  # shares of outliers, weights, sparsity, span, the most
    ([0.1, 0.2, 0.3], [1, 1, 1], 0.5, 0.08, 0.99),
    ([0.1, 0.2, 0.25], [3, 1, 2], 0.7, 0.2, 0.99),
    ([0.1, 0.2], [1, 1], 0.97, 0.08, 0.996),
    ([0.1, 0.2], [1, 1], 0.03, 0.08, 0.996),
    ([0.0, 0.01, 0.011], [0, 1, 1], 0.5, 0.08, 0.99),
]


@pytest.mark.parametrize(("outliers", "weights", "sparsity", "span", "most"), CASES)
def test_the_mean_is_what_was_asked_for_and_no_layer_leaves_its_bounds(outliers, weights, sparsity, span, most):
    found = np.array(layer_sparsities(outliers, weights, sparsity, span, most))
    assert np.average(found, weights=weights) == pytest.approx(sparsity, abs=1e-12)
    assert found.min() >= 0
    assert found.max() <= most + 1e-12
    counted = found[np.array(weights) > 0]
    assert (np.diff(counted) < 0).all()  # the shares of outliers grow
    assert np.ptp(counted) <= 2 * span + 1e-12
    assert np.isclose(np.ptp(counted), 2 * span) or found.max() > most - 1e-9 or found.min() < 1e-9


def test_layers_that_differ_in_nothing_are_alike():
    assert layer_sparsities([0.2, 0.2], [1, 3], 0.6, 0.08, 0.99) == [0.6, 0.6]
    assert layer_sparsities([0.0, 0.0], [0, 0], 0.6, 0.08, 0.99) == [0.6, 0.6]
