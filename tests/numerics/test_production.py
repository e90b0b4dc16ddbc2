"""Production attentions and what stabilises them, against FP64."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck

import flashpoint
from flashpoint.drop_in import variant_of
from flashpoint.errors import UserError
from flashpoint.numerics.dispatch import attention
from flashpoint.numerics.production import (
    PRODUCTION,
    ProductionAttention,
    _opaque,
    _opaque_backward,
    capped,
    make_ready,
    refuse_missing,
)
from flashpoint.numerics.stabilizers import center, in_fp16, power_of_two
from flashpoint.numerics.variant import AttentionVariant
from tests import releases

KEY = torch.zeros(2, dtype=torch.int64)
CPU = torch.device("cpu")
COUNT = itertools.count()
"""An operator's name is taken for good."""


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (torch.randn(2, 3, 40, 16, generator=generator, dtype=torch.float64) for _ in range(4))
    return q, k + 3.0, v - 2.0, (grad_out * 1e-6).to(dtype)


def gradients(variant: AttentionVariant, dtype: torch.dtype) -> list[Tensor]:
    """Return O, dQ, dK and dV [B, H, T, d]."""
    *given, grad_out = inputs(dtype)
    q, k, v = (x.to(dtype).requires_grad_() for x in given)
    out = attention(q, k, v, variant, layer=1, seed_and_step=KEY)
    return [out, *torch.autograd.grad(out, (q, k, v), grad_out)]


def exact(dtype: torch.dtype) -> list[Tensor]:
    """Return the same in FP64, of inputs rounded to ``dtype``."""
    *given, grad_out = inputs(dtype)
    q, k, v = (x.to(dtype).double().requires_grad_() for x in given)
    scores = (q @ k.mT / math.sqrt(16)).masked_fill(torch.ones(40, 40).triu(1).bool(), -math.inf)
    out = scores.softmax(-1) @ v
    return [out, *torch.autograd.grad(out, (q, k, v), grad_out.double())]


def relative_errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [
        float((a.detach().double() - b.detach()).norm() / b.detach().norm()) for a, b in zip(found, wanted, strict=True)
    ]


@pytest.mark.parametrize("kernel", ["sdpa", "sdpa_flash", "sdpa_math"])
@pytest.mark.parametrize("shift", ["none", "sequence", "sequence_detached", "batch_detached"])
def test_shifts_are_invisible_to_exact_arithmetic(kernel: str, shift: str) -> None:
    """O and all gradients agree with FP64 of the unshifted inputs as far as FP32 sums go."""
    shifted = replace(variant_of(kernel), shift_keys=shift, shift_values=shift)
    assert max(relative_errors(gradients(shifted, torch.float32), exact(torch.float32))) < 3e-5


def test_the_gradient_through_the_mean_makes_the_gradient_of_keys_sum_to_zero() -> None:
    grad_k = gradients(replace(variant_of("sdpa_math"), shift_keys="sequence"), torch.float32)[2]
    assert float(grad_k.sum(2).abs().max() / grad_k.abs().sum(2).max()) < 1e-6


def test_fp16_inside_rounds_eight_times_finer() -> None:
    """The attention itself sees an O with three more mantissa bits; what leaves is rounded to BF16 once."""
    seen = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return seen[-1]

    q, k, v, _ = (x.bfloat16() for x in inputs())
    out = in_fp16(attend, q, k, v)
    wanted = exact(torch.bfloat16)[0]
    inside, plain = relative_errors([seen[0], attend(q, k, v)], [wanted, wanted])
    assert seen[0].dtype == torch.float16
    assert out.dtype == torch.bfloat16
    assert 6 < plain / inside < 10
    errors = relative_errors(
        gradients(replace(variant_of("sdpa_math"), fp16_inside=True), torch.bfloat16), exact(torch.bfloat16)
    )
    assert max(errors) < 2**-8


def test_fp16_inside_stays_fp16_under_autocast() -> None:
    """Autocast casts the inputs of PyTorch's attention to BF16, whatever they are."""
    seen = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return seen[-1]

    q, k, v, _ = (x.bfloat16() for x in inputs())
    with torch.autocast("cpu", torch.bfloat16):
        out = in_fp16(attend, q, k, v)
        assert torch.nn.functional.scaled_dot_product_attention(q.half(), k.half(), v.half()).dtype == torch.bfloat16
    assert seen[0].dtype == torch.float16
    assert out.dtype == torch.bfloat16


@pytest.mark.slow
@releases.traces_flex
def test_flexattention_is_traced_with_and_without_a_mask_that_is_there() -> None:
    """Of a length that was never seen, and of one that was."""
    q, k, v, _ = (x.float() for x in inputs())
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    for ready in (False, True):
        if ready:
            make_ready("flex", q.shape[2], CPU)
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, backend="aot_eager")
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, variant_of("flex"), layer=1, seed_and_step=KEY)

        for _ in range(2):
            torch.testing.assert_close(attend(q, k, v), wanted)


