"""Gradients that FP16 cannot hold accuse no attention, and hide no fault."""

import pytest
from torch import Tensor

from flashpoint.diagnosis.verdict import diagnose
from tests.diagnosis.calls import CLEAN, by_position, call_of, inputs

FP16_STEP = 2**-24
"""Between FP16's numbers below 2^-14: one that is rounded to a step errs by step/√12, 2 % of a number of 14 steps."""


def in_fp16(steps: float, seed: int = 4) -> list[Tensor]:
    """Tensors in FP16, with a dO of so many of FP16's smallest steps in the root mean square."""
    q, k, v, grad_out = inputs(seed)
    return [*(x.half() for x in (q, k, v)), (grad_out.double() * steps * FP16_STEP).half()]


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("steps", "lost"), [(2, True), (10, True), (200, False), (2**14, False), (2**24, False)])
def test_gradients_that_fp16_cannot_hold_accuse_no_attention(steps: int, lost: bool, again: bool) -> None:
    function = by_position(CLEAN["sdpa"])
    found = diagnose(call_of(function, in_fp16(steps)), function if again else None).findings
    assert [(one.kind, one.heads) for one in found] == [("fp16_underflow", (1, 2, 3, 4))] * lost
    assert all("smallest numbers lie 6.0e-08 apart: d" in one.text and "is off by" in one.text for one in found)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "factor"), [(2, 4.0), (10, 1.5), (200, 1.05), (2**14, 1.05), (2**24, 1.05)])
@pytest.mark.parametrize("of", ["grad_k", "grad_v"])
def test_a_fault_is_found_beside_what_fp16_cannot_hold(steps: int, factor: float, of: str) -> None:
    """In head 3, by more than FP16 accounts for; the other heads are lost where dO is of few steps."""
    call = call_of(by_position(CLEAN["sdpa"]), in_fp16(steps))
    getattr(call, of)[:, 2] *= factor
    found = [(one.kind, one.heads) for one in diagnose(call).findings]
    assert found == [("gradients_off", (3,))]


def test_one_sequence_whose_gradients_fp16_cannot_hold_is_enough() -> None:
    tensors = in_fp16(2**14)
    tensors[3][1] /= 2**13
    (found,) = diagnose(call_of(by_position(CLEAN["sdpa"]), tensors)).findings
    assert (found.kind, found.heads) == ("fp16_underflow", (1, 2, 3, 4))
    assert "dO is 1.2e-07 in" in found.text


def test_scores_can_have_gradients_that_fp16_cannot_hold_where_d_o_is_healthy() -> None:
    """dO is of healthy size, and V is small: dP and dS are of few steps."""
    q, k, v, grad_out = in_fp16(2**10)
    (found,) = diagnose(call_of(by_position(CLEAN["sdpa"]), [q, k, v / 2**10, grad_out])).findings
    assert (found.kind, found.heads) == ("fp16_underflow", (1, 2, 3, 4))
