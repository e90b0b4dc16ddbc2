"""Calls of attentions that the tests of a diagnosis are about: their tensors, and attentions without a fault."""

from collections.abc import Callable

import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.faults import Fault, faulty_attention
from flashpoint.diagnosis.probe import Function, results_of
from flashpoint.drop_in import attention
from flashpoint.numerics.variant import AttentionVariant

HEADS, LENGTH, SIZE = 4, 96, 32


def inputs(
    seed: int, factor: float = 1.0, heads_kv: int = HEADS, offset: float = 0.0, sequences: int = 6
) -> list[Tensor]:
    """q, k, v and dO; every key has a part ``offset`` in common."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sequences, heads, LENGTH, SIZE) for heads in (HEADS, heads_kv, heads_kv, HEADS)]
    q, k, v, grad_out = (torch.randn(shape, generator=generator) for shape in shapes)
    k[..., 0] += offset
    return [x.bfloat16() for x in (q * factor, k, v, grad_out)]


def call_of(function: Function, tensors: list[Tensor], scale: float = SIZE**-0.5) -> AttentionCall:
    q, k, v, grad_out = tensors
    call = AttentionCall(q, k, v, grad_out, None, None, None, None, True, scale, layer=2, step=7, attention="f")
    found = results_of(function, call)
    return AttentionCall(q, k, v, grad_out, found.out, found.grad_q, found.grad_k, found.grad_v, True, scale, 2, 7, "f")


def by_position(function: Callable[..., Tensor]) -> Function:
    return lambda q, k, v, is_causal, scale: function(q, k, v, is_causal=is_causal, scale=scale)


CLEAN: dict[str, Callable[..., Tensor]] = {
    "no fault": faulty_attention(Fault("none")),
    "sdpa": torch.nn.functional.scaled_dot_product_attention,
    "exact row sums": lambda *qkv, **options: attention(*qkv, variant=AttentionVariant(exact_row_sum=True), **options),
    "flash_fp32": lambda *qkv, **options: attention(*qkv, variant="flash_fp32", **options),
}
