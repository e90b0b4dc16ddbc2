"""δ corrected from outside, by a gradient of L: FlexAttention's and FlashAttention-4's backward passes."""

from __future__ import annotations

import contextlib
import math
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from flashpoint.drop_in import variant_of
from flashpoint.numerics import outside_delta, production
from flashpoint.numerics.choices import NEAREST, UNROUNDED, ResidualFormat
from flashpoint.numerics.contradictions import CORRECTED
from flashpoint.numerics.deltas import residual
from flashpoint.numerics.dispatch import attention
from flashpoint.numerics.variant import AttentionVariant
from tests import releases

KEY = torch.zeros(2, dtype=torch.int64)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T, D, SCALE = 96, 16, 0.3


def inputs(heads_of_keys: int = 2) -> tuple[list[Tensor], Tensor]:
    """q, k and v, whose O has a mean, and dO, all BF16."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (
        torch.randn(2, heads, T, D, generator=generator) for heads in (2, heads_of_keys, heads_of_keys, 2)
    )
    return [q.bfloat16(), k.bfloat16(), (v + 1.0).bfloat16()], grad_out.bfloat16()


def exact(
    given: list[Tensor], grad_out: Tensor, grad_logsumexp: Tensor | None = None, causal: bool = True
) -> list[Tensor]:
    """Return O, L, dQ, dK and dV in FP64, by autograd alone."""
    q, k, v = (x.double().requires_grad_() for x in given)
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    scores = (q @ keys.mT * SCALE).masked_fill(later & causal, -math.inf)
    out, logsumexp = scores.softmax(-1) @ values, scores.logsumexp(-1)
    loss = (out * grad_out.double()).sum()
    if grad_logsumexp is not None:
        loss = loss + (logsumexp * grad_logsumexp.double()).sum()
    return [x.detach() for x in (out, logsumexp, *torch.autograd.grad(loss, (q, k, v)))]


class FA4:
    """A stand-in for FlashAttention-4's backward pass: FP64 of what it is given, [B, T, H, d]."""

    def __init__(self) -> None:
        self.delta = torch.empty(0)
        self.given: dict[str, Any] = {}

    def _flash_attn_fwd(self, *_: object, **__: object) -> None:
        raise AssertionError("one forward pass is enough")

    def _flash_attn_bwd(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float,
        causal: bool, *, deterministic: bool, dlse: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        assert deterministic
        assert all(x.stride(-1) == 1 for x in (q, k, v, out, dout, lse))  # it copies what it cannot read
        assert dlse is not None
        assert dlse.dtype == lse.dtype == torch.float32
        groups = q.shape[2] // k.shape[2]
        wide = [x.repeat_interleave(groups, 2) for x in (k, v)]
        q_, k_, v_, o, g = (x.transpose(1, 2).double() for x in (q, *wide, out, dout))
        self.delta = (g * o).sum(-1) - dlse.double()
        later = torch.ones(T, T, dtype=torch.bool).triu(1)
        probs = (q_ @ k_.mT * softmax_scale - lse.double()[..., None]).exp().masked_fill(later & causal, 0.0)
        grad_scores = probs * (g @ v_.mT - self.delta[..., None]) * softmax_scale
        self.grad_scores = grad_scores
        grads = grad_scores @ k_, grad_scores.mT @ q_, probs.mT @ g
        grads = (grads[0], *(x.unflatten(1, (-1, groups)).sum(2) for x in grads[1:]))
        return tuple(x.to(q.dtype).transpose(1, 2) for x in grads)  # type: ignore[return-value]


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch) -> FA4:
    stand_in = FA4()
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", stand_in)  # type: ignore[arg-type]
    return stand_in


def results(name: str, given: list[Tensor], grad_out: Tensor, causal: bool = True, compiled: bool = False) -> Any:
    """Return O, dQ, dK and dV of a variant."""
    variant = variant_of(name)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, variant, layer=1, seed_and_step=KEY, causal=causal, scale=SCALE)

    q, k, v = (x.detach().requires_grad_() for x in given)
    torch._dynamo.reset()
    out = (torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend)(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)]


@pytest.mark.slow
@releases.traces_flex
@pytest.mark.usefixtures("flex_on_a_cpu")
@pytest.mark.parametrize("causal", [True, False])
def test_flexattention_takes_the_gradient_of_a_natural_logarithm_from_delta(causal: bool) -> None:
    """L, and gradients of a loss of O and L, are those of FP64."""
    generator = torch.Generator().manual_seed(1)
    given, grad_out = inputs()
    grad_logsumexp = torch.randn(2, 2, T, generator=generator, dtype=torch.float64)
    q, k, v = (x.double().requires_grad_() for x in given)
    found = production.flex_with_logsumexp(q, k, v, causal, SCALE)
    grads = torch.autograd.grad(found, (q, k, v), (grad_out.double(), grad_logsumexp))
    for one, wanted in zip((*found, *grads), exact(given, grad_out, grad_logsumexp, causal), strict=True):
        torch.testing.assert_close(one.detach(), wanted)


def test_without_a_scale_it_is_that_of_the_features(fa4: FA4) -> None:
    given, _ = inputs()
    variant = variant_of("fa4_fixed")
    outs = [attention(*given, variant, layer=1, seed_and_step=KEY, scale=scale) for scale in (None, D**-0.5)]
    assert torch.equal(*outs)


def slope(error: Tensor, rounding: Tensor) -> float:
    """Return by how much an error goes with another one, both [B, H, T], over all rows."""
    return float((error * rounding).sum() / rounding.square().sum())


