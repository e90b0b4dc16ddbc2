"""The PyTorch attention against FP64 softmax attention."""

import functools
import math

import pytest
import torch
import yaml
from torch import Tensor

from flashpoint.numerics.choices import NEAREST, UNROUNDED
from flashpoint.numerics.variant import AttentionVariant
from tests.conftest import REPOSITORY
from tests.numerics.oracle import NOTHING_ROUNDED, exact_attention, run_reference

VARIANTS = {
    path.stem: AttentionVariant.from_dict(yaml.safe_load(path.read_text()))
    for path in sorted((REPOSITORY / "configs/attn").glob("*.yaml"))
    if path.stem not in ("sdpa", "flash_fixed_paper_unguarded")  # whose NaN are tested in test_released.py
}
GRADIENTS = ("grad_q", "grad_k", "grad_v")
# Choices that change nothing in exact arithmetic.
NEUTRAL = [
    {},
    {"normalizer": "rounded"},
    {"normalizer": "before_product", "block_k": None},
    {"normalizer": "before_product", "block_k": None, "out_divisor": "unrounded_in_first_block"},
    {"delta": "out_fp32"},
    {"delta": "p_dp"},
    {"exact_row_sum": True},
    {"center_keys": True},
    {"center_grad_q": True},
    {"shift": "offset", "shift_offset": 2.5},
    {"shift": "dynamic_max", "beta": 7.0},
    {"shift": "dynamic_max", "beta": 2.0, "tie_tolerance": 1e-3},
    {"shift": "dynamic_max", "gamma": 0.75},
    {"out_unnormalized_when": "per_block"},
]


def normal(length: int, size: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 2, length, size, generator=generator) for _ in range(4)]


