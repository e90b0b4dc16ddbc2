"""Errors injected into δ: of the size, the sign and in the layers that were asked for, against FP64 and philox."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from flashpoint.numerics import launch, reference
from flashpoint.numerics.choices import NEAREST, DeltaError, Rounding
from flashpoint.numerics.compile_time import compile_time_choices
from flashpoint.numerics.dispatch import attention, delta_error
from flashpoint.numerics.effective import effective_choices
from flashpoint.numerics.rounding import philox4x32
from flashpoint.numerics.variant import AttentionVariant, check_in_model
from tests.numerics.oracle import NOTHING_ROUNDED, injected_gradients, noise_key
from tests.numerics.test_kernels import DEVICE

SEED, STEP, LAYER, SIZE = 5, 6, 2, 0.25
CONTEXT: dict[str, Any] = {"layer": LAYER, "seed_and_step": torch.tensor([SEED, STEP], device=DEVICE)}
BASES: dict[str, dict[str, Any]] = {
    "from_out": {},
    "from_p_dp": {"delta": "p_dp"},
    "exact_row_sum": {"exact_row_sum": True},
    "centred_keys": {"center_keys": True},
}


def inputs(length: int = 100) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, length, 32, generator=generator).bfloat16() for _ in range(4)]


def signs(length: int = 100) -> Tensor:
    """z [2, 3, T] of ``noise``: −1 where the word's top bit is set. Counter: row, 0, head of all, layer and stream."""
    rows, heads = torch.arange(length)[None, :], torch.arange(6)[:, None]
    counter = torch.broadcast_tensors(rows, torch.tensor(0), heads, torch.tensor(LAYER | 8 << 12))
    word = philox4x32(counter, (torch.tensor(SEED), torch.tensor(STEP)))[0]  # type: ignore[arg-type]
    return (1.0 - 2.0 * (word >= 1 << 31)).view(2, 3, length).double()


def z_of(kind: str) -> Tensor:
    return {"none": torch.zeros(2, 3, 100).double(), "bias": torch.ones(2, 3, 100).double(), "noise": signs()}[kind]


def injecting(kind: str, size: float = SIZE, **fields: Any) -> AttentionVariant:
    error = DeltaError(kind=kind, size=0.0 if kind == "none" else size)  # type: ignore[arg-type]
    return AttentionVariant(**{**NOTHING_ROUNDED, **fields}, delta_error=error)


def test_signs_have_zero_mean_and_unit_variance() -> None:
    z = signs(4000)
    assert set(z.unique().tolist()) == {-1.0, 1.0}
    assert abs(z.mean()) < 5 / z.numel() ** 0.5


@pytest.mark.parametrize("kind", ["none", "bias", "noise"])
@pytest.mark.parametrize("base", BASES)
def test_gradients_of_the_pytorch_attention_equal_fp64_with_the_error(base: str, kind: str) -> None:
    tensors = [x.float() for x in inputs()]
    q, k, v, grad_out = tensors
    variant = injecting(kind, **BASES[base])
    noise = noise_key(q, SEED, STEP, LAYER)
    saved = reference.flash_fwd(q, k, v, variant, noise)
    grads = reference.flash_bwd(grad_out, q, k, v, *saved, variant, noise)
    if base == "centred_keys":
        k = k - k.mean(-2, keepdim=True)
    expected = injected_gradients(q, k, v, grad_out, SIZE, z_of(kind))
    if base == "centred_keys":  # dK is of the keys before they were centred
        expected["grad_k"] = expected["grad_k"] - expected["grad_k"].mean(-2, keepdim=True)
    plain = injected_gradients(q, k, v, grad_out, 0.0, z_of(kind))
    for name, grad in zip(("grad_q", "grad_k", "grad_v"), grads, strict=True):
        norm = expected[name].norm()
        assert (grad.double() - expected[name]).norm() <= 1e-5 * norm, name
        if kind != "none" and name != "grad_v" and base != "centred_keys":
            assert (plain[name] - expected[name]).norm() > 0.05 * norm, name
    assert torch.equal(saved[0], reference.flash_fwd(*tensors[:3], injecting("none", **BASES[base]), noise)[0])


