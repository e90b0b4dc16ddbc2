"""Where comparisons of norms are blind: the signed error of O, δ and Σⱼ dSᵢⱼ on rows of tied maxima.

Every key of a group is the same and the scores of other groups lie 96 nats lower, so P̄ is exactly 1 or lost beside
it, and Ō is a sum of BF16 values, exact in FP32 in any order. What each rounding point makes of it is then known
to the bit.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from flashpoint.numerics import launch
from flashpoint.numerics.choices import NEAREST, Mode, Rounding
from flashpoint.numerics.variant import AttentionVariant
from tests.numerics.test_kernels import DEVICE

GROUPS, LENGTH, SIZE = 5, 150, 64


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def tied_rows() -> tuple[list[Tensor], np.ndarray]:
    """q, k, v, dO, and which keys [T, T] have P̄ = 1 in a row."""
    group = np.arange(LENGTH) % GROUPS
    generator = torch.Generator().manual_seed(0)
    k = torch.zeros(1, 1, LENGTH, SIZE)
    k[0, 0, np.arange(LENGTH), group] = 16.0
    k[..., SIZE - 1] = 1.0  # q is 0 there: dQ of that feature is α Σⱼ dSᵢⱼ
    q = 3 * k.clone()
    q[..., SIZE - 1] = 0.0
    v = -(1 + torch.randint(0, 128, (1, 1, LENGTH, SIZE), generator=generator) / 128)  # one sign, every bit used
    grad_out = torch.full_like(v, -1.0)
    ones = (group[:, None] == group[None, :]) & (np.arange(LENGTH)[None, :] <= np.arange(LENGTH)[:, None])
    return [x.bfloat16().to(DEVICE) for x in (q, k, v, grad_out)], ones


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "nearest"])
@pytest.mark.parametrize("source", ["out", "out_fp32", "p_dp"])
def test_signed_errors_are_those_the_rounding_points_predict(mode: Mode, source: str) -> None:
    variant = AttentionVariant(scores=NEAREST, out_unnormalized=Rounding(mode), delta=source)  # type: ignore[arg-type]
    (q, k, v, grad_out), ones = tied_rows()
    context: dict[str, Any] = {"layer": 1, "seed_and_step": torch.zeros(2, dtype=torch.int64, device=DEVICE)}
    out, logsumexp, out_for_delta, _ = launch.flash_fwd(q, k, v, variant, **context)
    grad_q, rows, _ = launch.flash_bwd_dq(grad_out, q, k, v, out, logsumexp, out_for_delta, variant, **context)

    values, count = v[0, 0].double().cpu().numpy(), ones.sum(1)[:, None]
    total = ones @ values
    exact = total / count
    unnormalized = bf16(total) if mode == "nearest" else total
    expected = bf16(unnormalized.astype(np.float32) / count.astype(np.float32))
    assert np.array_equal(out[0, 0].double().cpu().numpy(), expected)

    bias = (expected - exact).mean(0)
    assert np.allclose((out[0, 0].double().cpu().numpy() - exact).mean(0), bias, rtol=0, atol=1e-12)
    if mode == "nearest":
        assert np.abs(bias).max() > 1e-4  # there is something to predict

    delta = rows[1, 0, :LENGTH].double().cpu().numpy()
    exact_delta = -exact.sum(1)
    predicted = -expected.sum(1) if source == "out" else exact_delta
    of_p = 2.0**-23 * 101  # L is near 96 + ln 30, in FP32, and goes into every P
    assert np.allclose(delta, predicted, rtol=of_p if source == "p_dp" else 3e-7, atol=0)
    # Σⱼ dSᵢⱼ = α (Σⱼ Pᵢⱼ dPᵢⱼ − δᵢ): what the null direction is driven by. Each term is rounded once, the sum once.
    terms = ones / count * (-values.sum(1)[None, :] - predicted[:, None])
    expected_sums = SIZE**-0.5 * terms.sum(1)
    limit = SIZE**-0.5 * (2.0**-9 + of_p) * np.abs(terms).sum(1) + 2.0**-9 * np.abs(expected_sums) + 1e-6
    row_sums = grad_q[0, 0, :, SIZE - 1].double().cpu().numpy()
    assert (np.abs(row_sums - expected_sums) <= 1.1 * limit).all()
    if source == "out" and mode == "nearest":
        assert np.abs(expected_sums).max() > 3 * limit.max()
