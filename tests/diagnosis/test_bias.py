"""The bias of δ, and how many sequences it needs."""

import pytest
import torch
from torch import Tensor

from flashpoint.diagnosis.bias import DeltaBias
from flashpoint.diagnosis.delta_sample import DeltaSample


def of_sequences(count: int, spread: float) -> DeltaBias:
    one = torch.ones(4, dtype=torch.float64)
    error: Tensor = one * spread / count**0.5
    return DeltaBias(0 * one, error, 0 * one, one, torch.full((4,), count), 1, "grad_delta")


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


def test_sequences_without_loss_neither_hide_a_bias_nor_count() -> None:
    """By hand: head 1 has errors 2, 3 and 1 of bounds 4, 4 and 2, so 6/10, and left over −0.4, 0.6 and −0.2."""
    from scipy import stats

    sums, bounds = torch.tensor([[2.0, 1.0], [3.0, 0.0], [1.0, 0.0], [0.0, 0.0]]).double(), torch.zeros(4, 2).double()
    bounds[:, 0], bounds[0, 1] = torch.tensor([4.0, 4.0, 2.0, 0.0]), 2.0
    noises = torch.tensor([[0.5], [1.0], [2.0], [0.0]]).double().expand(4, 2)
    measures = {"delta_bias": sums, "delta_noise": noises, "delta_sum": sums, "delta_bound": bounds}
    bias = DeltaBias.of_samples([DeltaSample((1, 1, 2, 3), measures)])
    assert bias is not None
    torch.testing.assert_close(bias.mean, torch.tensor([0.6, 0.5]).double())
    error = (3 / 2 * (0.16 + 0.36 + 0.04)) ** 0.5 / 10
    torch.testing.assert_close(bias.error, torch.tensor([error, torch.nan]).double(), equal_nan=True)
    torch.testing.assert_close(bias.noise[0], torch.tensor(((4 + 16 + 16) / 36) ** 0.5).double())
    assert (bias.counts.tolist(), bias.sequences, bias.steps) == ([3, 1], 3, 2)
    assert float(bias.smallest[0]) == pytest.approx(error * stats.t.ppf(1 - 0.001 / 2 / 2, 2))
