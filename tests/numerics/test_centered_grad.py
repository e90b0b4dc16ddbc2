"""dQ of centred keys: what it takes out, against FP64, and that it touches nothing else."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from flashpoint.numerics import launch, reference
from flashpoint.numerics.choices import NEAREST, UNROUNDED, DeltaError
from flashpoint.numerics.variant import AttentionVariant
from tests.numerics.oracle import NOTHING_ROUNDED, injected_gradients, noise_key
from tests.numerics.test_kernels import DEVICE

BF16 = AttentionVariant(scores=NEAREST, out_unnormalized=NEAREST)
SIZE, LAYER = 0.1, 1


def inputs() -> list[Tensor]:
    """Keys with a common part that is as large as what differs."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (torch.randn(2, 3, 100, 32, generator=generator) for _ in range(4))
    return [x.bfloat16() for x in (q, k + 1, v, grad_out)]


def grads(engine: str, variant: AttentionVariant, tensors: list[Tensor]) -> list[Tensor]:
    """O, dQ, dK, dV on the CPU."""
    q, k, v, grad_out = tensors
    if engine == "kernels":
        q, k, v, grad_out = (x.to(DEVICE) for x in tensors)
        context: dict[str, Any] = {"layer": LAYER, "seed_and_step": torch.tensor([0, 0], device=DEVICE)}
        assert all(launch.kernels_support(q.dtype, q.shape[-1], choices) for choices, _ in variant.groups(LAYER, 3))
        saved = launch.flash_fwd(q, k, v, variant, **context)
        results = launch.flash_bwd(grad_out, q, k, v, *saved, variant, **context)
    else:
        noise = noise_key(q)
        saved = reference.flash_fwd(q, k, v, variant, noise)
        results = reference.flash_bwd(grad_out, q, k, v, *saved, variant, noise)
    return [x.cpu() for x in (saved[0], *results)]


@functools.lru_cache
def grads_of_inputs(engine: str, variant: AttentionVariant, batch: int) -> list[Tensor]:
    """Of the first ``batch`` sequences; several tests look at the same."""
    return grads(engine, variant, [x[:batch] for x in inputs()])


def injecting(**fields: Any) -> AttentionVariant:
    return AttentionVariant(**{**NOTHING_ROUNDED, "delta_error": DeltaError(kind="bias", size=SIZE), **fields})


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["kernels", "reference"])
def test_an_error_of_delta_loses_the_mean_key_and_nothing_else(engine: str) -> None:
    """In FP64: dQ_i minus (Σ_j dS_ij)·k̄. The kernels store dQ, and both centred keys, in BF16."""
    in_kernels, variant = engine == "kernels", injecting(center_grad_q=True)
    tensors = inputs() if in_kernels else [x.float() for x in inputs()]
    expected, plain = (
        injected_gradients(*tensors, SIZE, torch.ones(2, 3, 100), center_grad_q=centers)  # type: ignore[misc]
        for centers in (True, False)
    )
    _, grad_q, grad_k, grad_v = grads_of_inputs(engine, variant, 2) if in_kernels else grads(engine, variant, tensors)
    tolerance = 2**-8 if in_kernels else 1e-5
    for name, result in (("grad_q", grad_q), ("grad_k", grad_k), ("grad_v", grad_v)):
        assert (result.double() - expected[name]).norm() <= tolerance * expected[name].norm(), name
    assert (plain["grad_q"] - expected["grad_q"]).norm() > 0.2 * expected["grad_q"].norm()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["kernels", "reference"])
def test_the_push_along_the_mean_key_is_gone(engine: str) -> None:
    """Σ_i dQ_i·k̄ of a bias, over what exact attention has there: all of it before, next to nothing after."""
    tensors = inputs()
    mean = tensors[1].double().mean(-2, keepdim=True)
    exact = injected_gradients(*tensors, 0.0, torch.ones(2, 3, 100))["grad_q"]  # type: ignore[misc]
    pushes = {}
    for centers in (False, True):
        grad_q = grads_of_inputs(engine, injecting(center_grad_q=centers), 2)[1].double()
        pushes[centers] = ((grad_q - exact) * mean).sum((-2, -1)).abs().mean()
    assert pushes[True] < 0.1 * pushes[False]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["kernels", "reference"])
def test_output_and_the_other_gradients_keep_their_bits(engine: str) -> None:
    plain, centered = (
        grads_of_inputs(engine, variant, 1) for variant in (BF16, dataclasses.replace(BF16, center_grad_q=True))
    )
    for name, one, other in zip(("out", "grad_q", "grad_k", "grad_v"), plain, centered, strict=True):
        assert torch.equal(one, other) == (name != "grad_q"), name


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [{}, {"center_keys": True}, {"center_grad_q": True, "scores": UNROUNDED}])
def test_each_head_computes_as_if_its_variant_were_everywhere(elsewhere: dict[str, Any]) -> None:
    chosen, other = dataclasses.replace(BF16, center_grad_q=True), dataclasses.replace(BF16, **elsewhere)
    for first, second in ((chosen, other), (other, chosen)):
        mixed = dataclasses.replace(first, heads=(1, 3), elsewhere=second)
        results = (grads_of_inputs("kernels", variant, 1) for variant in (mixed, first, second))
        for one, by_first, by_second in zip(*results, strict=True):
            assert torch.equal(one[:, ::2], by_first[:, ::2])
            assert torch.equal(one[:, 1], by_second[:, 1])
