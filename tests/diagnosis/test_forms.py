"""Attention of every form is judged: none that is right is accused, and a fault is named in the head that has it."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.faults import Fault, faulty_attention
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.verdict import Diagnosis, diagnose
from tests.diagnosis.forms import FORMS, call_in, inputs_of, written_out

Attention = Callable[[Tensor, Tensor, Tensor, Form], Tensor]


def recorded(call: AttentionCall, attention: Attention) -> AttentionCall:
    q, k, v = (x.clone().requires_grad_() for x in (call.q, call.k, call.v))
    out = attention(q, k, v, call.form)
    grads = torch.autograd.grad(out, (q, k, v), call.grad_out)
    return dataclasses.replace(call, **dict(zip(("grad_q", "grad_k", "grad_v"), grads, strict=True)), out=out.detach())


def with_fault(fault: Fault) -> Attention:
    return lambda q, k, v, form: faulty_attention(fault)(q, k, v, form=form)


def sdpa(q: Tensor, k: Tensor, v: Tensor, form: Form) -> Tensor:
    lower = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    mask = form.mask
    if mask is not None and form.is_causal:
        mask = mask & lower
    if form.bias is not None:
        mask = form.bias.to(q.dtype)
        mask = mask.masked_fill(~lower, -torch.inf) if form.is_causal else mask
    causal = form.is_causal and mask is None
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=form.scale, enable_gqa=True)


def in_fp32(q: Tensor, k: Tensor, v: Tensor, form: Form) -> Tensor:
    return written_out(q.float(), k.float(), v.float(), form).to(q.dtype)


def kinds(found: Diagnosis) -> list[tuple[str, tuple[int, ...]]]:
    return [(one.kind, one.heads) for one in found.findings]


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize("name", FORMS)
def test_no_right_attention_is_accused(name: str, factor: float) -> None:
    call = call_in(name, seed=1, factor=factor)
    attentions = [with_fault(Fault("none")), in_fp32]
    if not (call.form.softcap or call.form.dropout or call.form.sink is not None):
        attentions.append(sdpa)
    for attention in attentions:
        found = diagnose(recorded(call, attention))
        assert not kinds(found)
        rows = 4 * sum(range(0, 30, 5)) if name == "causal, padded left" else 0
        assert found.empty_rows == (rows, rows)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "size", "seeds"), [(33, 1, range(12, 18)), (2, 1, range(8)), (5, 8, range(4))])
def test_a_few_numbers_that_are_far_off_by_chance_accuse_nobody(tokens: int, size: int, seeds: range) -> None:
    """Rows of one feature nearly cancel at times: a few of them make all of an error, and of another rounding none."""
    form = Form(False, size**-0.5)
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        q, k, v, grad_out = (torch.randn(2, 6, tokens, size, generator=generator).bfloat16() for _ in range(4))
        call = AttentionCall(q, k, v, grad_out, form, 1, 0, "sdpa")
        assert not kinds(diagnose(recorded(call, sdpa)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_scale_of_dropout_that_a_cpu_rounds_accuses_nobody(seed: int) -> None:
    """PyTorch makes 1.1094 of 1.1111 there. Small scores make little of O, so that 0.15 % of it looks like a factor."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad_out = (torch.randn(8, 4, 64, 16, generator=generator) for _ in range(4))
    kept = torch.rand(8, 4, 64, 64, generator=generator) > 0.1
    v += 0.5 * k + 0.5 * k.mean(2, keepdim=True)  # what is seen more has larger values

    def eager(q: Tensor, k: Tensor, v: Tensor, form: Form) -> Tensor:
        scores = (q @ k.mT * form.scale).masked_fill(torch.ones(64, 64).triu(1).bool(), -torch.inf)
        return scores.float().softmax(-1).bfloat16() * (kept.bfloat16() / (1 - form.dropout)) @ v

    tensors = [x.bfloat16() for x in (q + 0.5, k, v, grad_out)]
    form = Form(True, 0.05, dropout=0.1, kept=kept)
    found = diagnose(recorded(AttentionCall(*tensors, form, 1, 0, "eager"), eager))
    assert {kind for kind, _ in kinds(found)} <= {"rounded_denominator"}  # P is, after its division
    assert found.call.form.dropout == 0.1


