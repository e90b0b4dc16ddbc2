"""Numbers that a kernel holds in 16 bits between its steps: Ō after each tile of keys, and L between the passes."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.measures import Results
from flashpoint.diagnosis.verdict import diagnose, measured
from tests.diagnosis.calls import inputs

LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """FlashAttention in tiles of keys, one after the other, and its backward pass; operands of products have 16 bits.

    Attributes:
        sums: whether Ō is held in 16 bits after each tile.
        unit: of L, by which it is held in 16 bits; None where it has FP32.
        scores: whether S is held in 16 bits, in both passes.
        backward: whether the last tile comes first.
    """

    tile: int = 32
    sums: bool = False
    unit: float | None = None
    scores: bool = False
    backward: bool = False

    def call(self, tensors: list[Tensor], is_causal: bool = True) -> AttentionCall:
        q, k, v, grad_out = (x.float() for x in tensors)
        dtype, scale, groups = tensors[0].dtype, q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))

        def few(x: Tensor, wanted: bool = True) -> Tensor:
            return x.to(dtype).float() if wanted else x

        later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        scores = few(scale * q @ k.mT, self.scores).masked_fill(later & is_causal, -math.inf)
        shift, mass, out = q.new_full(q.shape[:-1], -math.inf), q.new_zeros(q.shape[:-1]), torch.zeros_like(q)
        starts = range(0, k.shape[-2], self.tile)
        for start in reversed(starts) if self.backward else starts:
            of_tile = scores[..., start : start + self.tile]
            largest = torch.maximum(shift, of_tile.amax(-1))
            p = (of_tile - largest[..., None]).exp().nan_to_num(0.0)
            rescale = (shift - largest).exp().nan_to_num(0.0)
            mass = mass * rescale + p.sum(-1)
            out = few(out * rescale[..., None] + few(p) @ v[..., start : start + self.tile, :], self.sums)
            shift = largest
        logsumexp = shift + mass.log()
        out = (out / mass[..., None]).to(dtype)
        if self.unit is not None:
            logsumexp = few(logsumexp * self.unit) / self.unit
        p = (scores - logsumexp[..., None]).exp()
        grad_s = few(p * (grad_out @ v.mT - (grad_out * out.float()).sum(-1, keepdim=True)))
        grads = grad_s @ k * scale, grad_s.mT @ q * scale, few(p).mT @ grad_out
        grad_q, grad_k, grad_v = (x.to(dtype) for x in (grads[0], *(_of_keys(x, groups) for x in grads[1:])))
        return AttentionCall(*tensors, Form(is_causal, scale), 2, 7, "f", out, grad_q, grad_k, grad_v)


def _of_keys(x: Tensor, groups: int) -> Tensor:
    return x.unflatten(1, (-1, groups)).sum(2)


def found(call: AttentionCall) -> set[str]:
    return {one.kind for one in diagnose(call).findings}


CALLS = [(32, 4, 1.0, True), (64, 2, 3.0, False), (140, 4, 1.0, True)]
"""Tokens, heads of keys, how much larger the queries are, and whether the call is causal."""


@pytest.mark.parametrize(("length", "heads", "factor", "is_causal"), CALLS)
@pytest.mark.parametrize("kernel", [
    Kernel(16), Kernel(48), Kernel(64), Kernel(128, backward=True), Kernel(512),
    Kernel(scores=True), Kernel(backward=True, scores=True),
])  # fmt: skip
def test_of_exact_sums_and_l_nothing_of_the_kind_is_said(
    kernel: Kernel, length: int, heads: int, factor: float, is_causal: bool
) -> None:
    """Rounded scores change dQ like a rounded L in a row with nearly one key, and are told as what they are."""
    dtype = torch.bfloat16 if is_causal else torch.float16
    tensors = [x.to(dtype) for x in inputs(1, factor, heads, sequences=4, length=length)]
    assert found(kernel.call(tensors, is_causal)) <= ({"coarse_rounding"} if kernel.scores else set())


@pytest.mark.parametrize(("length", "heads", "factor", "is_causal"), CALLS)
@pytest.mark.parametrize("kernel", [Kernel(16, sums=True), Kernel(64, sums=True), Kernel(128, True, backward=True)])
def test_a_sum_that_is_rounded_at_each_tile_is_told(
    kernel: Kernel, length: int, heads: int, factor: float, is_causal: bool
) -> None:
    """At a tile or two of keys, where O errs by no more than other tiles make, too."""
    call = kernel.call(inputs(2, factor, heads, sequences=4, length=length), is_causal)
    assert found(call) == {"coarse_rounding"}
    call = dataclasses.replace(call, **dict.fromkeys(("grad_q", "grad_k", "grad_v")))
    shares = measured(call, Results.kept(call))["sums_rounded"]
    assert (shares > (0.9 if length <= kernel.tile else 0.2)).all()


@pytest.mark.parametrize("unit", [1.0, LOG2E])
@pytest.mark.parametrize(("length", "heads", "factor", "is_causal"), CALLS)
def test_a_logsumexp_that_is_rounded_between_the_passes_is_told(
    length: int, heads: int, factor: float, is_causal: bool, unit: float
) -> None:
    call = Kernel(64, unit=unit).call(inputs(3, factor, heads, sequences=4, length=length), is_causal)
    assert found(call) == {"rounded_logsumexp"}


@pytest.mark.parametrize("unit", [1.0, LOG2E])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_slope_is_the_share_of_what_rounding_l_makes(share: float, unit: float) -> None:
    """Of dQ in FP64, whose rows have a share of the factors; δ errs, too, and dQ as a whole has another factor."""
    call = Kernel(64).call(inputs(5, 2.0, length=48))
    true = exact(call, 0)
    scores = (true.q @ true.k.mT * true.scale).masked_fill(torch.ones(48, 48).triu(1) > 0, -math.inf)
    logsumexp = scores.logsumexp(-1, keepdim=True)
    factor = (logsumexp - (logsumexp * unit).bfloat16().double() / unit).exp() - 1
    of_delta = true.scale * torch.randn(*factor.shape[:2], 1, dtype=torch.float64) * true.attended_keys
    grad_q = true.grad_q * (1.01 + share * factor) + of_delta
    call = dataclasses.replace(call, grad_q=grad_q[None], **{
        name: getattr(call, name)[:1] for name in ("q", "k", "v", "grad_out", "out", "grad_k", "grad_v")
    })  # fmt: skip
    name = "logsumexp_rounded" if unit == 1 else "logsumexp_rounded_2"
    slopes = measured(call, Results.kept(call))[name]
    torch.testing.assert_close(slopes, torch.full((1, call.q.shape[1]), share, dtype=torch.float64), rtol=0, atol=1e-9)


def test_scores_of_few_bits_are_no_rounded_l_where_rows_have_nearly_one_key() -> None:
    """Their own part of dQ is left out, and nothing is left to tell."""
    call = Kernel(64, scores=True).call(inputs(4, 12.0, sequences=16), is_causal=True)
    assert "rounded_logsumexp" not in found(call)
