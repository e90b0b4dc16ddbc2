"""δ from an O of other random bits, O′: those bits by hand, and an error of its own.

Inputs are the tied rows of :mod:`tests.numerics.test_kernel_bias`: Ō is a sum of BF16 values, exact in any order.
"""

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from flashpoint.numerics import launch, reference
from flashpoint.numerics.choices import NEAREST, STOCHASTIC, UNROUNDED, Rounding
from flashpoint.numerics.dispatch import attention
from flashpoint.numerics.rounding import philox4x32
from flashpoint.numerics.variant import AttentionVariant
from tests.numerics.oracle import noise_key
from tests.numerics.test_kernel_bias import LENGTH, SIZE, tied_rows
from tests.numerics.test_kernels import DEVICE

SEED, STEP, LAYER = 7, 11, 3
CONTEXT: dict[str, Any] = {"layer": LAYER, "seed_and_step": torch.tensor([SEED, STEP], device=DEVICE)}
STREAMS = {"out": (2, 3), "out_for_delta": (6, 7)}
"""Numbers of the streams of random bits for Ō and for O."""


def words(stream: int, block: int = 0) -> np.ndarray:
    """[T, d] uint32 of the first head and sequence."""
    rows, columns = torch.arange(LENGTH)[:, None], torch.arange(SIZE)[None, :]
    counter = torch.broadcast_tensors(rows, columns, torch.tensor(0), torch.tensor(LAYER | stream << 12 | block << 16))
    return philox4x32(counter, (torch.tensor(SEED), torch.tensor(STEP)))[0].numpy().astype(np.uint32)  # type: ignore[arg-type]


def stochastic(x: np.ndarray, noise: np.ndarray, bits: int = 7) -> np.ndarray:
    discarded = np.uint32(23 - bits)
    pattern = x.astype(np.float32).view(np.uint32) + (noise >> (32 - discarded))
    return (pattern >> discarded << discarded).view(np.float32)


