"""The bias of δ, and how many sequences it needs."""

import numpy as np
import pytest
import torch
from torch import Tensor

from flashpoint.diagnosis.delta_bias import DeltaBias, DeltaSample
from flashpoint.diagnosis.measure_table import GRAD_DELTA


def of_sequences(count: int, spread: float) -> DeltaBias:
    one = torch.ones(4, dtype=torch.float64)
    error: Tensor = one * spread / count**0.5
    return DeltaBias(0 * one, error, 0 * one, one, torch.full((4,), count), torch.full((4,), count), 1, GRAD_DELTA)


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
    bias = DeltaBias.of_samples([DeltaSample((1, 1, 2, 3), ("",) * 4, measures)])
    assert bias is not None
    torch.testing.assert_close(bias.mean, torch.tensor([0.6, 0.5]).double())
    error = (3 / 2 * (0.16 + 0.36 + 0.04)) ** 0.5 / 10
    torch.testing.assert_close(bias.error, torch.tensor([error, torch.nan]).double(), equal_nan=True)
    torch.testing.assert_close(bias.noise[0], torch.tensor(((4 + 16 + 16) / 36) ** 0.5).double())
    assert (bias.counts.tolist(), bias.sequences, bias.steps) == ([3, 1], 3, 2)
    assert float(bias.smallest[0]) == pytest.approx(error * stats.t.ppf(1 - 0.001 / 2 / 2, 2))


def test_a_sequence_that_comes_again_is_averaged_and_counts_once() -> None:
    """In NumPy: the standard error of a ratio of sums over the means of each different sequence."""
    from scipy import stats

    words = list("abcadbae")
    generator = np.random.default_rng(0)
    sums, bounds = generator.normal(0.1, 1.0, (8, 3)), generator.uniform(1.0, 2.0, (8, 3))
    measures = dict(zip(("bias", "noise", "sum", "bound"), (sums / bounds, np.abs(sums), sums, bounds), strict=True))
    sample = {f"grad_delta_{part}": torch.from_numpy(of) for part, of in measures.items()}
    bias = DeltaBias.of_samples([DeltaSample((1,) * 4 + (2,) * 4, tuple(words), sample)])
    assert bias is not None
    of_each = [[at for at, one in enumerate(words) if one == word] for word in "abcde"]
    few, few_bounds = (np.stack([x[places].mean(0) for places in of_each]) for x in (sums, bounds))
    mean = few.sum(0) / few_bounds.sum(0)
    error = (5 / 4 * ((few - mean * few_bounds) ** 2).sum(0)) ** 0.5 / few_bounds.sum(0)
    np.testing.assert_allclose(bias.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(bias.error, error, rtol=1e-12)
    np.testing.assert_allclose(bias.nats, sums.sum(0), rtol=1e-12)
    np.testing.assert_allclose(bias.smallest, error * stats.t.ppf(1 - 0.001 / 3 / 2, 4), rtol=1e-9)
    assert (bias.counts.tolist(), bias.observed.tolist()) == ([5] * 3, [8] * 3)
    assert str(bias) == "8 sequences, 5 different, of 2 steps"


def test_sequences_that_nobody_knows_count_as_different() -> None:
    measures = {f"delta_{part}": torch.ones(4, 2).double() for part in ("bias", "noise", "sum", "bound")}
    bias = DeltaBias.of_samples([DeltaSample((1,) * 4, ("", "a", "", "a"), measures)])
    assert bias is not None
    assert str(bias) == "4 sequences, 3 different"


def test_as_many_repetitions_as_one_likes_of_two_sequences_are_no_bias() -> None:
    """The same two errors 200 times: by the plain standard error a hundred of them, by two sequences nothing."""
    sums = torch.tensor([[1.0], [1.1]]).double().repeat(200, 1) * 1e-5
    measures = {"grad_delta_bias": sums, "grad_delta_noise": sums, "grad_delta_sum": sums}
    measures["grad_delta_bound"] = torch.ones_like(sums)
    for words, found in ((("a", "b") * 200, False), (("",) * 400, True)):
        bias = DeltaBias.of_samples([DeltaSample((1,) * 400, words, measures)])
        assert bias is not None
        assert bool(bias.igniting.any()) == found
