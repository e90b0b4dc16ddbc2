"""Numbers that a kernel holds in 16 bits between its steps: S, Ō after each tile of keys, O, and L and δ for the
backward pass."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from flashpoint.cli.diagnose_advice import FIXED, Exchange, advice
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.measure_table import OF_DELTA, OF_DELTA_SPREAD
from flashpoint.diagnosis.measures import Results
from flashpoint.diagnosis.roundings import Beside, _by_scores, _slope_by_rows, held_in
from flashpoint.diagnosis.verdict import diagnose, measured
from tests.diagnosis.calls import inputs
from tests.diagnosis.forms import call_in

LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """FlashAttention in tiles of keys, one after the other, and its backward pass; operands of products have 16 bits.

    Attributes:
        sums: whether Ō is held in 16 bits after each tile.
        unit: of L, by which it is held in 16 bits; None where it has FP32.
        held: dtype of that L.
        scores: whether S is held in 16 bits, in both passes.
        before: whether QKᵀ is, before the scale.
        backward: whether the last tile comes first.
        cut: whether O is cut off to BF16, not rounded.
        delta: makes δ of FP32 from that of FP32.
        of_out: whether δ is of the O that is returned.
        probs: makes P of FP32 for δ = rowsum(P∘dP), in place of one of O.
    """

    tile: int = 32
    sums: bool = False
    unit: float | None = None
    held: torch.dtype = torch.bfloat16
    scores: bool = False
    before: bool = False
    backward: bool = False
    cut: bool = False
    delta: Callable[[Tensor], Tensor] | None = None
    of_out: bool = True
    probs: Callable[[Tensor], Tensor] | None = None

    def call(self, tensors: list[Tensor], is_causal: bool = True) -> AttentionCall:
        q, k, v, grad_out = (x.float() for x in tensors)
        dtype, scale, groups = tensors[0].dtype, q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))

        def few(x: Tensor, wanted: bool = True) -> Tensor:
            return x.to(dtype).float() if wanted else x

        later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        scores = few(scale * few(q @ k.mT, self.before), self.scores).masked_fill(later & is_causal, -math.inf)
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
        exactly = out / mass[..., None]
        out = (cut_off(exactly) if self.cut else exactly).to(dtype)
        if self.unit is not None:
            logsumexp = (logsumexp * self.unit).to(self.held).float() / self.unit
        p, grad_p = (scores - logsumexp[..., None]).exp(), grad_out @ v.mT
        delta = (grad_out * (out.float() if self.of_out else exactly)).sum(-1, keepdim=True)
        delta = delta if self.probs is None else (self.probs(p) * grad_p).sum(-1, keepdim=True)
        grad_s = few(p * (grad_p - (delta if self.delta is None else self.delta(delta))))
        grads = grad_s @ k * scale, grad_s.mT @ q * scale, few(p).mT @ grad_out
        grad_q, grad_k, grad_v = (x.to(dtype) for x in (grads[0], *(_of_keys(x, groups) for x in grads[1:])))
        return AttentionCall(*tensors, Form(is_causal, scale), 2, 7, "f", out, grad_q, grad_k, grad_v)


def cut_off(x: Tensor) -> Tensor:
    """Return numbers of FP32 as BF16 without their last 16 bits."""
    return (x.view(torch.int32) & ~0xFFFF).view(torch.float32)


def nearest(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _of_keys(x: Tensor, groups: int) -> Tensor:
    return x.unflatten(1, (-1, groups)).sum(2)


def found(call: AttentionCall) -> set[str]:
    return {one.kind for one in diagnose(call).findings}


CALLS = [(32, 4, 1.0, True), (64, 2, 3.0, False), (140, 4, 1.0, True)]
"""Tokens, heads of keys, how much larger the queries are, and whether the call is causal."""


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    name = "logsumexp_bf16" if unit == 1 else "logsumexp_bf16_2"
    slopes = measured(call, Results.kept(call))[name]
    torch.testing.assert_close(slopes, torch.full((1, call.q.shape[1]), share, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["causal", "relative positions", "dropout", "sink"])
def test_what_rounded_scores_make_of_dq_is_what_autograd_makes_of_them(name: str, dtype: torch.dtype) -> None:
    """In FP64, with the rounding as a constant that is added to S."""
    call = call_in(name, seed=3, factor=4.0)
    form, q = call.form, call.q[0].double().requires_grad_()
    k, v = (x[0].double().repeat_interleave(call.groups, 0) for x in (call.k, call.v))
    scores = form.scores(form.scale * q @ k.mT, 0)
    lost = (scores.detach().to(dtype).double() - scores.detach()).nan_to_num(0.0)
    sink = torch.full((call.q.shape[1],), -math.inf) if form.sink is None else form.sink
    with_sink = torch.cat([scores + lost, sink.double()[:, None, None].expand(*scores.shape[:2], 1)], -1)
    weights = with_sink.softmax(-1)[..., :-1]
    out = (weights if (dropped := form.dropped(0)) is None else weights * dropped) @ v
    (rounded,) = torch.autograd.grad(out, q, call.grad_out[0].double())
    true, some = exact(call, 0), slice(0, None, 3)
    torch.testing.assert_close(_by_scores(true, some, dtype), (rounded - true.grad_q)[:, some], rtol=1e-9, atol=1e-12)


def test_scores_of_few_bits_are_no_rounded_l_where_rows_have_nearly_one_key() -> None:
    """Their own part of dQ is left out, and nothing is left to tell."""
    call = Kernel(64, scores=True).call(inputs(4, 12.0, sequences=16), is_causal=True)
    assert "rounded_logsumexp" not in found(call)


@pytest.mark.slow
@pytest.mark.parametrize("unit", [1.0, LOG2E])
@pytest.mark.parametrize(("tensors", "held", "named"), [
    (torch.float16, torch.bfloat16, "BF16"), (torch.float16, torch.float16, "FP16"),
    (torch.float32, torch.bfloat16, "BF16"), (torch.float32, torch.float16, "FP16"),
])  # fmt: skip
def test_l_can_have_another_dtype_than_the_tensors(
    tensors: torch.dtype, held: torch.dtype, named: str, unit: float
) -> None:
    """Beside FP16 an L in BF16 errs by far more than the tensors do, and nothing was found."""
    given = [x.to(tensors) for x in inputs(3, length=70)]
    (one,) = diagnose(Kernel(64, unit=unit, held=held).call(given)).findings
    assert one.kind == "rounded_logsumexp"
    assert f"an L in {named}" in one.text


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [
    Kernel(64, scores=True), Kernel(64, before=True), Kernel(64, before=True, scores=True),
])  # fmt: skip
@pytest.mark.parametrize(("length", "heads", "is_causal"), [(70, 4, True), (33, 2, False)])
def test_rounded_scores_are_told_of_few_tokens(kernel: Kernel, length: int, heads: int, is_causal: bool) -> None:
    """They make O err by hardly more than the rounding of P̄ does."""
    (one,) = diagnose(kernel.call(inputs(6, 1.0, heads, sequences=8, length=length), is_causal)).findings
    assert (one.kind, one.heads) == ("coarse_rounding", (1, 2, 3, 4))
    assert "S is rounded" in one.text or "S or Ō is rounded" in one.text


@pytest.mark.parametrize(("name", "share"), [("", 0.0), ("", 0.4), ("_2", 1.0), ("_before", 1.0), ("_twice", 1.0)])
def test_the_slope_is_the_share_of_what_rounded_scores_make(name: str, share: float) -> None:
    """Of an O in FP64, whose error is a share of theirs."""
    call = Kernel(64).call(inputs(7, 2.0, length=48))
    true, scale = exact(call, 0), call.form.scale
    products = true.q @ true.k.mT
    held = {
        "": (products * scale).bfloat16().double(),
        "_2": (products * scale * LOG2E).bfloat16().double() / LOG2E,
        "_before": products.bfloat16().double() * scale,
        "_twice": (products.bfloat16().double() * scale).bfloat16().double(),
    }[name]
    hidden = torch.ones(48, 48).triu(1) > 0
    out = true.out + share * (held.masked_fill(hidden, -math.inf).softmax(-1) @ true.v - true.out)
    results = Results(out[None], None, None, None)
    one = dataclasses.replace(call, **{of: getattr(call, of)[:1] for of in ("q", "k", "v", "grad_out")})
    slopes = measured(one, results)[f"scores_rounded{name}"]
    torch.testing.assert_close(slopes, torch.full((1, call.q.shape[1]), share).double(), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "is_causal"), [(32, False), (140, True)])
def test_an_o_that_is_cut_off_is_told_as_such(length: int, is_causal: bool) -> None:
    """Its rows are shorter, and were taken for those of another scale."""
    (one,) = diagnose(Kernel(64, cut=True).call(inputs(8, length=length), is_causal)).findings
    assert (one.kind, one.heads) == ("coarse_rounding", (1, 2, 3, 4))
    assert "cut off" in one.text


@pytest.mark.parametrize(("dtype", "of"), [(torch.bfloat16, None), (torch.float16, np.float16)])
def test_numbers_that_are_cut_off_are_the_next_ones_towards_0(dtype: torch.dtype, of: type[np.floating] | None) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 4096)
    x[:3] = torch.tensor([0.0, 1.5, -2.0])
    if of is None:
        expected = cut_off(x).double()
    else:
        near = x.numpy().astype(of)
        expected = torch.from_numpy(
            np.where(np.abs(near) > np.abs(x.numpy()), np.nextafter(near, of(0)), near)
        ).double()
    assert torch.equal(held_in(x.double(), dtype, cut=True), expected)


@pytest.mark.slow
@pytest.mark.parametrize("of_out", [True, False])
@pytest.mark.parametrize(("delta", "told"), [(cut_off, "cut off to BF16"), (nearest, "rounded to BF16")])
def test_a_delta_of_16_bits_is_told_with_how_it_lost_the_others(
    delta: Callable[[Tensor], Tensor], told: str, of_out: bool
) -> None:
    call = Kernel(64, delta=delta, of_out=of_out).call(inputs(9, sequences=24))
    (one,) = diagnose(call).findings
    assert (one.kind, one.heads) == ("rounded_delta", (1, 2, 3, 4))
    assert told in one.text
    assert "hold δ in FP32" in advice({one.kind, "delta_bias"}, "", Exchange(FIXED, stabilizes=True))


def test_the_standard_error_of_a_slope_is_hc3_of_the_whole_regression() -> None:
    """By NumPy's least squares and the hat matrix, of 40 rows whose errors differ a hundredfold in size."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((40, 4))
    x[:, 1] -= x[:, 0] * (x[:, 1] @ x[:, 0]) / (x[:, 0] @ x[:, 0])
    x[:, 2] -= x[:, :2] @ np.linalg.lstsq(x[:, :2], x[:, 2], rcond=None)[0]
    y = x @ [1.0, 2.0, 3.0, 0.7] + draw.standard_normal(40) * np.logspace(-2, 0, 40)
    inverse = np.linalg.inv(x.T @ x)
    hat, slopes = x @ inverse @ x.T, inverse @ x.T @ y
    rest = (y - x @ slopes) / (1 - hat.diagonal())
    expected = slopes[3], (inverse @ (x.T * rest**2) @ x @ inverse)[3, 3] ** 0.5
    columns = [torch.from_numpy(column)[None] for column in x.T]
    error, beside = torch.from_numpy(y)[None], Beside(columns[:3])
    found = _slope_by_rows(error, beside.less(error), columns[3], beside)
    np.testing.assert_allclose([float(one) for one in found[:2]], expected, rtol=1e-9)