@pytest.mark.slow
@releases.traces_flex
@pytest.mark.usefixtures("flex_on_a_cpu")
@pytest.mark.parametrize("cap", [0.5, 3.0, 30.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_flexattention_caps_scores_before_the_mask(cap: float, compiled: bool) -> None:
    """Gemma 2's formula in plain FP64 is the oracle, with two heads of queries to each head of keys."""
    q, k, v, grad_out = inputs()
    q = torch.cat([q, 3 * q.flip(1)], 1).requires_grad_()
    k, v, grad_out = k.requires_grad_(), v.requires_grad_(), torch.cat([grad_out, grad_out], 1)

    score_mod = capped(cap)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, variant_of("flex"), layer=1, seed_and_step=KEY, score_mod=score_mod)

    out = (torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend)(q, k, v)
    found = [out, *torch.autograd.grad(out, (q, k, v), grad_out)]
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = cap * (q @ keys.mT / math.sqrt(16) / cap).tanh()
    wanted = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), -math.inf).softmax(-1) @ values
    assert max(relative_errors(found, [wanted, *torch.autograd.grad(wanted, (q, k, v), grad_out)])) < 1e-12


@pytest.mark.parametrize("size", [1e-30, 3e-7, 1.0, 1.9e4])
def test_fp16_inside_does_not_depend_on_the_size_of_the_gradient(size: float) -> None:
    """Powers of two come out again: gradients of a dO times 2^k are 2^k times the gradients, bit for bit."""
    grad_out = torch.randn(1, 1, 32, 8, generator=torch.Generator().manual_seed(1)).bfloat16() * 2.0 ** round(
        math.log2(size)
    )
    factor = power_of_two(grad_out)
    assert math.log2(float(factor)) == round(math.log2(float(factor)))
    largest = float(grad_out.abs().max()) * 32 * float(factor)
    assert 2**14 <= largest < 2**15 or size < 1e-25  # FP32 has no larger power of two


def test_every_bf16_number_becomes_the_nearest_fp16_number_or_the_largest() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    seen = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.extend((q, k, v))
        return q + k + v

    row = every.reshape(1, 1, 256, 256)
    in_fp16(attend, row, row, row)
    wanted = np.clip(every.double().numpy(), -65504, 65504).astype(np.float16)
    assert all(np.array_equal(x.numpy().reshape(-1), wanted, equal_nan=True) for x in seen)


