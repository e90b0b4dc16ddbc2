"""The numerics of the paper's released code (arXiv 2510.04212), against NumPy and by hand.

The NumPy attention follows what torch.compile makes of the released code: a matrix product returns BF16, and what lies
between two products is FP32.
"""

import math

import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor

from flashpoint.numerics.variant import AttentionVariant
from tests.conftest import REPOSITORY
from tests.numerics.oracle import bf16, run_reference

F32 = NDArray[np.float32]
BLOCK, LENGTH, SIZE = 16, 48, 16
NAMES = {"released": False, "released_fixed": True}
INPUTS = ("normal", "large", "sink", "tied")


def variant(name: str, **choices: object) -> AttentionVariant:
    filed = yaml.safe_load((REPOSITORY / f"configs/attn/{name}.yaml").read_text())
    return AttentionVariant.from_dict({**filed, "block_k": BLOCK, **choices})


def inputs(kind: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(INPUTS.index(kind))
    q, k, v, grad_out = (torch.randn(1, 1, LENGTH, SIZE, generator=generator) for _ in range(4))
    if kind == "large":
        q, k = 4 * q, 4 * k
    elif kind == "sink":
        q, k[:, :, 0] = q + 1, 3
    elif kind == "tied":
        k[:, :, 1::2] = k[:, :, ::2]
    return [x.bfloat16() for x in (q, k, v, grad_out)]


def released(q: F32, k: F32, v: F32, grad_out: F32, *, fixed: bool) -> dict[str, F32]:
    """One head [T, d]: O, L and the gradients."""
    floor, scale, lowest = np.float32(1e-10), np.float32(SIZE**-0.5), np.float32(-3.3895313892515355e38)
    starts = range(0, LENGTH, BLOCK)
    out, logsumexp = np.zeros_like(q), np.zeros((LENGTH, 1), np.float32)
    for row in starts:
        rows = slice(row, row + BLOCK)
        m, total = np.full((BLOCK, 1), lowest), np.zeros((BLOCK, 1), np.float32)
        unnormalized = np.zeros((BLOCK, SIZE), np.float32)
        for key in starts:  # those after the queries, too
            keys = slice(key, key + BLOCK)
            s = bf16(q[rows] @ k[keys].T) * scale
            s = np.where(np.arange(key, key + BLOCK) > np.arange(row, row + BLOCK)[:, None], lowest, s)
            of_block = s.max(-1, keepdims=True)
            if fixed:
                tied = (s >= of_block - np.float32(1e-3)).sum(-1, keepdims=True) > 1
                of_block = np.where(tied & (of_block > 0), 2 * np.maximum(of_block, 0), of_block)
                of_block = np.where(tied & (of_block < 0), np.float32(0), of_block)
            m_new = np.maximum(m, of_block)
            p, rescale = np.exp(s - m_new), np.exp(m - m_new)
            total = rescale * total + np.maximum(p.sum(-1, keepdims=True), floor)
            unnormalized = unnormalized * rescale + bf16(bf16(p) @ v[keys])
            m = m_new
        divisor = total if fixed and row == 0 else bf16(total)
        out[rows], logsumexp[rows] = bf16(unnormalized / divisor), np.log(bf16(total)) + m
    delta = (grad_out * out).sum(-1, keepdims=True)
    grad_q, grad_k, grad_v = (np.zeros_like(q) for _ in range(3))
    for row in starts:
        for key in range(0, row + 1, BLOCK):
            rows, keys = slice(row, row + BLOCK), slice(key, key + BLOCK)
            s = bf16(q[rows] @ k[keys].T) * scale
            s[np.arange(key, key + BLOCK) > np.arange(row, row + BLOCK)[:, None]] = -np.inf
            p = np.exp(s - logsumexp[rows])
            grad_s = bf16(p * scale * (bf16(grad_out[rows] @ v[keys].T) - delta[rows]))
            grad_v[keys] += bf16(bf16(p).T @ grad_out[rows])
            grad_q[rows] += bf16(grad_s @ k[keys])
            grad_k[keys] += bf16(grad_s.T @ q[rows])
    grads = {"grad_q": bf16(grad_q), "grad_k": bf16(grad_k), "grad_v": bf16(grad_v)}
    return {"out": out, "logsumexp": logsumexp[:, 0], **grads}


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", NAMES)
def test_the_released_numerics_equal_numpy_up_to_flips_of_a_rounding(name: str, kind: str) -> None:
    tensors = inputs(kind)
    result = run_reference(*tensors, variant(name))  # type: ignore[call-arg, misc]
    expected = released(*(x[0, 0].float().numpy() for x in tensors), fixed=NAMES[name])
    for quantity, values in expected.items():
        found = result[quantity][0, 0].float().numpy()
        apart = np.abs(found - values) > 1e-6 * np.abs(values)
        # A flip in O moves δ, and with it a whole row of dQ.
        assert apart.mean() < (0.005 if quantity == "out" else 0.03), quantity
        np.testing.assert_allclose(found, values, rtol=2**-6, atol=2e-3 * np.abs(values).max(), err_msg=quantity)


@pytest.mark.parametrize("name", NAMES)
def test_every_rounding_of_the_released_code_counts(name: str) -> None:
    tensors, none = inputs("normal"), {"mode": "none"}
    filed = run_reference(*tensors, variant(name))  # type: ignore[call-arg, misc]
    for choice in (
        {"scores": none},
        {"out_unnormalized": none},
        {"out_unnormalized_when": "per_block"},
        {"denominator": none},
        {"grad_probs": none},
        {"grad_blocks": none},
        {"out_divisor": "denominator" if NAMES[name] else "unrounded_in_first_block"},
    ):
        other = run_reference(*tensors, variant(name, **choice))  # type: ignore[call-arg, misc]
        assert any(not torch.equal(filed[quantity], other[quantity]) for quantity in filed), choice


def of_equal_keys(row_max: float) -> list[Tensor]:
    """Every key alike, with scores of ``row_max`` nats: all rows but the first are tied."""
    q, k = torch.zeros(1, 1, LENGTH, SIZE), torch.zeros(1, 1, LENGTH, SIZE)
    q[..., 0], k[..., 0] = 4.0, row_max
    v = torch.ones(1, 1, LENGTH, SIZE)
    return [x.bfloat16() for x in (q, k, v, torch.randn(v.shape, generator=torch.Generator().manual_seed(0)))]


def test_the_floor_switches_off_a_tied_row_of_large_scores() -> None:
    """With m = 2·r_m and n tied keys, ℓ is n·exp(−r_m) or the floor: 1e-10 a block exceeds it from r_m = 23 nats on."""
    shares = {}
    for row_max in (16.0, 32.0, 64.0):
        result = run_reference(*of_equal_keys(row_max), variant("released_fixed"))  # type: ignore[call-arg, misc]
        shares[row_max] = result["out"][0, 0, BLOCK - 1, 0].item()  # V is 1: O is the row's mass
        assert result["grad_v"].isfinite().all()
    mass = {row_max: BLOCK * math.exp(-row_max) for row_max in shares}
    for row_max, share in shares.items():
        blocks = LENGTH // BLOCK  # two of them are masked
        expected = mass[row_max] / (max(mass[row_max], 1e-10) + (blocks - 1) * 1e-10)
        assert share == pytest.approx(expected, rel=2**-7)
    assert shares[16.0] > 0.99
    assert shares[32.0] < 1e-2
    assert shares[64.0] < 1e-12


def test_the_unguarded_fix_of_the_paper_underflows_to_nan() -> None:
    filed = yaml.safe_load((REPOSITORY / "configs/attn/flash_fixed_paper_unguarded.yaml").read_text())
    unguarded = AttentionVariant.from_dict(filed)
    assert run_reference(*of_equal_keys(32.0), unguarded)["out"].isnan().any()  # type: ignore[call-arg, misc]
    assert run_reference(*of_equal_keys(8.0), unguarded)["out"].isfinite().all()  # type: ignore[call-arg, misc]


@pytest.mark.parametrize("name", NAMES)
def test_masked_blocks_move_the_shift_of_the_fix_alone(name: str) -> None:
    """Scores below 0 and no ties: m is the row maximum, and with a masked block 0 where the fix is on."""
    q, k = torch.zeros(1, 1, LENGTH, SIZE), torch.zeros(1, 1, LENGTH, SIZE)
    q[..., 0], k[..., 0] = 4.0, -1.0 - torch.arange(LENGTH) / 8
    tensors = [x.bfloat16() for x in (q, k, torch.ones_like(k), torch.ones_like(k))]
    counted, skipped = (
        run_reference(*tensors, variant(name, masked_blocks=choice))  # type: ignore[call-arg, misc]
        for choice in ("count", "skip")
    )
    moved = (counted["out"] != skipped["out"]).any() or (counted["logsumexp"] != skipped["logsumexp"]).any()
    assert bool(moved) == NAMES[name]