@pytest.mark.slow
@releases.traces_flex
@pytest.mark.usefixtures("flex_on_a_cpu")
@pytest.mark.parametrize(("name", "wanted"), [("flex", 1.0), ("flex_fixed", 0.0)])
def test_delta_of_flexattention_follows_the_rounding_of_o_until_it_is_corrected(name: str, wanted: float) -> None:
    """Uncorrected the slope is 1. A feature of K that is 1 where Q and V are 0 makes dQ of it α·Σⱼ dSᵢⱼ, which is −α
    times the error of δ."""
    (q, k, v), grad_out = inputs()
    q[..., -1], k[..., -1], v[..., :] = 0.0, 1.0, v + 3.0
    v[..., -1] = 0.0
    out, grad_q, *_ = results(name, [q, k, v], grad_out)
    rounding = (grad_out.double() * (out.double() - exact([q, k, v], grad_out)[0])).sum(-1)
    assert slope(-grad_q[..., -1].double() / SCALE, rounding) == pytest.approx(wanted, abs=0.1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads_of_keys", [1, 2])
def test_flash_attention_4_gets_the_delta_of_o_before_its_rounding(fa4: FA4, heads_of_keys: int, causal: bool) -> None:
    given, grad_out = inputs(heads_of_keys)
    found, wanted = results("fa4_fixed", given, grad_out, causal), exact(given, grad_out, causal=causal)
    delta = (grad_out.double() * wanted[0]).sum(-1)
    rounding = (grad_out.double() * (found[0].double() - wanted[0])).sum(-1)
    assert slope(fa4.delta - delta, rounding) == pytest.approx(0.0, abs=0.1)  # of P̄'s rounding in both
    for one, other in zip(found, [wanted[0], *wanted[2:]], strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 2**-7


@pytest.mark.parametrize("bits", [1, 6, 8, None])
def test_the_delta_is_exact_to_the_bits_of_the_residual(fa4: FA4, bits: int | None) -> None:
    """With Q of zeros every P̄ is 1, so that the rounding of O is the only one. Rows of dS sum to zero then."""
    (q, k, v), grad_out = inputs()
    q.zero_()
    variant = replace(variant_of("fa4_fixed"), out_residual_bits=bits)
    given = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*given, variant, layer=1, seed_and_step=KEY, scale=SCALE)
    torch.autograd.grad(out, given, grad_out)
    whole = exact([q, k, v], grad_out)[0]
    ulps = 2.0 ** (whole.abs().log2().floor() - 7)
    unit = 2.0 ** -(bits or 16)
    allowed = (grad_out.double().abs() * ulps * unit).sum(-1) + 1e-5
    assert bool((fa4.grad_scores.sum(-1).abs() / SCALE <= allowed).all())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["by token", "by head", "every other feature", "repeated", "at an odd address"])
@pytest.mark.parametrize("bits", [1, 6, 8, None])
def test_the_kernel_of_the_gradient_of_l(bits: int | None, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every layout of dO, with a last block that is not full, against FP64."""
    launch = pytest.importorskip("flashpoint.numerics.grad_logsumexp_launch")
    if DEVICE == "cpu":
        monkeypatch.setattr(launch, "on_device_of", lambda _: contextlib.nullcontext())
    generator = torch.Generator().manual_seed(2)
    shape = 2, 3, T, 64
    grad_out = {
        "by token": torch.randn(2, T, 3, 64, generator=generator).bfloat16().transpose(1, 2),
        "by head": torch.randn(shape, generator=generator).bfloat16(),
        "every other feature": torch.randn(2, 3, T, 128, generator=generator).bfloat16()[..., ::2],
        "repeated": torch.randn(2, 1, T, 64, generator=generator).bfloat16().expand(shape),
        "at an odd address": torch.randn(2, 3, T, 65, generator=generator).bfloat16()[..., 1:],
    }[layout].to(DEVICE)
    whole = torch.randn(2, T, 3, 64, generator=generator).transpose(1, 2).to(DEVICE)
    out, saved, mantissa = whole.bfloat16(), whole, 0
    if bits is not None:
        form = ResidualFormat.of(UNROUNDED, NEAREST, bits)
        saved, mantissa = (
            residual(whole, out.float(), form).to(torch.int8 if form.n_bytes == 1 else torch.int16),
            7 + bits,
        )
        whole = out.double() + saved.double() * 2.0 ** (out.double().abs().log2().floor() - mantissa)
    found = launch.grad_logsumexp(grad_out, out, saved, mantissa)
    wanted = (grad_out.double() * (out.double() - whole.double())).sum(-1)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_compiled_equals_eager(fa4: FA4) -> None:
    given, grad_out = inputs()
    both = [results("fa4_fixed", given, grad_out, compiled=compiled) for compiled in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.slow
@releases.traces_flex
@pytest.mark.usefixtures("flex_on_a_cpu")
def test_flexattention_compiled_equals_eager() -> None:
    given, grad_out = inputs()
    both = [results("flex_fixed", given, grad_out, compiled=compiled) for compiled in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    given, grad_out = inputs()
    with pytest.raises(ValueError, match=r"attn\.delta=out_fp32: .*kernel=fa4.* bfloat16, not float"):
        results("fa4_fixed", [x.to(dtype) for x in given], grad_out)


@pytest.mark.parametrize(
    ("choices", "names"),
    [
        ({"kernel": "sdpa_flash", "delta": "out_fp32"}, r"attn\.delta=out_fp32: kernel=sdpa_flash .*flex_fixed"),
        ({"kernel": "flex", "delta": "p_dp"}, r"attn\.delta=p_dp: kernel=flex"),
        ({"kernel": "fa4", "delta": "out_fp32", "fp16_inside": True}, r"attn\.fp16_inside: .*BF16"),
    ],
)
def test_contradictions_are_refused(choices: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        AttentionVariant(**choices)


def test_every_kernel_that_can_be_corrected_is_known() -> None:
    assert tuple(outside_delta.CORRECTED) == CORRECTED
