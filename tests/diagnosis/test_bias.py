"""How many sequences a bias of δ needs."""

import pytest
import torch
from torch import Tensor

from flashpoint.diagnosis.bias import DeltaBias


def of_sequences(count: int, spread: float) -> DeltaBias:
    one = torch.ones(4, dtype=torch.float64)
    error: Tensor = one * spread / count**0.5
    return DeltaBias(0 * one, error, 0 * one, one, count, 1)


@pytest.mark.parametrize("count", [2, 3, 8, 264])
@pytest.mark.parametrize("spread", [2e-8, 1e-7, 1e-6, 3e-5])
def test_the_sequences_needed_are_the_fewest_that_would_show_the_size(count: int, spread: float) -> None:
    size = 1e-6
    needed = of_sequences(count, spread).needed(size)
    assert float(of_sequences(needed, spread).smallest.max()) <= size
    assert needed == 2 or float(of_sequences(needed - 1, spread).smallest.max()) > size
    assert needed > count or float(of_sequences(count, spread).smallest.max()) <= size


def test_a_spread_without_end_needs_more_than_any_training_has() -> None:
    assert of_sequences(8, 1e30).needed(1e-6) > 10**14