@pytest.mark.slow
@pytest.mark.parametrize(("base", "kind"), [("from_out", "bias"), *((base, "noise") for base in BASES)])
def test_delta_of_the_kernels_equals_fp64_with_the_error(base: str, kind: str) -> None:
    q, k, v, grad_out = (x.to(DEVICE) for x in inputs())
    variant = injecting(kind, **BASES[base])
    assert launch.kernels_support(q.dtype, q.shape[-1], variant)
    saved = launch.flash_fwd(q, k, v, variant, **CONTEXT)
    centered = saved[3] if base == "centred_keys" else k
    grad_q, rows, _ = launch.flash_bwd_dq(grad_out, q, centered, v, *saved[:3], variant, **CONTEXT)
    expected = injected_gradients(*inputs()[:1], centered.cpu(), *inputs()[2:], SIZE, z_of(kind))
    delta = rows[1].view(2, 3, -1)[..., :100].double().cpu()
    scale = grad_out.float().norm(dim=-1) * saved[0].norm(dim=-1)
    assert ((delta - expected["delta"]).abs() <= 1e-5 * scale.double().cpu() + 1e-6).all()
    assert (grad_q.double().cpu() - expected["grad_q"]).norm() <= 2**-8 * expected["grad_q"].norm()
    grads = launch.flash_bwd(grad_out, q, k, v, *saved, variant, **CONTEXT)
    if base != "centred_keys":
        assert (grads[1].double().cpu() - expected["grad_k"]).norm() <= 2**-8 * expected["grad_k"].norm()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["pytorch", "kernels"])
@pytest.mark.parametrize("into", ["grad_q", "grad_k"])
@pytest.mark.parametrize("kind", ["bias", "noise"])
def test_the_error_enters_one_gradient_alone(kind: str, into: str, engine: str) -> None:
    tensors = inputs()
    q, k, v, grad_out = (x.float() if engine == "pytorch" else x.to(DEVICE) for x in tensors)
    error = DeltaError(kind=kind, size=SIZE, into=into)  # type: ignore[arg-type]
    variant = AttentionVariant(**NOTHING_ROUNDED, exact_row_sum=True, delta_error=error)
    seed_and_step = torch.tensor([SEED, STEP], device=q.device)
    if engine == "pytorch":
        noise = noise_key(q, SEED, STEP, LAYER)
        saved = reference.flash_fwd(q, k, v, variant, noise)
        grads = reference.flash_bwd(grad_out, q, k, v, *saved, variant, noise)
    else:
        saved = launch.flash_fwd(q, k, v, variant, **CONTEXT)
        grads = launch.flash_bwd(grad_out, q, k, v, *saved, variant, **CONTEXT)
    expected, plain = (injected_gradients(*tensors, size, z_of(kind), into=into) for size in (SIZE, 0.0))
    for name, grad in zip(("grad_q", "grad_k", "grad_v"), grads, strict=True):
        assert (grad.double().cpu() - expected[name]).norm() <= 2**-8 * expected[name].norm(), name
        assert torch.equal(expected[name], plain[name]) is (name != into)
        if name == into:
            assert (plain[name] - expected[name]).norm() > 0.05 * expected[name].norm()
    found = delta_error(grad_out, saved[0], variant, layer=LAYER, seed_and_step=seed_and_step)
    assert found.any() == (into == "grad_q")  # what the probes see is the δ of dQ