def by_hand(which: str, out: Rounding, block: int | None, bits: int) -> np.ndarray:
    """O or O′ [T, d] of Ō rounded stochastically to ``bits``, once or per block of keys."""
    of_sum, of_out = STREAMS[which]
    (_, _, v, _), ones = tied_rows()
    values = v[0, 0].double().cpu().numpy()
    if block is None:
        total = stochastic(ones @ values, words(of_sum), bits)
    else:
        total = np.zeros((LENGTH, SIZE), np.float32)
        for number in range(-(-LENGTH // block)):
            keys = slice(number * block, (number + 1) * block)
            added = stochastic(total + ones[:, keys] @ values[keys], words(of_sum, number), bits)
            total = np.where((np.arange(LENGTH) >= keys.start)[:, None], added, total)
    quotient = total / ones.sum(1)[:, None].astype(np.float32)
    if out == STOCHASTIC:
        return stochastic(quotient, words(of_out))
    return quotient.astype(ml_dtypes.bfloat16).astype(np.float32)


CHOICES = list(itertools.product((NEAREST, STOCHASTIC), (None, 32), (7, 3)))


def variant_of(out: Rounding, block: int | None, bits: int, **fields: Any) -> AttentionVariant:
    when: dict[str, Any] = {} if block is None else {"out_unnormalized_when": "per_block", "block_k": block}
    rounding = {"scores": NEAREST, "out_unnormalized": Rounding("stochastic", bits), "out": out}
    return AttentionVariant(**{**rounding, "delta": "out_independent", **when, **fields})


def forward(engine: str, variant: AttentionVariant, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    if engine == "kernels":
        return launch.flash_fwd(*tensors[:3], variant, **CONTEXT)
    q, k, v, _ = (x.cpu() for x in tensors)
    return reference.flash_fwd(q, k, v, variant, noise_key(q, SEED, STEP, LAYER))


def backward(engine: str, variant: AttentionVariant, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    q, k, v, grad_out = tensors
    saved = forward(engine, variant, tensors)
    if engine == "kernels":
        return launch.flash_bwd(grad_out, q, k, v, *saved, variant, **CONTEXT)  # type: ignore[call-arg]
    q, k, v, grad_out = (x.cpu() for x in tensors)
    return reference.flash_bwd(grad_out, q, k, v, *saved, variant, noise_key(q, SEED, STEP, LAYER))  # type: ignore[call-arg]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["kernels", "reference"])
@pytest.mark.parametrize(("out", "block", "bits"), CHOICES)
def test_both_outputs_have_the_bits_that_philox_says(engine: str, out: Rounding, block: int | None, bits: int) -> None:
    returned, _, out_for_delta, _ = forward(engine, variant_of(out, block, bits), tied_rows()[0])
    for which, result in (("out", returned), ("out_for_delta", out_for_delta)):
        expected = by_hand(which, out, block, bits)
        np.testing.assert_array_equal(result[0, 0].float().cpu().numpy(), expected, err_msg=which)
    assert (returned.float() != out_for_delta).float().mean() > 0.1
    plain = variant_of(out, block, bits, delta="out")
    assert torch.equal(forward(engine, plain, tied_rows()[0])[0], returned)


@pytest.mark.parametrize("engine", ["kernels", "reference"])
def test_delta_is_of_the_other_output(engine: str) -> None:
    """δ through the feature of K that is 1 in all keys and that Q does not see: dQ there is α Σⱼ dSᵢⱼ.

    Σⱼ Pᵢⱼ dPᵢⱼ = rowsum(dO∘O*) with O* exact, so Σⱼ dSᵢⱼ = α rowsum(dO∘(O* − O′)).
    """
    tensors, ones = tied_rows()
    variant = variant_of(NEAREST, None, 3, probs=UNROUNDED, grad_scores=UNROUNDED)
    grad_q, _, _ = backward(engine, variant, tensors)
    exact = ones @ tensors[2][0, 0].double().cpu().numpy() / ones.sum(1)[:, None]
    row_sums = grad_q[0, 0, :, SIZE - 1].double().cpu().numpy()
    errors = {which: -(exact - by_hand(which, NEAREST, None, 3)).sum(1) * SIZE**-0.5 for which in STREAMS}
    scale = np.abs(errors["out_for_delta"]).max()
    assert np.abs(row_sums - errors["out_for_delta"]).max() < 0.02 * scale  # L near 96 + ln 30 is FP32
    assert np.abs(row_sums - errors["out"]).max() > 0.5 * scale


def test_the_two_errors_are_unbiased_and_independent() -> None:
    """Correlation of n pairs of independent errors has standard deviation 1/√n."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 96, 16, generator=generator) for _ in range(3))
    fields: dict[str, Any] = {"probs": UNROUNDED, "out_unnormalized": STOCHASTIC}
    exact = attention(
        q,
        k,
        v,
        AttentionVariant(probs=UNROUNDED, out=UNROUNDED),
        layer=1,
        seed_and_step=torch.zeros(2, dtype=torch.int64),
    )
    errors = []
    for step in range(20):
        saved = reference.flash_fwd(
            q, k, v, AttentionVariant(**fields, out=STOCHASTIC, delta="out_independent"), noise_key(q, 1, step)
        )
        errors.append(torch.stack([saved[0] - exact, saved[2] - exact]) / exact.abs())
    one, other = torch.stack(errors, 1).double().flatten(1)
    count = len(one)
    for error in (one, other):
        assert error.std() > 1e-3
        assert abs(error.mean()) < 5 * error.std() / count**0.5
    correlation = (one * other).mean() / (one.std() * other.std())
    assert abs(correlation) < 5 / count**0.5


def test_one_stochastic_rounding_of_the_two_is_enough() -> None:
    AttentionVariant(out=STOCHASTIC, delta="out_independent")
    AttentionVariant(out_unnormalized=STOCHASTIC, delta="out_independent")
