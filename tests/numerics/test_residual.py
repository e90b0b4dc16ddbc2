"""O in two parts: the residual against exact rational arithmetic, over all exponents, and what its bias must be."""

import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from flashpoint.numerics import launch, reference
from flashpoint.numerics.choices import NEAREST, STOCHASTIC, UNROUNDED, ResidualFormat, Rounding
from flashpoint.numerics.deltas import dtype_of_saved, residual, two_parts
from flashpoint.numerics.rounding import round_mantissa
from flashpoint.numerics.variant import AttentionVariant
from flashpoint_kernels.residual import residual as kernels_residual
from flashpoint_kernels.residual import two_parts as kernels_two_parts
from tests.numerics.oracle import exact_attention, noise_key, run_reference, with_mantissa
from tests.numerics.test_kernels import DEVICE, FROM_FILES, computed, inputs, run

SMALLEST = Fraction(2) ** -126


def every_exponent(mantissas: int = 5) -> Tensor:
    """FP32 numbers of both signs with every exponent from the subnormal ones to the largest."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(255).repeat_interleave(mantissas)
    fractions = torch.randint(0, 1 << 23, exponents.shape, generator=generator)
    positive = (exponents << 23 | fractions).int().view(torch.float32)
    return torch.cat([positive, -positive])


def by_hand(unrounded: float, out: float, form: ResidualFormat) -> tuple[int, Fraction]:
    """Of exact rational arithmetic: the whole number and its unit."""
    exponent = math.frexp(out)[1] - 1 if out else -126
    unit = max(Fraction(2) ** (max(exponent, -126) - form.mantissa), SMALLEST)
    units = round((Fraction(unrounded) - Fraction(out)) / unit)  # Python rounds to nearest even
    return max(-form.largest, min(form.largest, units)), unit


@pytest.mark.slow
@pytest.mark.parametrize(("mantissa", "bits"), [(7, 1), (7, 6), (7, 8), (3, 3)])
def test_the_residual_is_the_nearest_whole_number_of_units_at_every_exponent(mantissa: int, bits: int) -> None:
    out = Rounding("nearest", mantissa)
    form, unrounded = ResidualFormat.of(UNROUNDED, out, bits), every_exponent()
    rounded = round_mantissa(unrounded, out)
    units = residual(unrounded, rounded, form)
    whole = two_parts(rounded, units.to(dtype_of_saved([variant_of(UNROUNDED, out, bits)])), form)
    for at in range(len(unrounded)):
        if not rounded[at].isfinite():
            continue
        expected, unit = by_hand(unrounded[at].item(), rounded[at].item(), form)
        assert units[at] == expected, unrounded[at].item()
        assert Fraction(whole[at].item()) == Fraction(rounded[at].item()) + expected * unit  # no rounding in the sum
        if unrounded[at].abs() >= 2.0**-120:
            assert abs(Fraction(whole[at].item()) - Fraction(unrounded[at].item())) <= unit / 2


def variant_of(out_unnormalized: Rounding, out: Rounding, bits: int, **fields: Any) -> AttentionVariant:
    return AttentionVariant(
        **{"out_unnormalized": out_unnormalized, "out": out, "delta": "out_fp32", "out_residual_bits": bits, **fields}
    )


@triton.jit
def split_kernel(unrounded_ptr, out_ptr, units_ptr, sum_ptr, N: tl.constexpr, MANTISSA: tl.constexpr):
    places = tl.arange(0, N)
    b_out = tl.load(out_ptr + places)
    units = kernels_residual(tl.load(unrounded_ptr + places), b_out, MANTISSA)
    units = units.to(units_ptr.dtype.element_ty)
    tl.store(units_ptr + places, units)
    tl.store(sum_ptr + places, kernels_two_parts(b_out, units, MANTISSA))


@pytest.mark.parametrize("beside_fp32", [False, True])
@pytest.mark.parametrize(("mantissa", "bits"), [(7, 1), (7, 6), (7, 8), (1, 8)])
def test_kernels_split_alike_to_the_bit_at_every_exponent(mantissa: int, bits: int, beside_fp32: bool) -> None:
    """But for the residual of an O that is not finite; the sum is that O all the same.

    Beside heads that save an FP32 O the residual is saved in FP32, too.
    """
    out = Rounding("nearest", mantissa)
    form, unrounded = ResidualFormat.of(UNROUNDED, out, bits), torch.full((4096,), math.nan)
    numbers = every_exponent()
    unrounded[: len(numbers)] = numbers
    unrounded[-2:] = torch.tensor([math.inf, -math.inf])
    rounded = round_mantissa(unrounded, out)
    variants = [variant_of(UNROUNDED, out, bits), *([FROM_FILES["flash_delta_fp32"]] if beside_fp32 else [])]
    saved = torch.empty(4096, dtype=dtype_of_saved(variants), device=DEVICE)
    total = torch.empty(4096, device=DEVICE)
    split_kernel[(1,)](unrounded.to(DEVICE), rounded.to(DEVICE), saved, total, N=4096, MANTISSA=form.mantissa)
    units, finite = residual(unrounded, rounded, form), rounded.isfinite()
    assert torch.equal(saved.cpu().float()[finite], units[finite])
    expected = two_parts(rounded, units, form)
    assert torch.equal(total.cpu().nan_to_num(7.0), expected.nan_to_num(7.0))
    assert expected.isinf().sum() >= 2


def test_what_overflows_keeps_infinity_and_what_is_no_number_stays_none() -> None:
    form = ResidualFormat.of(UNROUNDED, NEAREST, 6)
    largest = torch.tensor([3.4e38, -3.4e38, math.inf, math.nan, 0.0])
    out = largest.bfloat16().float()
    units = residual(largest, out, form)
    assert units.tolist() == [-form.largest, form.largest, 0.0, 0.0, 0.0]
    assert torch.equal(two_parts(out, units.to(torch.int8), form).nan_to_num(7.0), out.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("out_unnormalized", "out"),
    [
        (UNROUNDED, NEAREST),
        (NEAREST, NEAREST),
        (Rounding("nearest", 1), NEAREST),
        (Rounding("nearest", 10), Rounding("nearest", 5)),
        (STOCHASTIC, NEAREST),
        (STOCHASTIC, STOCHASTIC),
    ],
    ids=str,
)
@pytest.mark.parametrize("bits", [1, 6, 8])
def test_the_format_holds_every_residual(out_unnormalized: Rounding, out: Rounding, bits: int) -> None:
    """Ō and ℓ over all mantissas: nothing saturates, and little of the range is never used."""
    generator = torch.Generator().manual_seed(1)
    total = 1 + torch.rand(400_000, generator=generator)
    total[:1000] = 1 + torch.arange(1000) * 2.0**-17  # where an ulp of Ō is largest beside Ō
    mass = 1 + torch.rand(400_000, generator=generator)
    words = torch.randint(0, 1 << 32, (2, 400_000), generator=generator)
    rounded = round_mantissa(round_mantissa(total, out_unnormalized, words[0]) / mass, out, words[1])
    form = ResidualFormat.of(out_unnormalized, out, bits)
    unlimited = residual(total / mass, rounded, ResidualFormat(form.mantissa, 1 << 20)).abs().max().item()
    assert 0.8 * form.largest - 1 <= unlimited <= form.largest


def test_bytes_an_element() -> None:
    """Half an ulp of O, and one more of an Ō in BF16, in units of 2^-bits."""
    assert [ResidualFormat.of(UNROUNDED, NEAREST, bits).largest for bits in (1, 7, 8)] == [1, 64, 128]
    assert [ResidualFormat.of(NEAREST, NEAREST, bits).largest for bits in (1, 6, 7)] == [3, 96, 192]
    assert [ResidualFormat.of(Rounding("nearest", 1), NEAREST, bits).largest for bits in (1, 6, 8)] == [3, 65, 258]
    both = [variant_of(NEAREST, NEAREST, 6), variant_of(NEAREST, NEAREST, 8)]
    assert [dtype_of_saved([one]) for one in both] == [torch.int8, torch.int16]
    assert dtype_of_saved(both) == torch.int16
    assert dtype_of_saved([*both, FROM_FILES["flash_delta_fp32"], FROM_FILES["flash_bf16"]]) == torch.float32


@pytest.mark.parametrize(("mantissa", "bits"), [(7, 1), (7, 2), (7, 3), (1, 2), (1, 3)], ids=lambda number: str(number))
def test_what_two_parts_leave_of_the_error_goes_against_the_error(mantissa: int, bits: int) -> None:
    """E[ε·e] = −½·E[e²], and in BF16 E[e²] = 4^-bits·E[ε²]: docs/findings/mechanism.md."""
    unrounded = 1 + torch.rand(400_000, generator=torch.Generator().manual_seed(bits))
    out, coarse = torch.tensor(with_mantissa(unrounded.numpy(), mantissa)), Rounding("nearest", mantissa)
    form = ResidualFormat.of(UNROUNDED, coarse, bits)
    error = (out - unrounded).double()
    left = (two_parts(out, residual(unrounded, out, form), form) - unrounded).double()
    assert (error * left).mean() / left.square().mean() == pytest.approx(-0.5, abs=0.05)
    if mantissa == 7:  # with 1 bit a quarter of all values round up to 2, where the unit is twice as large
        assert left.square().mean() / error.square().mean() == pytest.approx(4.0**-bits, rel=0.03)


@pytest.mark.parametrize("name", ["flash_delta_split", "flash_fixed"])
def test_delta_of_two_parts_is_within_their_last_place_of_the_unrounded_o(name: str) -> None:
    """Through dQ along the feature of K that is 1 and that Q does not see: α·Σⱼ dSᵢⱼ = α·rowsum(dO∘(O* − O of δ))."""
    q, k, v, grad_out = (x.float().cpu() for x in inputs(65, 32))
    k[..., -1], q[..., -1] = 1.0, 0.0
    fields: dict[str, Any] = {"probs": UNROUNDED, "grad_scores": UNROUNDED, "scores": UNROUNDED}
    variant = dataclasses.replace(FROM_FILES[name], **fields)
    grad_q = run_reference(q, k, v, grad_out, variant)["grad_q"][..., -1].double() * 32**0.5
    unrounded = exact_attention(q, k, v, grad_out)["out"].abs()
    last_place = 2.0 ** unrounded.log2().floor() * 2.0**-13
    assert (grad_q.abs() <= (grad_out.double().abs() * last_place).sum(-1) + 1e-5).all()
    coarse = run_reference(q, k, v, grad_out, dataclasses.replace(variant, delta="out", out_residual_bits=None))
    assert coarse["grad_q"][..., -1].norm() * 32**0.5 > 20 * grad_q.norm()


@pytest.mark.parametrize("bits", [3, 8])
def test_kernels_save_the_residual_that_the_reference_saves(bits: int) -> None:
    tensors, variant = inputs(65, 32), variant_of(NEAREST, NEAREST, bits, scores=NEAREST)
    q, k, v, _ = tensors
    seed_and_step = torch.tensor([5, 6], device=DEVICE)
    out, _, saved, _ = launch.flash_fwd(q, k, v, variant, layer=2, seed_and_step=seed_and_step)
    expected = reference.flash_fwd(q.cpu(), k.cpu(), v.cpu(), variant, noise_key(q.cpu()))
    assert saved.dtype == expected[2].dtype == (torch.int8 if bits == 3 else torch.int16)
    same = (out.cpu() == expected[0]).numpy()
    assert same.mean() > 0.99
    difference = np.abs(saved.cpu().numpy().astype(int) - expected[2].numpy().astype(int))[same]
    assert difference.max() <= max(1, 2 ** (bits - 6))  # FP32 sums in another order
    assert bits > 3 or (difference > 0).mean() < 0.02


@pytest.mark.slow
def test_heads_that_save_another_form_share_a_launch() -> None:
    """An FP32 O of one head and a residual of the other: each head as if its variant were everywhere."""
    tensors = inputs(65, 32)
    split, whole = FROM_FILES["flash_delta_split"], FROM_FILES["flash_delta_fp32"]
    mixed = dataclasses.replace(split, heads=(2,), elsewhere=whole)
    results = run("kernels", tensors, mixed)
    for head, name in ((1, "flash_delta_split"), (0, "flash_delta_fp32")):
        alone = computed(name, 65, 32)[0]
        assert torch.equal(results["grad_q"][:, head], alone["grad_q"][:, head])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"out_residual_bits": 0, "delta": "out_fp32"}, "give 1 to 8"),
    ({"out_residual_bits": 9, "delta": "out_fp32"}, "give 1 to 8"),
    ({"out_residual_bits": 3}, "set attn.delta=out_fp32"),
    ({"out_residual_bits": 3, "delta": "out_fp32", "out": UNROUNDED}, "does not fit BF16"),
    ({"out_residual_bits": 3, "delta": "out_fp32", "denominator": NEAREST}, "once each"),
    (
        {"out_residual_bits": 3, "delta": "out_fp32", "out_unnormalized": NEAREST,
         "out_unnormalized_when": "per_block"},
        "once each",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_has_no_bounded_residual_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        AttentionVariant(**fields)
    assert "\n" not in str(error.value)
