"""The forward and the backward pass as ``torch.library`` ops: on a GPU by the kernels, else by the reference.

The ops keep ``torch.compile`` from tracing into the reference, where its fusions would drop rounding points
(an FP32 → BF16 → FP32 cast pair counts as removable there). Shapes are the reference's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flashpoint.numerics.deltas import dtype_of_saved
from flashpoint.numerics.layout import by_token
from flashpoint.numerics.passes import passes_of
from flashpoint.numerics.shared_graphs import STAND_IN, has_stand_in, named, op_results_like


def op(name: str) -> Callable[[Callable[..., Any]], torch._ops.OpOverload[..., Any]]:
    """Make a function an op of this package. ``custom_op`` would add 20 µs of the host to every call of it."""

    def made(implementation: Callable[..., Any]) -> torch._ops.OpOverload[..., Any]:
        def untraced(*arguments: Any) -> Any:
            if "torch._dynamo" in sys.modules:  # which would compile what an op calls, where a graph breaks at it
                return _disabled(implementation)(*arguments)
            return implementation(*arguments)

        schema = torch.library.infer_schema(implementation, mutates_args=())
        torch.library.define(f"flashpoint::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(f"flashpoint::{name}", "default", untraced)
        made: torch._ops.OpOverload[..., Any] = getattr(torch.ops.flashpoint, name).default
        return made

    return made


@lru_cache
def _disabled(implementation: Callable[..., Any]) -> Callable[..., Any]:
    disabled: Callable[..., Any] = torch.compiler.disable(implementation)
    return disabled


@op("flash_fwd")
def flash_fwd_op(
    q: Tensor, k: Tensor, v: Tensor, seed_and_step: Tensor, variant: str, layer: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return O, L, what δ takes beside O and centred keys (:mod:`flashpoint.numerics.reference`) of all heads.

    It takes a variant's key, or its :func:`.graph_name`. By the name of a graph that models share, the third is never
    empty. It is uninitialised where the variant saves nothing there: compilers keep a graph for tensors of one size.
    """
    choices = named(variant)
    out, logsumexp, saved, centered = passes_of(q, choices, layer, causal, scale).forward(q, k, v, seed_and_step)
    if has_stand_in(variant, choices, layer, q):
        saved = by_token(q, STAND_IN)
    return out, logsumexp, saved, q.new_empty(0) if centered is None else centered


@op("flash_bwd")
def flash_bwd_op(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    out_for_delta: Tensor,
    centered: Tensor,
    seed_and_step: Tensor,
    variant: str,
    layer: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV of :func:`flash_fwd_op`."""
    choices = named(variant)
    if has_stand_in(variant, choices, layer, q):
        out_for_delta = q.new_empty(0, dtype=dtype_of_saved([]))
    saved = out, logsumexp, out_for_delta, centered if centered.numel() else None
    return passes_of(q, choices, layer, causal, scale).backward(grad_out, q, k, v, saved, seed_and_step)


@torch.library.register_fake("flashpoint::flash_fwd")
def _(
    q: Tensor, k: Tensor, v: Tensor, seed_and_step: Tensor, variant: str, layer: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return op_results_like(q, named(variant), variant, layer)


@torch.library.register_fake("flashpoint::flash_bwd")
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return by_token(q, q.dtype), by_token(k, k.dtype), by_token(v, v.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, seed_and_step, *ctx.choice = inputs
    ctx.save_for_backward(q, k, v, *output, seed_and_step)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_out is None:  # nothing depends on O
        return (None,) * 8
    return (*flash_bwd_op(grad_out, *ctx.saved_tensors, *ctx.choice), *[None] * 5)


torch.library.register_autograd("flashpoint::flash_fwd", _backward, setup_context=_setup_context)


def _second_derivative(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    raise ValueError(
        "this attention has no second derivatives; choose variant='sdpa' inside "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
    )


torch.library.register_autograd("flashpoint::flash_bwd", _second_derivative)
