"""The bias of δ, and how many sequences it needs."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from flashpoint.diagnosis.delta_bias import DeltaBias, DeltaSample
from flashpoint.diagnosis.faults import Fault, faulty_attention
from flashpoint.diagnosis.measure_table import GRAD_DELTA
from flashpoint.diagnosis.measures import relative
from flashpoint.diagnosis.verdict import diagnose
from tests.diagnosis.calls import call_of, inputs

ROWS = 9
"""Of a sequence."""


def of_sequences(count: int, spread: float, of_rows: float = 0.0) -> DeltaBias:
    """Sequences with a spread, in 4 heads, and rows with one."""
    one, counts = torch.ones(4, dtype=torch.float64), torch.full((4,), count)
    errors: tuple[Tensor, Tensor] = one * spread / count**0.5, one * of_rows / (ROWS * count) ** 0.5
    sizes = ROWS * counts.double(), counts.double()
    return DeltaBias(0 * one, *errors, *sizes, 0 * one, one, counts, counts, 1, GRAD_DELTA)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 8, 264])
@pytest.mark.parametrize("spread", [2e-8, 1e-7, 1e-6, 3e-5])
@pytest.mark.parametrize("of_rows", [0.0, 3e-6, 4e-5])
def test_the_sequences_needed_are_the_fewest_that_would_show_the_size(
    count: int, spread: float, of_rows: float
) -> None:
    size = 1e-6
    needed = of_sequences(count, spread, of_rows).needed(size)
    assert float(of_sequences(needed, spread, of_rows).smallest.max()) <= size
    assert needed == 2 or float(of_sequences(needed - 1, spread, of_rows).smallest.max()) > size
    assert needed > count or float(of_sequences(count, spread, of_rows).smallest.max()) <= size


def test_a_spread_without_end_needs_more_than_any_training_has() -> None:
    assert of_sequences(8, 1e30).needed(1e-6) > 10**14


def test_sequences_without_loss_neither_hide_a_bias_nor_count() -> None:
    """By hand: head 1 has errors 2, 3 and 1 of bounds 4, 4 and 2, so 6/10, and left over −0.4, 0.6 and −0.2."""
    sums, bounds = torch.tensor([[2.0, 1.0], [3.0, 0.0], [1.0, 0.0], [0.0, 0.0]]).double(), torch.zeros(4, 2).double()
    bounds[:, 0], bounds[0, 1] = torch.tensor([4.0, 4.0, 2.0, 0.0]), 2.0
    noises = torch.tensor([[0.5], [1.0], [2.0], [0.0]]).double().expand(4, 2)
    measures = {"delta_bias": sums, "delta_noise": noises, "delta_sum": sums, "delta_bound": bounds}
    measures["delta_rows"] = torch.full_like(sums, torch.inf)  # so that rows say nothing
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
    words = list("abcadbae")
    generator = np.random.default_rng(0)
    sums, bounds = generator.normal(0.1, 1.0, (8, 3)), generator.uniform(1.0, 2.0, (8, 3))
    measures = {"bias": sums / bounds, "noise": np.abs(sums), "sum": sums, "bound": bounds, "rows": 0 * sums + np.inf}
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
    measures = {f"delta_{part}": torch.ones(4, 2).double() for part in ("bias", "noise", "sum", "bound", "rows")}
    bias = DeltaBias.of_samples([DeltaSample((1,) * 4, ("", "a", "", "a"), measures)])
    assert bias is not None
    assert str(bias) == "4 sequences, 3 different"


def test_as_many_repetitions_as_one_likes_of_two_sequences_are_no_bias() -> None:
    """The same two errors 200 times: by the plain standard error a hundred of them, by two sequences nothing."""
    sums = torch.tensor([[1.0], [1.1]]).double().repeat(200, 1) * 1e-5
    measures = {"grad_delta_bias": sums, "grad_delta_noise": sums, "grad_delta_sum": sums}
    measures["grad_delta_bound"] = measures["grad_delta_rows"] = torch.ones_like(sums)
    for words, found in ((("a", "b") * 200, False), (("",) * 400, True)):
        bias = DeltaBias.of_samples([DeltaSample((1,) * 400, words, measures)])
        assert bias is not None
        assert bool(bias.igniting.any()) == found


def judged(errors: np.ndarray, bounds: np.ndarray) -> DeltaBias:
    """The bias of errors of rows [S, H, T] of so many sequences."""
    found = [
        relative(GRAD_DELTA, torch.from_numpy(e), torch.from_numpy(b)) for e, b in zip(errors, bounds, strict=True)
    ]
    measures = {name: torch.stack([one[name] for one in found]) for name in found[0]}
    bias = DeltaBias.of_samples([DeltaSample((1,) * len(errors), ("",) * len(errors), measures)])
    assert bias is not None
    return bias


def alike_by_luck(bias: float) -> np.ndarray:
    """Errors of 3 sequences, 2 heads, 33 rows: independent normal ones of 1e-5, whose sums are all but equal. They are
    as far from 0 as two in three means of such rows are not, and by the bias farther."""
    errors = np.random.default_rng(0).normal(0.0, 1e-5, (3, 2, 33))
    wanted = bias + 1e-5 / 99**0.5 * np.array([1.0, 1.001, 0.999])[:, None]
    return errors - errors.mean(-1, keepdims=True) + wanted[..., None]


def test_what_rows_make_by_chance_is_no_bias_however_much_alike_sequences_are() -> None:
    """SciPy's test over sequences finds a bias, over rows none."""
    errors = alike_by_luck(bias=0.0)
    assert (stats.ttest_1samp(errors.sum(-1), 0.0, axis=0).pvalue < 0.001 / 2).all()
    assert (stats.ttest_1samp(np.concatenate(errors, -1), 0.0, axis=-1).pvalue > 0.1).all()
    bias = judged(errors, np.ones_like(errors))
    assert (bias.mean.abs() > 50 * bias.error).all()
    assert not bias.igniting.any()


