"""The theoretical density in cases that can be computed by hand."""

import numpy as np
import pytest

from scenarios.bench.sparsity import _fit, _theory, spread


def test_spread() -> None:
    assert spread(1) == 1
    assert spread(2) == pytest.approx((2 + 2 * 0.9) ** 0.5)
    assert spread(100, momentum=0) == pytest.approx(10)  # independent steps: a random walk
    assert spread(10, momentum=1) == pytest.approx(10)  # all steps in the same direction


def test_small_updates_cross_in_proportion() -> None:
    """Mean |n| is sqrt(2 / pi). Far below one unit, the share that crosses is size * sqrt(2 / pi) / unit."""
    units, shares = np.array([1.0, 2.0]), np.array([0.5, 0.5])
    assert _theory(units, shares, 1e-4) == pytest.approx(1e-4 * (2 / np.pi) ** 0.5 * 0.75, rel=1e-3)
    assert _theory(units, shares, 1e6) == pytest.approx(1, abs=1e-3)


def test_the_fit_is_the_inverse() -> None:
    units, shares = np.array([1.0, 2.0, 8.0]), np.array([0.2, 0.3, 0.5])
    assert _fit(units, shares, _theory(units, shares, 0.03)) == pytest.approx(0.03, rel=1e-6)
