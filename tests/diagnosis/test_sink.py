"""A sink inside an attention: one more key in the softmax, without a value. The oracle appends its column of scores."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.delta_bias import delta_sample
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.faults import Fault, faulty_attention
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.probe import Function
from flashpoint.diagnosis.sink import sink_of, with_sink
from flashpoint.diagnosis.verdict import diagnose
from flashpoint.watching.agreement import agreeing
from tests.diagnosis.calls import CLEAN, HEADS, LENGTH, by_position, call_of, inputs

NONE = -math.inf
SCORES = torch.tensor([0.0, 2.5, NONE, -1.0])
"""Of the sink in each head; the third has none."""


def concatenated(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, sink: Tensor = SCORES) -> Tensor:
    """Softmax over the keys and a column more, in FP64."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (k, v))
    scores = q.double() @ k.mT * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), NONE)
    column = sink.double()[:, None, None].expand(*scores.shape[:-1], 1)
    return (torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v).to(q.dtype)


class Biased(torch.autograd.Function):
    """The same, with a backward pass by hand whose δ errs by a share of |dO||O| in the second head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, size: float) -> Tensor:
        scores = (q.double() @ k.double().mT * scale).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), NONE)
        total = scores.exp().sum(-1, keepdim=True) + SCORES.double().exp()[:, None, None]
        probs = scores.exp() / total
        out = probs @ v.double()
        ctx.save_for_backward(q, k, v, probs, out)
        ctx.scale, ctx.size = scale, size
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, probs, out = ctx.saved_tensors
        of_out = grad_out.double()
        delta = (of_out * out).sum(-1)
        delta[:, 1] += ctx.size * of_out[:, 1].norm(dim=-1) * out[:, 1].norm(dim=-1)
        grad_scores = probs * (of_out @ v.double().mT - delta[..., None])
        grads = grad_scores @ k.double() * ctx.scale, grad_scores.mT @ q.double() * ctx.scale, probs.mT @ of_out
        return *(one.to(x.dtype) for one, x in zip(grads, (q, k, v), strict=True)), None, None


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 5e-3), (torch.float32, 1e-6)])
@pytest.mark.parametrize("heads_kv", [HEADS, 2])
def test_the_score_of_a_sink_is_what_was_planted(
    is_causal: bool, dtype: torch.dtype, near: float, heads_kv: int
) -> None:
    tensors = [x.to(dtype) for x in inputs(1, heads_kv=heads_kv, length=96)]
    call = call_of(concatenated, tensors)
    call = dataclasses.replace(call, form=Form(is_causal, call.form.scale))
    out = concatenated(*tensors[:3], is_causal, call.form.scale)
    shown = SCORES.clone()
    if not is_causal:  # rows with 96 keys give these sinks less than a hundredth
        shown[[0, 3]] = NONE
    found = with_sink(call, out).form.sink
    assert found is not None
    torch.testing.assert_close(found.float(), shown, atol=near, rtol=0)


def test_attention_in_fp64_has_the_sink() -> None:
    """Its gradients are those that autograd finds for the appended column."""
    q, k, v, grad_out = (x.double() for x in inputs(2, sequences=1))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = concatenated(*leaves, True, 0.2)
    wanted = torch.autograd.grad(out, leaves, grad_out)
    call = AttentionCall(q, k, v, grad_out, Form(True, 0.2, sink=SCORES.double()), 1, 0, "f")
    true = exact(call, 0)
    for found, expected in zip((true.out, true.grad_q, true.grad_k, true.grad_v), (out, *wanted), strict=True):
        torch.testing.assert_close(found, expected[0])


@pytest.mark.parametrize("asked", [False, True])
def test_a_sink_is_told_and_nothing_else_is_found(asked: bool) -> None:
    """Rows switched off and a bias of δ were found."""
    found = diagnose(call_of(concatenated, inputs(3)), concatenated if asked else None)
    assert [(one.kind, one.heads) for one in found.findings] == [("sink", (1, 2, 4))]
    assert "-1.00 to 2.50" in found.findings[0].text
    assert found.probed == asked
    assert float(found.measures["dead_rows"].max()) == 0


@pytest.mark.parametrize("asked", [False, True])
def test_a_bias_of_delta_beside_a_sink_is_found(asked: bool) -> None:
    def biased(q: Tensor, k: Tensor, v: Tensor, _causal: bool, scale: float) -> Tensor:
        out: Tensor = Biased.apply(q, k, v, scale, 1e-2)
        return out

    call, function = call_of(biased, inputs(4)), biased if asked else None
    found = diagnose(call, function)
    assert [(one.kind, one.heads) for one in found.findings] == [("sink", (1, 2, 4)), ("delta_bias", (2,))]
    assert found.bias is not None
    assert float(found.bias.mean[1]) == pytest.approx(
        1e-2, rel=0.2 if asked else 0.02
    )  # features asked with change |O|
    name = "row_sum" if asked else "grad_delta"
    sample = delta_sample(call, function).measures
    torch.testing.assert_close(sample[f"{name}_sum"], found.measures[f"{name}_sum"])


def short_rows(factor: Tensor) -> Function:
    clean = by_position(CLEAN["no fault"])
    return lambda *given: clean(*given) * factor.bfloat16()


@pytest.mark.slow
@pytest.mark.parametrize(
    "factor",
    [
        torch.where(torch.arange(LENGTH) % 8 == 3, 0.2, 1.0)[:, None],
        torch.where(torch.arange(LENGTH) < 12, 0.3, 1.0)[:, None],
        torch.tensor(0.4),
        torch.linspace(0.2, 1.0, LENGTH)[:, None],
    ],
    ids=["some", "the first", "all alike", "fewer and fewer"],
)
def test_rows_that_are_short_for_another_reason_are_no_sink(factor: Tensor) -> None:
    """They do not depend on the row's L as a sink's do."""
    call = call_of(short_rows(factor), inputs(5))
    assert with_sink(call, call.out).form.sink is None
    assert "dead_rows" in [one.kind for one in diagnose(call).findings]


@pytest.mark.parametrize("name", CLEAN)
def test_attentions_without_a_sink_show_none(name: str) -> None:
    for seed, factor in ((6, 1.0), (7, 6.0)):
        call = call_of(by_position(CLEAN[name]), inputs(seed, factor))
        assert with_sink(call, call.out) is call


def test_a_fault_beside_a_sink_is_named() -> None:
    """A block of queries without most of their keys, in one of the heads that have a sink."""
    call = call_of(concatenated, inputs(8))
    dropped = call_of(by_position(faulty_attention(Fault("dropped_tile"))), inputs(8)).out
    assert call.out is not None
    assert dropped is not None
    out = call.out.clone()
    out[:, 1, 32:40] = dropped[:, 1, 32:40]
    found = diagnose(dataclasses.replace(call, out=out)).findings
    assert [(one.kind, one.heads) for one in found] == [("sink", (1, 2, 4)), ("out_rows", (2,))]


@pytest.mark.parametrize("score", [0.0, 4.0, 9.0])
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_mask_of_an_attention_with_a_large_sink_is_known_from_its_output(score: float, is_causal: bool) -> None:
    """O was so short that the call was left out."""
    q, k, v, _ = inputs(9)
    out = concatenated(q, k, v, is_causal, 0.2, torch.full((HEADS,), score))
    forms = [Form(causal, 0.2) for causal in (True, False)]
    assert agreeing(forms, [q, k, v, out], closely=False) is forms[0 if is_causal else 1]
    assert agreeing(forms, [q, k, v, out.flip(-2)], closely=False) is None


@pytest.mark.parametrize(("across", "shows"), [(0.07, True), (0.076, False)])
def test_rows_may_err_across_o_by_a_share_of_what_the_sink_takes(across: float, shows: bool) -> None:
    """By hand: beside a sink that takes 0.46 of each row, O may err by (0.25 · 0.46 + 0.02) · 0.54 = 0.0729 of |O|."""
    whole, found = (torch.zeros(2, 20, 4, dtype=torch.float64) for _ in range(2))
    whole[..., 0] = 3.0
    found[..., 0], found[..., 1] = 3 * 0.54, 3 * across
    score = sink_of(torch.full((2, 20), 1.0, dtype=torch.float64), whole, found)
    expected = 1 + math.log(0.46 / 0.54) if shows else NONE
    assert score.tolist() == pytest.approx([expected] * 2)