def tied(length: int, size: int) -> list[Tensor]:
    """Every key four times over: rows of scores with repeated maxima."""
    q, k, v, grad_out = normal(length, size)
    return [q, k[:, :, torch.arange(length) // 4], v, grad_out]


def sink(length: int, size: int) -> list[Tensor]:
    """The first key takes nearly all of the probability."""
    q, k, v, grad_out = normal(length, size)
    k[:, :, 0] = 8 * q.mean(-2)
    return [q + 2 * q.mean(-2, keepdim=True), k, v, grad_out]


def one_signed(length: int, size: int) -> list[Tensor]:
    q, k, v, grad_out = tied(length, size)
    return [q, k, -v.abs() - 1, grad_out]


def large_scores(length: int, size: int) -> list[Tensor]:
    """Scores up to 500 in size."""
    q, k, v, grad_out = normal(length, size)
    largest = (q @ k.mT).abs().amax() / math.sqrt(size)
    return [q * (500 / largest), k, v, grad_out]


STRESSES = [normal, tied, sink, one_signed, large_scores]


@functools.cache
def inputs_and_exact(stress, length: int, size: int, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Once for all variants: FP64 takes a CPU longer than they do."""
    inputs = [x.to(dtype) for x in stress(length, size)]
    return inputs, exact_attention(*inputs)  # type: ignore[arg-type]


def relative_errors(variant: AttentionVariant, stress, length: int, size: int) -> dict[str, float]:
    inputs, exact = inputs_and_exact(stress, length, size, torch.float32)
    result, expected = run_reference(*inputs, variant), dict(exact)  # type: ignore[arg-type]
    # dQ and dK of a single token are zero: errors are measured on dV's scale there.
    floor = 0.1 * expected["grad_v"].norm()
    if variant.center_keys:  # L is that of the centred scores
        del expected["logsumexp"]
    return {
        name: ((result[name].double() - value).norm() / torch.maximum(value.norm(), floor)).item()
        for name, value in expected.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("length", [1, 2, 7, 63, 64, 65, 130, 257])
@pytest.mark.parametrize("block", [16, 64, 100, None])
def test_fp32_is_within_1e_5_of_fp64(length: int, size: int, block: int | None) -> None:
    errors = relative_errors(AttentionVariant(**NOTHING_ROUNDED, block_k=block), normal, length, size)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.slow
@pytest.mark.parametrize("stress", [normal, tied, sink, one_signed], ids=lambda stress: stress.__name__)
@pytest.mark.parametrize("choices", NEUTRAL, ids=lambda choices: "_".join(map(str, choices.values())) or "default")
def test_choices_that_cancel_exactly_stay_within_1e_5(choices: dict, stress) -> None:
    errors = relative_errors(AttentionVariant(**{**NOTHING_ROUNDED, **choices}), stress, 150, 32)
    assert max(errors.values()) < 1e-5, errors


def test_scores_of_500_keep_fp32_accuracy() -> None:
    # A score of 500 carries an FP32 rounding of 500·2⁻²⁴ = 3e-5, and exp passes it on.
    errors = relative_errors(AttentionVariant(**NOTHING_ROUNDED), large_scores, 150, 32)
    assert max(errors.values()) < 2e-4, errors


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("stress", STRESSES, ids=lambda stress: stress.__name__)
def test_bf16_variants_stay_within_the_bound_of_their_rounding_points(name: str, stress) -> None:
    """|O − O*| ≤ Σ_j P_ij |V_j| · (2·max_j|δS_ij| + relative roundings · 2⁻⁸), row by row.

    A score rounded to BF16 moves by δS ≤ |S|·2⁻⁹; that scales P̄ and ℓ by at most exp(±δS) each. P̄, Ō and O
    rounded to nearest move by 2⁻⁹ relative each (2⁻⁸ when stochastic), Ō once per key block if per block; the
    unrounded ℓ keeps P̄'s. The dynamic maximum and centring change which values are rounded, not how many; a
    centred key is itself rounded, which moves a score by at most Σ_f |q_f||k_f|·2⁻⁸·α.
    """
    variant, result = VARIANTS[name], computed(name, stress)
    out, out_of_abs, moves = exact_and_its_moves(stress, variant.center_keys)
    moved = moves[variant.scores.mode != "none"]
    blocks = math.ceil(150 / (variant.block_k or 150)) if variant.out_unnormalized_when == "per_block" else 1
    roundings = (
        (variant.probs.mode != "none")
        + 2 * blocks * (variant.out_unnormalized.mode != "none")
        + (variant.out.mode != "none")
    )
    bound = out_of_abs * (torch.expm1(2 * moved) + roundings * 2**-8)
    error = (result["out"].double() - out).abs()
    assert (error <= bound + 1e-7).all(), (error / bound).max()
    assert error.max() > 0


@functools.cache
def exact_and_its_moves(stress, center_keys: bool) -> tuple[Tensor, Tensor, dict[bool, Tensor]]:
    """P·V and P·|V| in FP64, and by how much a row's scores move at most that are not rounded, and that are."""
    q, k, v, _ = (x.double() for x in inputs_and_exact(stress, 150, 32, torch.bfloat16)[0])
    if center_keys:
        k = k - k.mean(-2, keepdim=True)
    scores = q @ k.mT / math.sqrt(32)
    future = torch.ones(150, 150, dtype=torch.bool).triu(1)
    moves = {}
    for rounded in (False, True):
        moved = scores.abs() * (2**-9 * rounded + 2**-20)
        if center_keys:
            moved = moved + q.abs() @ k.abs().mT / math.sqrt(32) * 2**-8
        moves[rounded] = moved.masked_fill(future, 0).amax(-1, keepdim=True)
    p = scores.masked_fill(future, -math.inf).softmax(-1)
    return p @ v, p @ v.abs(), moves


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.startswith("released")])  # which exceed it
@pytest.mark.parametrize("stress", STRESSES, ids=lambda stress: stress.__name__)
def test_errors_are_at_most_twice_those_of_a_bf16_pytorch_attention(name: str, stress) -> None:
    """FlashAttention's own criterion, on the largest error of each result."""
    result, (expected, plain) = computed(name, stress), yardsticks(stress)
    # Gradients of variants with Ō in BF16 carry δ's error on top; FlashAttention's tests allow them 3. A stochastic
    # rounding of O errs by up to an ulp, one to nearest by half of that, and δ takes it on.
    of_out = 2 if VARIANTS[name].out.mode == "stochastic" else 1
    for quantity in ("out", *GRADIENTS):
        factor = of_out * (2 if quantity == "out" else 3)
        error, plain_error = ((x[quantity].double() - expected[quantity]).abs().max().item() for x in (result, plain))
        assert error <= factor * plain_error + 1e-5, (quantity, error, plain_error)


@functools.cache
def computed(name: str, stress) -> dict[str, Tensor]:
    """What a variant makes of inputs in BF16."""
    inputs, _ = inputs_and_exact(stress, 150, 32, torch.bfloat16)
    return run_reference(*inputs, VARIANTS[name])  # type: ignore[arg-type]


@functools.cache
def yardsticks(stress) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same attention in FP64, and in PyTorch's BF16, which takes a CPU longer than a variant."""
    inputs, exact = inputs_and_exact(stress, 150, 32, torch.bfloat16)
    return exact, bf16_pytorch_attention(*inputs)  # type: ignore[arg-type]


def bf16_pytorch_attention(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> dict[str, Tensor]:
    """Attention as PyTorch computes it when every operation takes and gives BF16."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    out = scores.softmax(-1) @ v
    out.backward(grad_out)
    grads = [x.grad for x in (q, k, v)]
    assert all(grad is not None for grad in grads)
    return {"out": out.detach(), **dict(zip(GRADIENTS, grads, strict=True))}  # type: ignore[dict-item]


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65])
def test_bf16_variants_are_finite_and_close_at_the_edges_of_a_block(name: str, length: int) -> None:
    inputs, expected = inputs_and_exact(normal, length, 64, torch.bfloat16)
    result = run_reference(*inputs, VARIANTS[name])  # type: ignore[arg-type]
    for quantity in ("out", *GRADIENTS):
        difference = (result[quantity].double() - expected[quantity]).norm()
        assert difference <= 0.01 * torch.maximum(expected[quantity].norm(), expected["grad_v"].norm())


def test_the_exact_row_sum_removes_what_a_wrong_delta_puts_into_ds() -> None:
    """Σ_j dS_ij is seen from outside through dK: for constant queries, Σ_j dK_j = α·q·Σ_ij dS_ij."""
    sums = {}
    for exact in (False, True):
        q, k, v, grad_out = one_signed(128, 64)
        q = torch.ones_like(q)
        variant = AttentionVariant(
            probs=UNROUNDED, out=UNROUNDED, grad_scores=UNROUNDED, out_unnormalized=NEAREST, exact_row_sum=exact
        )
        sums[exact] = run_reference(q, k, v, grad_out + 1, variant)["grad_k"].double().sum(-2).abs().max().item()
    assert sums[False] > 1e-2
    assert sums[True] < 1e-4