def in_dtype(q: Tensor, k: Tensor, v: Tensor, form: Form) -> Tensor:
    """A soft cap as eager attentions have it: each of its steps is rounded, P too."""
    scores = torch.tanh(q @ k.repeat_interleave(2, 1).mT * form.scale / form.softcap) * form.softcap
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).float().softmax(-1).to(q.dtype)
    return weights @ v.repeat_interleave(2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("attention", [in_dtype, in_fp32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_left_of_a_saturated_soft_cap_accuses_nobody(dtype: torch.dtype, attention: Attention) -> None:
    """1 - tanh² is a few steps of the dtype or none, and so are dQ and dK; five times too large a dK is told."""
    for factor in (4.0, 12.0):
        q, k, v, grad_out = inputs_of("soft cap", 7, factor, dtype)
        form = Form(True, q.shape[-1] ** -0.5, softcap=2.0)
        call = recorded(AttentionCall(q, k, v, grad_out, form, 1, 0, "f"), attention)
        assert {kind for kind, _ in kinds(diagnose(call))} <= {"coarse_rounding", "rounded_denominator"}
        assert call.grad_k is not None
        if attention is in_fp32:  # one that rounds P has all its gradients put down to that
            call.grad_k[:, 1] *= 5
            assert kinds(diagnose(call)) == [("gradients_off", (3, 4))]


@pytest.mark.slow
@pytest.mark.parametrize("score", [12.0, 20.0, 40.0])
def test_what_fp16_rounds_to_0_beside_a_sink_accuses_nobody(score: float) -> None:
    """O of most rows is a few of FP16's steps or none, and so are dQ and dK, though dO is of healthy size."""
    form = Form(True, 0.2, sink=torch.tensor([score, -torch.inf, score + 1, 0.0]))
    tensors = inputs_of("sink", 8, 1.0, torch.float16)
    tensors[3][1] /= 64  # one sequence: a larger loss would help it, and not the others
    call = recorded(AttentionCall(*tensors, form, 1, 0, "f"), in_fp32)
    assert not kinds(diagnose(call))
    assert call.out is not None
    call.out[:, 1, 3::8] *= 0.3
    assert ("dead_rows", (2,)) in kinds(diagnose(call))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["delta_bias", "rounded_head", "rounded_denominator", "logsumexp_block", "dropped_tile"]
)
@pytest.mark.parametrize("name", FORMS)
def test_a_fault_is_named_in_its_head(name: str, kind: str) -> None:
    call = recorded(call_in(name, seed=2, factor=2.0), with_fault(Fault(kind, head=2)))
    named = {"logsumexp_block": "gradients_off", "dropped_tile": "out_rows"}.get(kind, kind)
    assert kinds(diagnose(call)) == [(named, (3,))]


@pytest.mark.slow
def test_a_form_that_the_call_was_not_told_shows() -> None:
    """An attention with a soft cap, a bias or another mask inside is no attention of what the call was told."""
    for name in ("soft cap", "relative positions", "window", "dropout"):
        call = recorded(call_in(name, seed=3, factor=2.0), in_fp32)
        plain = Form(call.form.is_causal, call.form.scale)
        assert kinds(diagnose(dataclasses.replace(call, form=plain)))


def test_a_sink_that_the_call_tells_is_no_finding_and_one_that_it_does_not_is() -> None:
    call = recorded(call_in("sink", seed=4), in_fp32)
    assert not kinds(diagnose(call))
    untold = dataclasses.replace(call, form=dataclasses.replace(call.form, sink=None))
    assert kinds(diagnose(untold)) == [("sink", (1, 2, 4))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["soft cap", "padding", "causal, padded left", "cross", "wider values", "sink"])
def test_no_right_attention_is_accused_that_is_called_anew(name: str) -> None:
    call = call_in(name, seed=1, factor=3.0)
    found = diagnose(call, lambda q, k, v, _causal, _scale: in_fp32(q, k, v, call.form))
    assert found.probed
    assert not kinds(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["delta_bias", "stale_maximum", "dropped_tile"])
@pytest.mark.parametrize("name", ["soft cap", "padding", "relative positions"])
def test_a_fault_is_named_where_the_attention_is_called_anew(name: str, kind: str) -> None:
    call = call_in(name, seed=1, factor=3.0)
    attention = faulty_attention(Fault(kind, head=1))
    found = diagnose(call, lambda q, k, v, _causal, _scale: attention(q, k, v, form=call.form))
    assert kinds(found) == [(kind, (2,))]


def test_a_bias_that_holds_nan_is_where_it_begins() -> None:
    call = call_in("relative positions")
    assert call.form.bias is not None
    bias = call.form.bias.clone()
    bias[0, 0, 0, 0] = torch.nan
    call = dataclasses.replace(call, form=dataclasses.replace(call.form, bias=bias))
    (finding,) = diagnose(recorded(call, in_fp32)).findings
    assert finding.kind == "nonfinite"
    assert "bias" in finding.text
    assert finding.inherited


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tokens", "size"), [(torch.float32, 5, 1), (torch.float32, 2, 32), (torch.bfloat16, 17, 1)]
)
def test_a_right_attention_of_few_keys_or_one_feature_is_not_accused(
    dtype: torch.dtype, tokens: int, size: int
) -> None:
    """FP32 errs by more than the rounding of O alone, and where PK cancels the rounding of dQ weighs much."""
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        q, k = torch.randn(2, 2, 4, tokens, size, generator=generator).to(dtype)
        v, grad_out = torch.randn(2, 2, 4, tokens, 8, generator=generator).to(dtype)
        form = Form(True, 0.3)
        call = AttentionCall(q, k, v, grad_out, form, 1, 0, "f")
        for attention in (in_fp32, sdpa):
            assert not kinds(diagnose(recorded(call, attention)))
