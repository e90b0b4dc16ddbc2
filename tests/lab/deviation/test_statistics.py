"""Sizes of a difference, by hand, and the inputs they are taken on."""

import numpy as np
import pytest
import torch
from torch import Tensor

from flashpoint.lab.deviation.drawn_inputs import DRAWN, drawn
from flashpoint.lab.deviation.formats import BF16
from flashpoint.lab.deviation.statistics import deviation, largest_and_rms

DIFFERENCE = torch.tensor([[1.0, -3.0], [0.0, 4.0]], dtype=torch.float64)
GOLDEN = torch.tensor([[3.0, 4.0], [300.0, 0.0]], dtype=torch.float64)


def test_absolute_sizes_are_of_all_elements_and_signed_means_of_inputs() -> None:
    told = deviation(DIFFERENCE, GOLDEN, BF16, "absolute")
    assert (told.largest, told.mean, told.rms, told.quantiles[0]) == (4, 2, np.sqrt(6.5), 2)
    assert told.deviation == pytest.approx(np.sqrt(6.5 - 4))
    assert told.signed_means.tolist() == [-1, 2]
    assert [values.tolist() for values in largest_and_rms(DIFFERENCE)] == [[3, 4], [np.sqrt(5), np.sqrt(8)]]


def test_relative_is_to_the_root_mean_square_of_the_input() -> None:
    told = deviation(DIFFERENCE, GOLDEN, BF16, "relative")
    assert told.largest == 3 / np.sqrt(12.5)
    assert told.signed_means == pytest.approx([-1 / np.sqrt(12.5), 2 / np.sqrt(45000)])


def test_ulps_are_those_of_the_golden_element_or_of_the_root_mean_square_if_that_is_larger() -> None:
    """Root mean squares: 3.5 and 212. BF16 has an ulp of 2⁻⁶ at 3 and 3.5, 2⁻⁵ at 4, 1 at 212 and 2 at 300."""
    told = deviation(DIFFERENCE, GOLDEN, BF16, "ulps")
    assert told.largest == 3 * 2**5
    assert told.signed_means.tolist() == [(1 * 2**6 - 3 * 2**5) / 2, 4 / 2]


def test_elements_that_are_not_finite_are_counted_apart() -> None:
    difference = torch.tensor([[1.0, np.nan], [np.inf, np.nan]], dtype=torch.float64)
    told = deviation(difference, GOLDEN, BF16, "absolute")
    assert (told.largest, told.rms, told.not_finite) == (1, 1, 3)
    np.testing.assert_array_equal(told.signed_means, [1, np.nan])
    nothing = deviation(difference[1:], GOLDEN[1:], BF16, "absolute")
    assert np.isnan(nothing.rms)
    assert nothing.not_finite == 2


def test_what_equals_a_golden_value_of_zero_deviates_by_nothing() -> None:
    difference = torch.tensor([[0.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    told = deviation(difference, torch.zeros_like(difference), BF16, "relative")
    assert (told.largest, told.rms, told.not_finite) == (0, 0, 1)
    assert told.signed_means.tolist() == [0, 0]


@pytest.mark.parametrize("kind", DRAWN)
def test_a_seed_has_its_own_inputs_whatever_the_others(kind: str) -> None:
    few, many = drawn(kind, 2, 9, 4), drawn(kind, 3, 9, 4)
    assert few.q.shape == few.grad_out.shape == (2, 1, 9, 4)
    assert torch.equal(few.k, many.k[:2])
    assert not torch.equal(many.k[1], many.k[2])


def test_the_first_key_is_a_sink_and_keys_are_tied() -> None:
    def scores(kind: str) -> Tensor:
        inputs = drawn(kind, 4, 101, 64)
        return inputs.q @ inputs.k.mT / 8

    sink = scores("sink")
    assert sink[..., 0].mean().item() == pytest.approx(8, abs=0.5)
    assert sink[..., 1:].mean().abs() < 0.1
    tied = scores("tied")
    assert torch.equal(tied[..., 0:100:2], tied[..., 1:100:2])
    assert scores("normal").std().item() == pytest.approx(1, abs=0.05)