def test_a_bias_of_three_sequences_is_found_that_rows_do_not_make_by_chance() -> None:
    errors = alike_by_luck(bias=5e-6)
    assert (stats.ttest_1samp(np.concatenate(errors, -1), 0.0, axis=-1).pvalue < 0.001 / 2).all()
    assert judged(errors, np.ones_like(errors)).igniting.all()


@pytest.mark.parametrize("together", [0.0, 1e-5])
def test_a_bias_shows_from_where_both_tests_are_sure(together: float) -> None:
    """By SciPy's standard errors of means and quantiles. Rows that err together leave it to sequences."""
    generator = np.random.default_rng(1)
    errors = (
        generator.normal(0.0, 1e-5, (12, 4, 33)) + generator.normal(0.0, together, (12, 4, 1))
        if together
        else (alike_by_luck(0.0))
    )
    sequences, heads, rows = errors.shape
    by_sequences = stats.sem(errors.mean(-1), axis=0) * stats.t.isf(0.001 / heads / 2, sequences - 1)
    by_rows = stats.sem(np.concatenate(errors, -1), axis=-1) * stats.t.isf(0.001 / heads / 2, sequences * rows - 1)
    assert (by_sequences > by_rows).all() == bool(together)
    np.testing.assert_allclose(judged(errors, np.ones_like(errors)).smallest, np.maximum(by_sequences, by_rows))


def test_the_error_of_rows_of_several_sizes_is_that_of_a_ratio_of_sums() -> None:
    """Against the spread of 20,000 such ratios, of which each has its own."""
    generator = np.random.default_rng(2)
    bounds = np.broadcast_to(generator.uniform(0.1, 2.0, (4, 1, 40)), (4, 20_000, 40))
    bias = judged(bounds * generator.normal(0.0, 1e-5, bounds.shape), np.ascontiguousarray(bounds))
    assert float(bias.row_error.square().mean().sqrt()) == pytest.approx(float(bias.mean.std()), rel=0.02)
    sizes = bounds[:, 0]
    np.testing.assert_allclose(bias.rows, sizes.sum() ** 2 / (sizes**2).sum())


def test_independent_rows_seem_biased_less_often_than_one_test_errs() -> None:
    """20,000 heads of 3 sequences. The one that both tests accuse has to be in the tail of either."""
    errors = np.random.default_rng(3).normal(0.0, 1e-5, (3, 20_000, 16))
    bias = judged(errors, np.ones_like(errors))
    at_one_percent = [bias.error * stats.t.isf(0.005, 2), bias.row_error * stats.t.isf(0.005, 47)]
    accused = [
        float((bias.mean.abs() > limit).double().mean()) for limit in (*at_one_percent, torch.maximum(*at_one_percent))
    ]
    assert accused[0] == pytest.approx(0.01, abs=0.003)
    assert accused[1] == pytest.approx(0.01, abs=0.003)
    assert accused[2] < 0.003


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [np.ones(8), np.r_[1.0, 1.0, np.full(6, 0.1)], np.linspace(0.05, 1.0, 8)])
def test_sequences_of_several_sizes_seem_biased_no_more_often_than_one_in_a_thousand(sizes: np.ndarray) -> None:
    """20,000 heads, 50 at a time, whose rows err alike in a sequence. Student's t with 7 degrees of freedom would find
    up to 30 times as many."""
    generator = np.random.default_rng(4)
    errors = np.repeat(sizes[:, None, None] * generator.normal(0.0, 1e-5, (8, 20_000, 1)), 4, -1)
    bounds = np.broadcast_to(sizes[:, None, None], errors.shape)
    parts = zip(np.split(errors, 400, 1), np.split(bounds, 400, 1), strict=True)
    found = [bias.mean.abs() > bias.smallest for bias in (judged(*part) for part in parts)]
    layers = [bool(heads.any()) for heads in found]
    assert sum(layers) <= 3  # of 400; more come in 1 of 1,000 tries
    biased = judged(errors[:, :50] + 0.02 * bounds[:, :50], bounds[:, :50])
    assert (biased.mean > biased.smallest).all()


def test_a_head_without_loss_is_not_the_one_with_the_fewest_sequences() -> None:
    q, k, v, grad_out = inputs(0)
    grad_out[:, 1] = 0.0
    bias = diagnose(call_of(faulty_attention(Fault("none")), [q, k, v, grad_out])).bias
    assert bias is not None
    assert bias.counts.tolist() == [6, 0, 6, 6]
    assert (bias.fewest, bias.sequences) == (6, 6)
