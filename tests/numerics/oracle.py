"""Attention written a second time, in NumPy: FP32 step by step with ml_dtypes' BF16, and FP64 softmax.

The FP32 oracle walks one head, one query row and one key block at a time. Its sums run in the order of the
keys, so it equals another implementation to the bit only on inputs whose sums are exact in any order.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashpoint.numerics.choices import NEAREST, UNROUNDED
from flashpoint.numerics.reference import flash_bwd, flash_fwd
from flashpoint.numerics.rounding import NoiseKey
from flashpoint.numerics.variant import AttentionVariant

F32 = NDArray[np.float32]
NOTHING_ROUNDED: dict[str, Any] = {"probs": UNROUNDED, "out": UNROUNDED, "grad_scores": UNROUNDED}


def bf16(x: Any) -> Any:
    """float32, array or scalar, to nearest even."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def with_mantissa(x: Any, bits: int) -> Any:
    """float32, array or scalar, normal numbers, to ``bits`` mantissa bits by NumPy's half-to-even ``rint`` in FP64."""
    fraction, exponent = np.frexp(np.float64(x))
    return np.float32(np.ldexp(np.rint(np.ldexp(fraction, bits + 1)), exponent - bits - 1))


def noise_key(q: Tensor, seed: int = 0, step: int = 0, layer: int = 1) -> NoiseKey:
    return NoiseKey(torch.tensor([seed, step]), layer, torch.arange(q.shape[1]), q.shape[1], q.shape[0])


def run_reference(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, variant: AttentionVariant) -> dict[str, Tensor]:
    """O, L and the gradients of the implementation under test."""
    noise = noise_key(q)
    saved = flash_fwd(q, k, v, variant, noise)
    grads = flash_bwd(grad_out, q, k, v, *saved, variant, noise)
    return dict(zip(("out", "logsumexp", "grad_q", "grad_k", "grad_v"), (*saved[:2], *grads), strict=True))


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, causal: bool = True, scale: float | None = None
) -> dict[str, Tensor]:
    """The same in FP64 from the definition of softmax attention."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    out = scores.softmax(-1) @ v
    out.backward(grad_out.double())
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return {
        "out": out.detach(),
        "logsumexp": scores.detach().logsumexp(-1),
        "grad_q": q.grad,
        "grad_k": k.grad,
        "grad_v": v.grad,
    }


def injected_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    size: float,
    z: Tensor,
    *,
    into: str = "both",
    center_grad_q: bool = False,
) -> dict[str, Tensor]:
    """O, δ and the gradients in FP64 where δ_i += size·|dO_i|·|O_i|·z_i; ``z`` is [B, H, T].

    ``into`` is the gradient whose δ has that, dQ's or dK's, or both.
    ``center_grad_q`` takes (Σ_j dS_ij)·k̄ off dQ_i, which is Σ_j dS_ij (K_j − k̄).
    """
    q, k, v, grad_out = (x.double() for x in (q, k, v, grad_out))
    scale = q.shape[-1] ** -0.5
    p = (q @ k.mT * scale).masked_fill(torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1), -math.inf)
    p = p.softmax(-1)
    out = p @ v
    delta = (grad_out * out).sum(-1)
    erring = delta + size * grad_out.square().sum(-1).sqrt() * out.square().sum(-1).sqrt() * z
    grad_s, grad_s_of_k = (
        scale * p * (grad_out @ v.mT - (erring if into in ("both", of) else delta)[..., None])
        for of in ("grad_q", "grad_k")
    )
    grad_q = grad_s @ k
    if center_grad_q:
        grad_q = grad_q - grad_s.sum(-1, keepdim=True) * k.mean(-2, keepdim=True)
    return {"out": out, "delta": erring, "grad_q": grad_q, "grad_k": grad_s_of_k.mT @ q, "grad_v": p.mT @ grad_out}


def exponential_fp64(scores: Tensor, shift: Tensor) -> Tensor:
    """Stands in for the implementation's exponential, whose last bit depends on the CPU's vector unit."""
    return torch.exp((scores - shift).double()).float()


def exp(x: np.float32) -> np.float32:
    return np.float32(np.exp(np.float64(x)))


def numpy_attention(q: F32, k: F32, v: F32, grad_out: F32, **choices: Any) -> dict[str, F32]:
    """One head, [T, d] float32 each, block_k = 1: every step is one FP32 operation on one key.

    ``choices`` has the rounding points that round, all to nearest, and may set ``out_unnormalized_when``,
    ``denominator_floor`` and ``masked_blocks``.
    """

    def point(name: str, x: Any) -> Any:
        rounding = choices.get(name, UNROUNDED)
        if rounding.mode == "none":
            return x
        return bf16(x) if rounding == NEAREST else with_mantissa(x, rounding.bits)

    when, floor = choices.get("out_unnormalized_when", "final"), np.float32(choices.get("denominator_floor", 0))
    T, d = q.shape
    scale = np.float32(d**-0.5)
    out, maxima, masses = np.zeros((T, d), np.float32), np.zeros(T, np.float32), np.zeros(T, np.float32)
    for i in range(T):
        m, mass = np.float32(-np.inf), np.float32(0)
        unnormalized = np.zeros(d, np.float32)
        for j in range(i + 1):
            s = point("scores", np.float32(q[i] @ k[j]) * scale)
            m_new = max(m, s)
            p, rescale = exp(s - m_new), exp(m - m_new)
            p_operand = point("probs", p)
            mass = mass * rescale + max(p_operand if choices.get("normalizer") == "rounded" else p, floor)
            product = p_operand * v[j]
            if when == "per_product":
                product = point("out_unnormalized", product)
            unnormalized = unnormalized * rescale + product
            if when == "per_block":
                unnormalized = point("out_unnormalized", unnormalized)
            m = m_new
        if choices.get("masked_blocks") == "count":
            for _ in range(i + 1, T):
                mass += floor
        if when == "final":
            unnormalized = point("out_unnormalized", unnormalized)
        mass = point("denominator", mass)
        out[i] = point("out", unnormalized / mass)
        maxima[i], masses[i] = m, mass
    logsumexp = maxima + torch.from_numpy(masses).log().numpy()  # the logarithm is not under test
    grad_q, grad_k, grad_v = (np.zeros((T, d), np.float32) for _ in range(3))
    delta = np.array([np.float32(grad_out[i] @ out[i]) for i in range(T)])
    for j in range(T):
        for i in range(j, T):
            s = point("scores", np.float32(q[i] @ k[j]) * scale)
            p = exp(s - logsumexp[i])
            grad_p = point("grad_probs", np.float32(grad_out[i] @ v[j]))
            grad_s = point("grad_scores", p * (grad_p - delta[i]))
            grad_v[j] += point("grad_blocks", point("probs", p) * grad_out[i])
            grad_q[i] += point("grad_blocks", grad_s * k[j])
            grad_k[j] += point("grad_blocks", grad_s * q[i])
    return {
        "out": out, "logsumexp": logsumexp, "grad_q": grad_q * scale, "grad_k": grad_k * scale, "grad_v": grad_v,
    }  # fmt: skip
