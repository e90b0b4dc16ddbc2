"""Production attentions on a GPU: against FP64, compiled, the same bits again where they say so, and their δ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.form import Form
from flashpoint.drop_in import variant_of
from flashpoint.errors import UserError
from flashpoint.numerics.dispatch import attention
from flashpoint.numerics.production import PRODUCTION, ScoreMod, capped, refuse_missing
from flashpoint.numerics.variant import AttentionVariant
from tests.scripts.loaded import script

pytestmark = pytest.mark.gpu
VARIANTS = [*PRODUCTION, "flex_fixed", "fa4_fixed"]
SHAPE = (2, 4, 512, 64)
SCRIPT = script("evidence/production_delta")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch._dynamo.reset()  # each variant is a graph of its own
    yield
    torch.use_deterministic_algorithms(before)


def variant_here(name: str) -> AttentionVariant:
    variant = variant_of(name)
    deterministic = PRODUCTION[variant.kernel].deterministic
    try:
        refuse_missing(variant.kernel, torch.device("cuda"), deterministic, name)
    except UserError as error:
        pytest.skip(str(error))
    torch.use_deterministic_algorithms(deterministic)
    return variant


def inputs() -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad_out = (torch.randn(SHAPE, generator=generator, device="cuda") for _ in range(4))
    return [q.bfloat16(), (k + 2).bfloat16(), (v - 1).bfloat16()], (grad_out * 1e-6).bfloat16()


def computed(variant: AttentionVariant, compiled: bool, score_mod: ScoreMod | None = None) -> list[Tensor]:
    key = torch.zeros(2, dtype=torch.int64, device="cuda")
    given, grad_out = inputs()
    given = [x.requires_grad_() for x in given]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, variant, layer=1, seed_and_step=key, score_mod=score_mod)

    with torch.autocast("cuda", torch.bfloat16):  # as in a training
        out = (torch.compile(attend, fullgraph=True) if compiled else attend)(*given)
    return [out.detach(), *torch.autograd.grad(out, given, grad_out)]


def exact(score_cap: float = math.inf) -> list[Tensor]:
    given, grad_out = inputs()
    q, k, v = (x.double().requires_grad_() for x in given)
    later = torch.ones(SHAPE[2], SHAPE[2], device="cuda", dtype=torch.bool).triu(1)
    scores = q @ k.mT / math.sqrt(SHAPE[3])
    scores = scores if score_cap == math.inf else score_cap * (scores / score_cap).tanh()
    out = scores.masked_fill(later, -math.inf).softmax(-1) @ v
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out.double())]


@pytest.mark.parametrize("front", [{}, {"fp16_inside": True}, {"shift_keys": "sequence", "shift_values": "sequence"}])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_output_and_gradients_are_near_fp64(name: str, compiled: bool, front: dict[str, object]) -> None:
    variant = variant_here(name)
    if "fp16_inside" in front and variant.delta != "out":
        pytest.skip(f"{name} takes BF16 alone")
    variant = replace(variant, **front)
    for found, wanted in zip(computed(variant, compiled), exact(), strict=True):
        assert float((found.double() - wanted).norm() / wanted.norm()) < 2**-5


@pytest.mark.parametrize("compiled", [False, True])
def test_capped_scores_are_near_fp64_and_give_the_same_bits_again(compiled: bool) -> None:
    variant = variant_here("flex")
    first, second = (computed(variant, compiled, capped(2.0)) for _ in range(2))
    for found, again, wanted in zip(first, second, exact(score_cap=2.0), strict=True):
        assert torch.equal(found, again)
        assert float((found.double() - wanted).norm() / wanted.norm()) < 2**-5


@pytest.mark.parametrize("name", VARIANTS)
def test_what_says_so_gives_the_same_bits_again(name: str) -> None:
    variant = variant_here(name)
    if not PRODUCTION[variant.kernel].deterministic:
        pytest.skip(f"{name} has no deterministic backward pass")
    first = computed(variant, compiled=True)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, computed(variant, compiled=True), strict=True))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("flex", 1.0), ("flex_fixed", 0.0), ("fa4", 1.0), ("fa4_fixed", 0.0), ("sdpa_math", 0.0), ("flash_fixed", 0.0)],
)
def test_delta_follows_the_rounding_of_o_unless_it_is_corrected(name: str, wanted: float) -> None:
    """The slope of δ's error, which the kernel returns as a row sum of dS, on what the rounding of O adds to δ."""
    variant = variant_of(name) if name.startswith("flash") else variant_here(name)
    (q, k, v), grad_out = inputs()
    out, grad_q, *_ = computed(variant, compiled=False)
    call = AttentionCall(q, k, v, grad_out, Form(True, SHAPE[3] ** -0.5), 1, 0, name, out, grad_q)
    found = [one["follows_out"] for one in SCRIPT.measured(call, variant, follow=SHAPE[0])]
    assert float(torch.stack(found).mean()) == pytest.approx(wanted, abs=0.05)
