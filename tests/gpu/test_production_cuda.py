"""Production attentions on a GPU: against FP64, compiled, and the same bits again where they say so."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashpoint.drop_in import variant_of
from flashpoint.errors import UserError
from flashpoint.numerics.dispatch import attention
from flashpoint.numerics.production import PRODUCTION, refuse_missing
from flashpoint.numerics.variant import AttentionVariant

pytestmark = pytest.mark.gpu
KERNELS = list(PRODUCTION)
SHAPE = (2, 4, 512, 64)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch._dynamo.reset()  # each variant is a graph of its own
    yield
    torch.use_deterministic_algorithms(before)


def variant_here(name: str) -> AttentionVariant:
    deterministic = PRODUCTION[name].deterministic
    try:
        refuse_missing(name, torch.device("cuda"), deterministic)
    except UserError as error:
        pytest.skip(str(error))
    torch.use_deterministic_algorithms(deterministic)
    return variant_of(name)


def inputs() -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad_out = (torch.randn(SHAPE, generator=generator, device="cuda") for _ in range(4))
    return [q.bfloat16(), (k + 2).bfloat16(), (v - 1).bfloat16()], (grad_out * 1e-6).bfloat16()


def computed(variant: AttentionVariant, compiled: bool) -> list[Tensor]:
    key = torch.zeros(2, dtype=torch.int64, device="cuda")
    given, grad_out = inputs()
    given = [x.requires_grad_() for x in given]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, variant, layer=1, seed_and_step=key)

    with torch.autocast("cuda", torch.bfloat16):  # as in a training
        out = (torch.compile(attend, fullgraph=True) if compiled else attend)(*given)
    return [out.detach(), *torch.autograd.grad(out, given, grad_out)]


def exact() -> list[Tensor]:
    given, grad_out = inputs()
    q, k, v = (x.double().requires_grad_() for x in given)
    later = torch.ones(SHAPE[2], SHAPE[2], device="cuda", dtype=torch.bool).triu(1)
    out = (q @ k.mT / math.sqrt(SHAPE[3])).masked_fill(later, -math.inf).softmax(-1) @ v
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out.double())]


@pytest.mark.parametrize("front", [{}, {"fp16_inside": True}, {"shift_keys": "sequence", "shift_values": "sequence"}])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_output_and_gradients_are_near_fp64(name: str, compiled: bool, front: dict[str, object]) -> None:
    variant = replace(variant_here(name), **front)
    for found, wanted in zip(computed(variant, compiled), exact(), strict=True):
        assert float((found.double() - wanted).norm() / wanted.norm()) < 2**-5


@pytest.mark.parametrize("name", KERNELS)
def test_what_says_so_gives_the_same_bits_again(name: str) -> None:
    variant = variant_here(name)
    if not PRODUCTION[name].deterministic:
        pytest.skip(f"{name} has no deterministic backward pass")
    first = computed(variant, compiled=True)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, computed(variant, compiled=True), strict=True))
