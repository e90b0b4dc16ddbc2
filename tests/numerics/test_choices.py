"""A rounding as one value: what it refuses, and how records that are older than it read."""

from typing import Any

import pytest

from flashpoint.numerics.choices import NEAREST, UNROUNDED, Rounding
from flashpoint.numerics.effective import effective_choices
from flashpoint.numerics.variant import ROUNDING_POINTS, AttentionVariant
from flashpoint_kernels.codes import BLOCK_UNIT, STREAM_UNIT, Stream


# The attention of runs/reference/laptop/flash_bf16_seed-0, as it was written then.
def test_the_defaults_are_flash_attention_2s() -> None:
    variant = AttentionVariant()
    assert (variant.scores, variant.out_unnormalized) == (UNROUNDED, UNROUNDED)
    assert (variant.probs, variant.out, variant.grad_scores) == (NEAREST, NEAREST, NEAREST)


@pytest.mark.parametrize(
    ("mode", "bits", "fits"), [("nearest", 7, True), ("stochastic", 1, True), ("nearest", 8, False), ("none", 7, False)]
)
def test_up_to_seven_bits_fit_bf16(mode: Any, bits: int, fits: bool) -> None:
    assert Rounding(mode, bits).fits_bf16 == fits


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"scores": {"mode": "fp8"}}, "attn.scores.mode=fp8: choose one of none, nearest, stochastic"),
        ({"out": {"bits": 11}}, "attn.out.bits=11: give 1 to 10 mantissa bits; 7 are BF16's"),
        ({"out_unnormalized": {"mode": "none", "bits": 0}}, "attn.out_unnormalized.bits=0"),
        ({"probs": "fp8"}, "attn.probs.mode=fp8"),
    ],
)
def test_a_rounding_that_cannot_be_is_refused_by_name(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=r"attn") as caught:
        AttentionVariant.from_dict(fields)
    assert str(caught.value).startswith(told)


def test_parts_that_are_left_out_are_the_defaults() -> None:
    variant = AttentionVariant.from_dict({"probs": {"bits": 3}, "scores": {"mode": "nearest"}})
    assert (variant.probs, variant.scores) == (Rounding("nearest", 3), NEAREST)


def test_effective_choices_are_flat_and_leave_out_what_says_nothing() -> None:
    choices = effective_choices(AttentionVariant(scores=NEAREST, probs=Rounding("nearest", 3)))
    assert (choices["scores"], choices["probs"], choices["probs.bits"]) == ("nearest", "nearest", 3)
    assert choices["out_unnormalized"] == "none"
    assert {"name", "out_unnormalized.bits", "out_unnormalized_when", "beta"}.isdisjoint(choices)
    assert choices["delta_error.kind"] == "none"


def test_every_rounding_point_has_random_bits_of_its_own() -> None:
    assert {point.upper() for point in ROUNDING_POINTS} <= set(Stream.__members__)
    assert len(set(Stream)) == len(Stream.__members__)  # IntEnum takes two names for one number
    assert max(Stream) < BLOCK_UNIT // STREAM_UNIT