def test_an_error_of_delta_rewards_large_attended_scores() -> None:
    """dQ and dK with δ + ε are the gradients of the loss minus Σᵢ εᵢ Σⱼ Pᵢⱼ Sᵢⱼ, with P held."""
    q, k, v, grad_out = (x.double() for x in inputs())
    size = 0.25
    q, k = q.requires_grad_(), k.requires_grad_()
    mask = torch.ones(100, 100, dtype=torch.bool).triu(1)
    scores = (q @ k.mT * 32**-0.5).masked_fill(mask, -torch.inf)
    p = scores.softmax(-1)
    out = p @ v
    error = (size * grad_out.norm(dim=-1) * out.norm(dim=-1)).detach()
    attended = (p.detach() * scores.masked_fill(mask, 0.0)).sum(-1)
    tilted = torch.autograd.grad((grad_out * out).sum() - (error * attended).sum(), (q, k))
    variant = injecting("bias", exact_row_sum=True)
    single = [x.detach().float() for x in (q, k, v, grad_out)]
    noise = noise_key(single[0], SEED, STEP, LAYER)
    saved = reference.flash_fwd(*single[:3], variant, noise)
    grads = reference.flash_bwd(single[3], *single[:3], *saved, variant, noise)
    for grad, expected in zip(grads, tilted, strict=False):
        assert (grad.double() - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bias", "noise"])
def test_the_error_is_of_the_output_as_returned(kind: str) -> None:
    """Not of the O that δ is of: here the two differ by BF16's rounding to 2 bits."""
    q, k, v, grad_out = (x.to(DEVICE) for x in inputs())
    variant = injecting(kind, out=Rounding("nearest", 2), delta="out_fp32")
    plain = dataclasses.replace(variant, delta_error=DeltaError())
    seed_and_step = torch.tensor([SEED, STEP], device=DEVICE)
    deltas = []
    for choice in (variant, plain):
        saved = launch.flash_fwd(q, k, v, choice, **CONTEXT)
        _, rows, _ = launch.flash_bwd_dq(grad_out, q, k, v, *saved[:3], choice, **CONTEXT)
        deltas.append(rows[1].view(2, 3, -1)[..., :100].double().cpu())
    norms = grad_out.double().norm(dim=-1).cpu() * saved[0].double().norm(dim=-1).cpu()
    torch.testing.assert_close(deltas[0] - deltas[1], SIZE * norms * z_of(kind), rtol=1e-4, atol=1e-5)
    found = delta_error(grad_out, saved[0], variant, layer=LAYER, seed_and_step=seed_and_step)
    torch.testing.assert_close(found.double().cpu(), SIZE * norms * z_of(kind), rtol=1e-6, atol=0)


def out_and_grads(variant: AttentionVariant, layer: int) -> list[Tensor]:
    q, k, v = (x.requires_grad_() for x in inputs()[:3])
    out = attention(q, k, v, variant, layer=layer, seed_and_step=torch.tensor([SEED, STEP]))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs()[3].to(out.dtype))]


def test_only_the_named_layers_take_the_error() -> None:
    plain = AttentionVariant(scores=NEAREST)
    everywhere = dataclasses.replace(plain, delta_error=DeltaError(kind="noise", size=0.1))
    in_two = dataclasses.replace(plain, delta_error=DeltaError(kind="noise", size=0.1, layers=(2,)))
    for layer, alike, unlike in ((1, plain, everywhere), (2, everywhere, plain)):
        results, same, other = (out_and_grads(variant, layer) for variant in (in_two, alike, unlike))
        assert all(torch.equal(one, two) for one, two in zip(results, same, strict=True))
        assert not torch.equal(results[1], other[1])
        choices = [compile_time_choices(variant, layer, 64**-0.5) for variant in (in_two, alike)]
        assert choices[0] == choices[1]  # one compiled kernel