@pytest.mark.parametrize("exponent", [-60, -3, 0, 20, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_fp16_gradient_comes_back_rounded_once(dtype: torch.dtype, exponent: int) -> None:
    """dO is 2^−exponent, so that the kernel's is multiplied by 2^exponent times 2^k, and its gradients divided."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = every[every.isfinite()][: 2**15].reshape(1, 1, 128, 256)
    factors = []

    class Gives(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, q: Tensor) -> Tensor:
            return q.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            factors.append(float(grad.flatten()[0]))
            return finite

    grad_out = torch.full(finite.shape, 2.0**-exponent if dtype != torch.float16 else 2.0**-3).to(dtype)
    q = torch.zeros(finite.shape, dtype=dtype, requires_grad=True)
    (found,) = torch.autograd.grad(in_fp16(lambda q, k, v: Gives.apply(q), q, q.detach(), q.detach()), q, grad_out)
    factor = factors[0] / float(grad_out.flatten()[0])
    exact = finite.double() / factor
    big = exact.abs() >= torch.finfo(dtype).tiny
    assert torch.equal(found[big], exact.to(dtype)[big])


@pytest.mark.parametrize("values", [0.0, math.inf, math.nan])
def test_a_gradient_without_a_size_is_not_scaled(values: float) -> None:
    assert float(power_of_two(torch.full((1, 1, 4, 2), values))) == 1.0


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    """The stabilisers are traced without a break, and give the bits of eager mode."""
    variant = replace(variant_of("sdpa_math"), fp16_inside=True, shift_keys="sequence", shift_values="batch_detached")
    *given, grad_out = inputs(torch.bfloat16)
    results = []
    for compiled in (False, True):
        q, k, v = (x.bfloat16().requires_grad_() for x in given)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, variant, layer=1, seed_and_step=KEY)

        function = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
        out = function(q, k, v)
        results.append([out, *torch.autograd.grad(out, (q, k, v), grad_out)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_drop_in_takes_production_attentions_with_fewer_heads_of_keys() -> None:
    q, k, v, _ = (x.float() for x in inputs())
    out = flashpoint.attention(q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True, variant="sdpa_math")
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k[:, :1].expand_as(q), v[:, :1].expand_as(q), is_causal=True
    )
    torch.testing.assert_close(out, wanted)


def test_the_mean_is_of_the_heads_own_keys() -> None:
    k = inputs()[1].float()
    torch.testing.assert_close(center(k, "batch_detached"), k.mean((0, 2), keepdim=True))
    assert center(k, "sequence").shape == (2, 3, 1, 16)


@pytest.mark.slow
def test_a_librarys_two_passes_are_one_attention_eager_and_compiled() -> None:
    """A library with functions for each pass, as FlashAttention-4 and xformers have them: [B, T, H, d] and L."""

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
        return out.transpose(1, 2).contiguous(), q.new_zeros(q.shape[:3], dtype=torch.float32)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, _: None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert lse.shape == (out.shape[0], out.shape[2], out.shape[1])
        q, k, v, out, grad = (x.transpose(1, 2) for x in (q, k, v, out, grad))
        scores = q @ k.mT * scale + torch.full((q.shape[2],) * 2, -math.inf).triu(1)
        probs = scores.softmax(-1)
        grad_scores = probs * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
        grad_q, grad_k, grad_v = grad_scores @ k, grad_scores.mT @ q, probs.mT @ grad
        return tuple(x.transpose(1, 2).contiguous() for x in (grad_q, grad_k, grad_v))  # type: ignore[return-value]

    attend = _opaque("of_a_test", forward, _opaque_backward("of_a_test", backward))
    *given, grad_out = inputs()
    wanted = [x.float().requires_grad_() for x in given]
    out = F.scaled_dot_product_attention(*wanted, is_causal=True, scale=0.3)
    expected = [out, *torch.autograd.grad(out, wanted, grad_out.float())]
    torch._dynamo.reset()
    for call in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        found = [x.float().requires_grad_() for x in given]
        out = call(*found, True, 0.3)
        for one, other in zip((out, *torch.autograd.grad(out, found, grad_out.float())), expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("returned", ["as its input", "contiguous", "padded"])
@pytest.mark.parametrize("given", ["[B, T, H, d]", "[B, H, T, d]", "fused"])
def test_a_compiler_is_told_the_layout_that_gradients_have(given: str, returned: str) -> None:
    """So they are copied only where a library gives them another than that of its input."""
    layouts = {
        "[B, T, H, d]": torch.randn(2, 8, 3, 4),
        "[B, H, T, d]": torch.randn(2, 3, 8, 4).transpose(1, 2),
        "fused": torch.randn(2, 8, 3, 12)[..., :4],
    }
    kept = []

    def backward(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        made = {
            "as its input": torch.empty_like,
            "contiguous": lambda x: torch.empty(x.shape),
            "padded": lambda x: torch.empty(2, 16, 3, 4)[:, :8],
        }
        kept[:] = [made[returned](x).copy_(x) for x in (q, k, v)]
        return kept[0], kept[1], kept[2]

    bwd = _opaque_backward(f"laid_out_{next(COUNT)}", backward)
    x = layouts[given]
    args = (x.clone(), *(x for _ in range(3)), x.clone(), torch.zeros(2, 3, 8), None, True, None)
    opcheck(bwd, args, test_utils=("test_faketensor",))  # type: ignore[arg-type]
    found = bwd(*args)
    assert all(torch.equal(grad, x) for grad in found)
    if returned == "as its input":
        assert [grad.data_ptr() for grad in found] == [grad.data_ptr() for grad in kept]


@pytest.mark.parametrize(
    ("kernel", "deterministic", "names"),
    [
        ("flex", True, "GPU"),
        ("fa4", True, "flash-attn-4"),
        ("flash_attn", True, "flash-attn"),
        ("xformers", True, "xformers"),
        ("sdpa_cudnn", False, "GPU"),
    ],
)
def test_what_cannot_run_here_is_refused(kernel: str, deterministic: bool, names: str) -> None:
    with pytest.raises(UserError, match=rf"^attn={kernel}_fixed: .*{names}"):
        refuse_missing(kernel, CPU, deterministic, f"{kernel}_fixed")


def test_a_library_that_was_built_for_another_pytorch_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Tensor:
        raise NotImplementedError("No operator found\n  its extension cannot be loaded")

    monkeypatch.setitem(PRODUCTION, "xformers", ProductionAttention(fails, package="numpy"))
    with pytest.raises(UserError, match=r"attn=xformers: numpy does not compute here \(.*No operator found.*sdpa"):
        refuse_missing("xformers", CPU, True, "xformers")


def test_cudnn_asks_for_a_run_without_determinism() -> None:
    with pytest.raises(UserError, match=r"train\.deterministic=false"):
        refuse_missing("sdpa_cudnn", torch.device("cuda"), True, "sdpa_cudnn")


def test_every_production_attention_has_a_file() -> None:
    assert all(variant_of(name).kernel == name for name in PRODUCTION)


@pytest.mark.parametrize(
    ("choices", "names"),
    [
        ({"kernel": "flash", "fp16_inside": True}, "fp16_inside"),
        ({"kernel": "flex", "heads": (1,), "elsewhere": AttentionVariant()}, "attn.heads"),
        ({"heads": (1,), "shift_keys": "sequence", "elsewhere": AttentionVariant()}, "attn.heads"),
    ],
)
def test_contradictions_are_refused(choices: dict, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        AttentionVariant(**choices)
