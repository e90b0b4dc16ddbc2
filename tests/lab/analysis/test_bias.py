"""The error of δ in nats and in the unit of injected errors."""

import numpy as np

from flashpoint.lab.analysis.bias import Relative, Sums


def test_an_exact_head_tells_no_sensitivity() -> None:
    """Two heads, two steps of four tokens: a head whose rows all attend to one key has no error, and so no ratio."""
    sums = Sums(np.array([[[0.0, 0.0], [2.0, 0.0]]]), np.array([[[1.0, 1.0], [1.0, 0.0]]]), tokens=4, all_tokens=8)
    noises = np.array([[[0.5, 0.5], [1.0, 0.0]]])
    told = Relative(np.zeros_like(noises), noises)
    # Mean squares of a token: 3/4 + 0, 3/4 + 0 and 3/4 + (2/4)² = 1; over noise² 3, 3 and 1: 8 √(7/3).
    assert np.isclose(sums.sensitivity(told, 1), 8 * (7 / 3) ** 0.5)
    assert np.isnan(sums.sensitivity(Relative(noises, np.zeros_like(noises)), 1))