@pytest.mark.slow
def test_only_the_selected_heads_take_the_error() -> None:
    plain = AttentionVariant(scores=NEAREST)
    error = DeltaError(kind="noise", size=0.1)
    injected = dataclasses.replace(plain, delta_error=error)
    mixed = dataclasses.replace(injected, heads=(2,), elsewhere=plain)
    q, k, v, grad_out = (x[:1].to(DEVICE) for x in inputs())

    def grads(variant: AttentionVariant) -> tuple[Tensor, ...]:
        saved = launch.flash_fwd(q, k, v, variant, **CONTEXT)
        return launch.flash_bwd(grad_out, q, k, v, *saved, variant, **CONTEXT)

    of_all, of_plain = grads(injected), grads(plain)
    for one, by_injected, by_plain in zip(grads(mixed), of_all, of_plain, strict=True):
        assert torch.equal(one[:, 1], by_injected[:, 1])
        assert torch.equal(one[:, ::2], by_plain[:, ::2])
    assert not torch.equal(of_all[0], of_plain[0])
    for one, by_injected, by_plain in zip(*(out_and_grads(x, LAYER) for x in (mixed, injected, plain)), strict=True):
        assert torch.equal(one[:, 1], by_injected[:, 1])
        assert torch.equal(one[:, ::2], by_plain[:, ::2])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kind": "drift"}, "attn.delta_error.kind=drift"),
        ({"size": 1e-3}, "attn.delta_error.kind=none"),
        ({"layers": (1,)}, "attn.delta_error.kind=none"),
        ({"into": "grad_q"}, "attn.delta_error.kind=none"),
        ({"kind": "bias", "into": "grad_v"}, "attn.delta_error.into=grad_v"),
        ({"kind": "bias", "size": float("nan")}, "attn.delta_error.size=nan"),
        ({"kind": "bias", "layers": (0,)}, "attn.delta_error.layers=[0]"),
        ({"kind": "bias", "layers": ()}, "attn.delta_error.layers=[]"),
    ],
)
def test_an_error_that_cannot_be_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match="attn") as caught:
        DeltaError(**fields)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


TRAJECTORY = ((1.0, 0.0, -2.0), (0.5, 2.0, 0.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "step", "number"),
    [*(("pytorch", step, number) for step, number in ((0, 0), (9, 0), (10, 1), (29, 2), (500, 2))), ("kernels", 10, 1)],
)
def test_a_trajectory_gives_the_size_of_the_layer_and_the_step(engine: str, step: int, number: int) -> None:
    tensors = inputs(40)
    q, k, v, grad_out = (x.float() if engine == "pytorch" else x.to(DEVICE) for x in tensors)
    error = DeltaError(kind="bias", size=0.25, trajectory=TRAJECTORY, interval=10)
    constant = DeltaError(kind="bias", size=0.25 * TRAJECTORY[LAYER - 1][number])
    seed_and_step = torch.tensor([SEED, step], device=q.device)
    grads = []
    for errors in (error, constant):
        variant = AttentionVariant(exact_row_sum=True, delta_error=errors)
        if engine == "pytorch":
            noise = noise_key(q, SEED, step, LAYER)
            saved = reference.flash_fwd(q, k, v, variant, noise)
            grads.append(reference.flash_bwd(grad_out, q, k, v, *saved, variant, noise))
        else:
            context: dict[str, Any] = {"layer": LAYER, "seed_and_step": seed_and_step}
            saved = launch.flash_fwd(q, k, v, variant, **context)
            grads.append(launch.flash_bwd(grad_out, q, k, v, *saved, variant, **context))
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_a_trajectory_fits_the_model_and_is_told_by_a_digest() -> None:
    error = DeltaError(kind="bias", size=1.0, trajectory=TRAJECTORY)
    variant = AttentionVariant(delta_error=error)
    check_in_model(variant, 2, 1)
    with pytest.raises(ValueError, match=r"attn\.delta_error\.trajectory: factors for 2 layers"):
        check_in_model(variant, 6, 1)
    other = AttentionVariant(delta_error=dataclasses.replace(error, trajectory=TRAJECTORY[::-1]))
    told = [effective_choices(one)["delta_error.trajectory"] for one in (variant, other)]
    assert len(set(told)) == 2
    assert AttentionVariant.from_dict(variant.to_dict()) == variant
    for wrong in ((), ((1.0,), ()), ((float("nan"),),)):
        with pytest.raises(ValueError, match=r"attn\.delta_error\.trajectory"):
            DeltaError(kind="bias", size=1.0, trajectory=wrong)
