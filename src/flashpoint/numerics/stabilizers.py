"""What is put in front of an attention that stays as it is, and exact arithmetic cannot see.

Shapes: B sequences, H heads, H_kv heads of keys and values, T tokens, d features per head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from flashpoint.numerics.choices import Shift
from flashpoint.numerics.layout import is_eager
from flashpoint_kernels.codes import FACTOR_AT, FP16_MAX, STATES

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [B, H, T, d], k and v [B, H_kv, T, d] to O [B, H, T, d]."""


_NOWHERE = contextlib.nullcontext()


def stabilized(attention: Attention, shift_keys: Shift, shift_values: Shift, fp16_inside: bool) -> Attention:
    """Return an attention with what stabilises it in front.

    Args:
        attention: of any library.
        shift_keys: K − c instead of K. Softmax does not see one vector c a head.
        shift_values: attention(q, k, v − c) + c: the rows of P sum to 1.
        fp16_inside: q, k, v and dO in FP16, dO scaled by a power of two, and O and the gradients back in the inputs'
            dtype. FP16 rounds O to 10 mantissa bits where BF16 has 7.
    """
    if shift_keys == "none" and shift_values == "none" and not fp16_inside:
        return attention

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if shift_keys != "none":
            k = (k.float() - center(k, shift_keys)).to(k.dtype)
        c = None if shift_values == "none" else center(v, shift_values)
        if c is not None:
            v = (v.float() - c).to(v.dtype)
        out = in_fp16(attention, q, k, v) if fp16_inside else attention(q, k, v)
        if c is None:
            return out
        return (out.float() + c.repeat_interleave(q.shape[1] // v.shape[1], 1)).to(out.dtype)

    return call


def center(x: Tensor, shift: Shift) -> Tensor:
    """Return c [B, H, 1, d] or [1, H, 1, d] float32 of K or V [B, H, T, d]."""
    x = x.float() if shift == "sequence" else x.detach().float()
    return x.mean((0, 2) if shift == "batch_detached" else 2, keepdim=True)


class Counts(Protocol):
    """What counts calls, and what of them does not fit FP16."""

    def count(self, *tensors: Tensor) -> None:
        """Count q, k and v."""

    def count_gradients(self, *tensors: Tensor) -> None:
        """Count dQ, dK and dV as the attention returned them, in FP16."""

    def counted_on(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return what kernels add to, [] int64: of q, k and v, and of gradients. None where nothing is counted."""


def in_fp16(
    attention: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *biases: Tensor,
    learned: Sequence[Tensor] = (),
    dtype: torch.dtype | None = None,
    tokens: int = -2,
    counts: Counts | None = None,
) -> Any:
    """Compute an attention and its gradients on FP16 tensors; O has the dtype of q.

    What exceeds FP16's largest number in q, k, v and biases takes that number; infinite biases stay. dO is multiplied
    by the power of two that keeps each sum of T of its elements below 2¹⁵, so that dV cannot overflow. dQ and dK can,
    where k or q are large. The host waits for nothing.

    Args:
        attention: takes q, k, v, biases and ``learned``; returns O, or a tuple with O first.
        q, k, v: [B, H, T, d], or of another layout that the attention takes.
        biases: what is added to the scores, of any shape.
        learned: what else has gradients, of any shape and dtype, as sinks; it is not cast.
        dtype: of O, where it is not that of q.
        tokens: the dimension of O that counts queries.
        counts: what counts the call, if anything does.

    Returns:
        O, or the tuple. Gradients go through all of it.
    """
    by_kernels = _kernels_take(q, k, v)
    if counts is not None and not by_kernels:
        counts.count(q, k, v)
    k = k.view_as(k) if k is q else k  # no compiler traces a function that gets one tensor twice
    v = v.view_as(v) if v is q or v is k else v
    asks = [bias.requires_grad for bias in biases]  # others must not begin to: kernels take them for learned ones
    cast = [q, k, v, *(bias for bias, learns in zip(biases, asks, strict=True) if learns)] if biases else [q, k, v]
    enter, leave = _untransformed() if by_kernels else (_Enter.apply, _Leave.apply)
    *inner, factor = enter(counts, by_kernels, len(cast), *cast, *learned)
    counted = _counted_on(counts, q.device)[0] if by_kernels else None
    if biases:
        rest = iter(inner[3:])
        beside = [next(rest) if learns else _half_of_bias(bias) for bias, learns in zip(biases, asks, strict=True)]
        inner = [*inner[:3], *beside, *rest]
    casts = not q.is_meta and torch.is_autocast_enabled(q.device.type)  # PyTorch's attention would then take BF16
    with torch.autocast(q.device.type, torch.float16) if casts else _NOWHERE:
        inside = attention(*inner)
    dtype = dtype or q.dtype
    if not isinstance(inside, (tuple, list)):  # PyTorch 2.6 traces no tuple | list
        return leave(factor, counted, by_kernels, dtype, tokens, inside)[0]
    whole = list(inside)
    at = [0, *(i for i, one in enumerate(whole) if i and isinstance(one, Tensor) and one.requires_grad)]
    left = leave(factor, counted, by_kernels, dtype, tokens, *(whole[i] for i in at))
    for i, one in zip(at, left, strict=True):
        whole[i] = one
    return tuple(whole)


def _kernels_take(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether kernels make the passes around the attention. A compiler fuses PyTorch's operations with their
    neighbours, which takes less time than kernels of their own."""
    if torch.compiler.is_compiling() or not (_is_on_gpu(q) and q.device == k.device == v.device):
        return False
    plain = type(q) is type(k) is type(v) is Tensor and is_eager(q, k, v)
    return plain and not torch._C._are_functorch_transforms_active() and _has_kernels()


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


_kernels: Any = None
"""The module that launches them, once :func:`_has_kernels` has found it."""


def _has_kernels() -> bool:
    global _kernels  # noqa: PLW0603 - found once
    if _kernels is None:
        from flashpoint.numerics.passes import has_triton  # which a CPU does without

        if has_triton():
            from flashpoint.numerics import fp16_launch as _kernels
    return _kernels is not None


def _counted_on(counts: Counts | None, device: torch.device) -> tuple[Tensor, Tensor] | tuple[None, None]:
    return (counts.counted_on(device) if counts is not None else None) or (None, None)


def _half(x: Tensor) -> Tensor:
    if is_eager(x):
        return torch.clamp(x, *_bounds(x.device), out=torch.empty_like(x, dtype=torch.float16))
    largest = torch.finfo(torch.float16).max
    return x.half().clamp(-largest, largest)  # what is beyond it has become infinite


def _half_of_bias(x: Tensor) -> Tensor:
    return torch.where(x.isinf(), x.half(), _half(x))  # -inf closes a row, which no finite number does


def _wide(x: Tensor) -> Tensor:
    """Return it in a dtype that has every power of two."""
    return x.float() if x.dtype == torch.float16 else x


# A float that is a global is an input of the graph with torch.compile(dynamic=True), which the compiler loses inside of
# these functions: what they call computes with floats of its own.


class _Enter(torch.autograd.Function):
    """Casts to FP16, as many tensors as ``count`` says. The last output is what kernels found in q, k and v, if they
    cast them, and has no value else. Its gradient is the factor that :class:`_Leave` chose, or a state with it.

    The context comes with ``forward``: ``setup_context`` would have PyTorch read signatures in each call.
    """

    @staticmethod
    def forward(ctx: Any, counts: Counts | None, by_kernels: bool, count: int, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.counts, ctx.by_kernels = counts, by_kernels
        ctx.dtypes = tuple(x.dtype for x in given)
        if by_kernels:
            *qkv, state = _kernels.to_fp16(*given[:3])
        else:
            qkv, state = [_half(x) for x in given[:3]], given[0].new_empty((), dtype=torch.float32)
        if len(given) == 3:
            return (*qkv, state)
        return (*qkv, *map(_half_of_bias, given[3:count]), *(x.view_as(x) for x in given[count:]), state)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *inner, factor = grads
        if ctx.by_kernels and factor.is_contiguous() and _has_no_graph(*inner[:3]):
            counted = _counted_on(ctx.counts, factor.device)[1]
            plain = _kernels.divided(inner[:3], factor, ctx.dtypes[:3], counted)
            if len(inner) > 3:
                plain += _divided(inner[3:], factor[FACTOR_AT], ctx.dtypes[3:])
            return None, None, None, *plain
        if ctx.counts is not None:
            ctx.counts.count_gradients(*inner[:3])
        if ctx.by_kernels:
            factor = factor[FACTOR_AT]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return None, None, None, *_once(_divided(inner, factor, ctx.dtypes))
        return None, None, None, *_divided(inner, factor, ctx.dtypes)


def _divided(inner: Sequence[Tensor], factor: Tensor, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Return gradients divided by a power of two, each in a dtype of its own."""
    pairs = zip(inner, dtypes, strict=True)
    if is_eager(factor) and not torch.is_grad_enabled():
        wide = factor.view(1)  # of one dimension, as bounds are
        return [torch.div(grad, wide, out=torch.empty_like(grad, dtype=dtype)) for grad, dtype in pairs]
    # By a power of two it does not matter which comes first, and BF16 is half to read and write.
    return [
        grad.to(dtype) / factor if dtype == torch.bfloat16 else (grad.float() / factor).to(dtype)
        for grad, dtype in pairs
    ]


def _once(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return gradients that raise where they are differentiated: second ones would be divided in FP16, and vanish.

    PyTorch's ``once_differentiable`` does the same, and a compiler would have to see through it.
    """
    told = b"attention with FP16 inside is differentiated twice; take second derivatives without it"
    plain = [gradient.detach().requires_grad_() for gradient in gradients]
    return tuple(torch._C._functions.DelayedError(told, len(plain))(*plain))


def enters_fp16(node: Any) -> bool:
    """Whether a node of the graph is the cast of q, k and v to FP16: its gradients go on as if each had its own."""
    return isinstance(node, _Enter._backward_cls)


class _Leave(torch.autograd.Function):
    """Casts O back; in the backward pass scales dO, casts it to FP16, and scales the gradients of what is beside O."""

    @staticmethod
    def forward(
        ctx: Any,
        factor: Tensor,
        counted: Tensor | None,
        by_kernels: bool,
        dtype: torch.dtype,
        tokens: int,
        out: Tensor,
        *others: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.dtype, ctx.tokens, ctx.by_kernels = out.dtype, tokens, by_kernels
        cast = _kernels.from_fp16(out, dtype, factor, counted) if by_kernels else out.to(dtype)
        return (cast, *(one.clone() for one in others))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.by_kernels and _has_no_graph(grad_out):
            inside, state = _kernels.scaled(grad_out, grad_out.shape[ctx.tokens], ctx.dtype)
            beside = [grad * state[FACTOR_AT] for grad in grads]
            return state, None, None, None, None, inside, *beside
        factor = power_of_two(grad_out, ctx.tokens)
        if is_eager(grad_out) and not torch.is_grad_enabled():
            inside = torch.mul(_wide(grad_out), factor, out=torch.empty_like(grad_out, dtype=ctx.dtype))
        else:
            inside = (_wide(grad_out) * factor).to(ctx.dtype)
        beside = [grad * factor for grad in grads]
        return factor.expand(STATES) if ctx.by_kernels else factor, None, None, None, None, inside, *beside


@lru_cache
def _untransformed() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what applies :class:`_Enter` and :class:`_Leave`, without PyTorch's search of every argument for what a
    transform has wrapped."""
    return super(torch.autograd.Function, _Enter).apply, super(torch.autograd.Function, _Leave).apply


def _has_no_graph(*grads: Tensor) -> bool:
    """Whether gradients are computed that nobody differentiates."""
    return not torch.is_grad_enabled() and is_eager(*grads)


def power_of_two(grad_out: Tensor, tokens: int = -2) -> Tensor:
    """Return the largest power of two [] float32, by which T·max|dO| stays below 2¹⁵; 1 where dO is 0 or not finite.

    Args:
        grad_out: dO [B, H, T, d].
        tokens: the dimension that counts T.
    """
    largest, count = largest_of(grad_out.detach()), grad_out.shape[tokens]
    if largest.dtype == torch.bfloat16 and is_eager(grad_out):
        bits = largest.view(torch.int16).long()  # of a NaN with a sign below 0, which counts from the end
        return torch.take(_powers_of_two(count, grad_out.device), bits)
    return _power_of_two(largest.float() * count)


def largest_of(x: Tensor) -> Tensor:
    """Return max|x| [] in the dtype of x. PyTorch's norm is one operation, and on a CPU takes 20 times as long."""
    return torch.linalg.vector_norm(x, torch.inf) if x.is_cuda else x.abs().amax()


def _power_of_two(largest: Tensor) -> Tensor:
    """Return :func:`power_of_two` of T·max|dO| float32."""
    for_one = 2.0**14  # a sum whose power of two is 1
    largest = largest.nan_to_num(for_one, for_one)
    largest = largest.masked_fill(largest == 0, for_one)
    exponent = largest.view(torch.int32) >> 23  # 2^(exponent - 127) ≤ largest < 2^(exponent - 126)
    return ((2 * 127 + 14 - exponent).clamp(max=127 + 126) << 23).view(torch.float32)


@lru_cache
def _bounds(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return FP16's smallest and largest number [1] float32: with bounds of one dimension PyTorch computes in FP32, so
    that one operation clamps and casts. The host waits for the copy, once."""
    with torch.inference_mode(mode=False):
        below, above = (torch.tensor([bound], device=device) for bound in (-FP16_MAX, FP16_MAX))
    return below, above


@lru_cache(maxsize=64)
def _powers_of_two(count: int, device: torch.device) -> Tensor:
    """Return :func:`power_of_two` [2¹⁵] float32 for T = ``count``, by the bits of max|dO| in BF16. The host waits for
    the copy, once for each T."""
    with torch.inference_mode(mode=False):
        every = torch.arange(2**15, dtype=torch.int16, device="cpu").view(torch.bfloat16)
        return _power_of_two(every.float() * count).to(device)