@pytest.mark.parametrize("rows", [3, 4, 5, 6, 7])
def test_no_slope_is_told_of_as_few_rows_as_it_has_unknowns(rows: int) -> None:
    """Beside a constant, the rounding of P̄ and that of O there are a factor of δ and then what holding it makes."""
    call = Kernel(64).call(inputs(13, length=rows), is_causal=False)
    found = measured(call, Results.kept(call))
    for measure, unknowns in (("delta_follows_out", 3), ("delta_factor", 4), ("delta_of_out_near_bf16", 5)):
        assert found[measure].isfinite().all() == (rows > unknowns), measure
        assert found[measure].isnan().all() == (rows <= unknowns), measure


@pytest.mark.slow
def test_of_a_delta_in_fp32_slopes_spread_as_is_said() -> None:
    """Over 320 heads and sequences their squares are those of the standard errors, to 25 %."""
    found = diagnose(Kernel(64).call(inputs(12, sequences=80))).measures
    for key, row in OF_DELTA.items():
        ratios = found[row.name] / found[OF_DELTA_SPREAD[key].name]
        assert float(ratios.square().mean()) == pytest.approx(1.0, abs=0.25), key


@pytest.mark.slow
@pytest.mark.parametrize(("probs", "named"), [(cut_off, True), (nearest, False), (torch.clone, False)])
def test_a_delta_of_probabilities_that_are_cut_off_has_a_factor(probs: Callable[[Tensor], Tensor], named: bool) -> None:
    """On average a number loses 0.0027 of itself so; one that is rounded loses nothing."""
    found = diagnose(Kernel(64, probs=probs).call(inputs(10, sequences=16))).findings
    assert [(one.kind, one.heads) for one in found] == [("gradients_off", (1, 2, 3, 4))] * named
    assert not named or "δ is 0.997" in found[0].text


@pytest.mark.parametrize("factor", [0.98, 1.0, 1.03])
def test_the_factor_of_delta_is_what_was_planted(factor: float) -> None:
    """In FP64, beside an error that is a part of |dO||O| and one that follows the rounding of O."""
    call = Kernel(64).call(inputs(11, length=48))
    true = exact(call, 0)
    assert call.out is not None
    of_out = (true.grad_out * (call.out[0].double() - true.out)).sum(-1)
    delta = (true.grad_out * true.out).sum(-1)
    error = (factor - 1) * delta + 1e-3 * true.bound + of_out
    grad_q = true.grad_q - true.scale * error[..., None] * true.attended_keys
    one = dataclasses.replace(call, **{of: getattr(call, of)[:1] for of in ("q", "k", "v", "grad_out")})
    found = measured(one, Results(call.out[:1], grad_q[None], None, None))["delta_factor"]
    torch.testing.assert_close(found, torch.full((1, 4), factor - 1).double(), rtol=0, atol=1e-3)
