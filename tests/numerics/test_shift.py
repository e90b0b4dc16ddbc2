"""What is subtracted before the exponential, by hand."""

import math

import pytest
import torch
from torch import Tensor

from flashpoint.numerics.choices import NEAREST, UNROUNDED
from flashpoint.numerics.key_blocks import exponential
from flashpoint.numerics.reference import block_shift, flash_fwd
from flashpoint.numerics.variant import AttentionVariant
from tests.numerics.oracle import NOTHING_ROUNDED, exact_attention, noise_key, run_reference

INF = math.inf
PAPER = AttentionVariant(shift="dynamic_max", beta=7.0, tie_tolerance=0.0, max_shift=None)


@pytest.mark.parametrize(
    ("scores", "shift"),
    [
        ([2.0, 2.0, 1.0], 14.0),  # repeated positive maxima: β·r_m
        ([-3.0, -3.0, -4.0], 0.0),  # repeated negative maxima: 0
        ([0.0, 0.0, -1.0], 0.0),  # repeated zeros: r_m
        ([2.0, 1.0, 0.0], 2.0),  # one maximum: r_m
        ([-2.0, -3.0, -4.0], -2.0),
        ([2.0, 2.0, -INF], 14.0),  # a masked key is no maximum
        ([2.0, -INF, -INF], 2.0),
        ([-3.0, -INF, -INF], -3.0),
        ([-INF, -INF, -INF], -INF),  # masked whole: asks for nothing
        ([2.0, 1.9995, 0.0], 2.0),  # within 1e-3, but the tolerance is 0
    ],
)
def test_the_papers_rule(scores: list[float], shift: float) -> None:
    assert block_shift(torch.tensor([scores]), PAPER).tolist() == [shift]


def test_repeated_negative_maxima_take_a_share_of_themselves() -> None:
    """Appendix C: close to 1 it leaves exp((1 − γ)·r_m), which rounds to 1 where it exceeds 1 − 2⁻⁹."""
    share = AttentionVariant(shift="dynamic_max", gamma=0.75, max_shift=None)
    rows = torch.tensor([[-4.0, -4.0, -5.0], [2.0, 2.0, 1.0], [-4.0, -4.5, -5.0]])
    assert block_shift(rows, share).tolist() == [-3.0, 14.0, -4.0]
    near = AttentionVariant(shift="dynamic_max", gamma=1 - 2**-12, max_shift=None)
    largest = exponential(rows[:1, :1], block_shift(rows[:1], near)[:, None])
    assert largest.item() == pytest.approx(math.exp(-(2**-10)), rel=1e-6)
    assert largest.bfloat16().item() == 1


def test_the_tolerance_of_the_released_code_widens_a_tie() -> None:
    released = AttentionVariant(shift="dynamic_max", beta=2.0, tie_tolerance=1e-3, max_shift=None)
    assert block_shift(torch.tensor([[2.0, 1.9995, 0.0]]), released).tolist() == [4.0]
    assert block_shift(torch.tensor([[2.0, 1.998, 0.0]]), released).tolist() == [2.0]


@pytest.mark.parametrize(
    ("row_max", "expected"), [(5.0, 35.0), (9.0, 63.0), (20.0, 80.0), (-30.0, 0.0), (-100.0, -40.0)]
)
def test_the_guard_bounds_the_distance_to_the_row_maximum(row_max: float, expected: float) -> None:
    guarded = AttentionVariant(shift="dynamic_max", beta=7.0, max_shift=60.0)
    assert block_shift(torch.tensor([[row_max, row_max]]), guarded).tolist() == [expected]


def test_other_rules() -> None:
    scores = torch.tensor([[2.0, 2.0, 1.0], [-INF, -INF, -INF]])
    assert block_shift(scores, AttentionVariant()).tolist() == [2.0, -INF]
    assert block_shift(scores, AttentionVariant(shift="offset", shift_offset=0.5)).tolist() == [2.5, -INF]


def tied_rows(row_max: float, length: int = 20) -> list[Tensor]:
    """All keys alike, with scores of ``row_max``."""
    size = 16
    q, k = torch.zeros(1, 1, length, size), torch.zeros(1, 1, length, size)
    q[..., 0], k[..., 0] = 4.0, row_max
    generator = torch.Generator().manual_seed(0)
    v, grad_out = (torch.randn(1, 1, length, size, generator=generator) for _ in range(2))
    return [q, k, v, grad_out]


@pytest.mark.parametrize("row_max", [30.0, 100.0, -200.0])
def test_past_underflow_the_guard_keeps_the_exact_result(row_max: float) -> None:
    inputs = tied_rows(row_max)
    unguarded = AttentionVariant(**NOTHING_ROUNDED, shift="dynamic_max", beta=7.0, max_shift=None)
    guarded = AttentionVariant(**NOTHING_ROUNDED, shift="dynamic_max", beta=7.0, max_shift=60.0)
    q, k, v, _ = inputs
    assert not flash_fwd(q, k, v, unguarded, noise_key(q))[0].isfinite().all()
    result, expected = run_reference(*inputs, guarded), exact_attention(*inputs)  # type: ignore[arg-type]
    for name, value in result.items():
        assert (value - expected[name]).abs().max() <= 1e-4 * max(1.0, expected["grad_v"].abs().max().item()), name


def test_the_running_maximum_keeps_the_largest_shift_of_all_blocks() -> None:
    """Ties in the first block only: its β·r_m stays above the later, larger single maximum."""
    q, k, v, _ = tied_rows(2.0, length=4)
    k[0, 0, 2:, 0] = torch.tensor([3.0, 1.0])
    variant = AttentionVariant(
        probs=UNROUNDED, out=UNROUNDED, out_unnormalized=NEAREST, shift="dynamic_max", beta=7.0, block_k=2
    )
    out, logsumexp, *_ = flash_fwd(q, k, v, variant, noise_key(q))
    # Ō = Σ exp(s − 14) v, rounded to BF16, over ℓ = Σ exp(s − 14).
    p = torch.tensor([2.0, 2.0, 3.0, 1.0]).double().sub(14).exp().float()
    unnormalized = (p @ v[0, 0]).bfloat16().float()
    torch.testing.assert_close(out[0, 0, 3], unnormalized / p.sum(), rtol=1e-6, atol=0)
    assert logsumexp[0, 0, 3].item() == pytest.approx(math.log(2 * math.e**2 + math.e**3 + math.e), rel=1e-6)


def test_tiles_without_any_visible_key_leave_no_nan() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (torch.randn(1, 2, 9, 16, generator=generator) for _ in range(4))
    for block in (1, 2, 4, 64):
        result = run_reference(q, k, v, grad_out, AttentionVariant(**NOTHING_ROUNDED, block_k=block))
        expected = exact_attention(q, k, v, grad_out)
        for name, value in result.items():
            assert (value - expected[name]).abs().max() < 1e-5


def test_equal_maxima_give_exactly_one() -> None:
    maxima = torch.linspace(0.1, 90, 500)
    assert (exponential(maxima[:, None], maxima[:, None]) == 1).all()
