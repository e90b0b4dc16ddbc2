"""The paper's example of the biased sum, to the bit (arXiv 2510.04212, §3.3.2)."""

import numpy as np
import torch

from flashpoint.numerics.choices import NEAREST
from flashpoint.numerics.reference import flash_fwd
from flashpoint.numerics.rounding import round_mantissa
from flashpoint.numerics.variant import AttentionVariant
from tests.numerics.oracle import NOTHING_ROUNDED, noise_key

FIRST, SECOND = -2.40625, -2.296875  # both exact in BF16
EXACT = -4.703990459442139  # the paper's sum in FP32, with what other tokens add
RESIDUAL = EXACT - (FIRST + SECOND)


def pattern(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def test_the_two_values_are_bf16_and_their_sum_is_not() -> None:
    assert pattern(FIRST) == 0xC01A0000
    assert pattern(SECOND) == 0xC0130000
    # The sum lies exactly halfway between two BF16 values: the tie that a residual decides.
    assert FIRST + SECOND == -4.703125
    assert pattern(-4.703125) == 0xC0968000


def test_a_residual_of_the_same_sign_rounds_the_sum_away_from_zero() -> None:
    assert pattern(EXACT) == 0b1_10000001_0010110_1_000011100010111  # sign, exponent, BF16's fraction, what it lacks
    assert round(RESIDUAL, 5) == -0.00087
    rounded = round_mantissa(torch.tensor([EXACT]), NEAREST).item()
    assert pattern(rounded) == 0b1_10000001_0010111_0_000000000000000
    assert rounded == -4.71875
    assert rounded - float(np.float32(EXACT)) == -0.014759540557861328


def test_without_the_residual_the_tie_goes_to_even() -> None:
    assert round_mantissa(torch.tensor([-4.703125]), NEAREST).item() == -4.6875
    assert pattern(-4.6875) == 0xC0960000


def test_attention_makes_the_error_out_of_two_probabilities_of_one() -> None:
    """Two keys tie at the maximum; a third, 2⁻¹⁰ as likely, adds the residual; Ō rounds once at the end."""
    below = -10 * np.log(2.0)
    q, k, v = (torch.zeros(1, 1, 3, 16) for _ in range(3))
    q[..., 0] = 4.0  # α = 1/4, so a score is the key's first feature
    k[0, 0, :, 0] = torch.tensor([below, 0.0, 0.0])
    v[0, 0, :, 0] = torch.tensor([RESIDUAL * 1024, FIRST, SECOND])
    rounded = AttentionVariant(**NOTHING_ROUNDED, out_unnormalized=NEAREST)
    unrounded = AttentionVariant(**NOTHING_ROUNDED)
    outs = [flash_fwd(q, k, v, variant, noise_key(q))[0][0, 0, 2, 0].item() for variant in (rounded, unrounded)]
    normalizer = np.float32(2 + 2.0**-10)
    assert pattern(outs[0]) == pattern(np.float32(-4.71875) / normalizer)
    error = (outs[0] - outs[1]) * float(normalizer)
    assert abs(error - (-0.01476)) < 1e-5
