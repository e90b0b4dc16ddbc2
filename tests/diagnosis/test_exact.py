"""The FP64 reference is attention of every form, with its gradients: PyTorch's autograd of the definition says so."""

import dataclasses

import pytest
import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.measures import Results, without_empty_rows
from flashpoint.diagnosis.result_measures import delta_error_of
from tests.diagnosis.forms import FORMS, H, N, T, call_in, weights_of, written_out


def autograd(call: AttentionCall) -> tuple[Tensor, ...]:
    """O, dQ, dK and dV of the definition."""
    q, k, v = (x.double().requires_grad_() for x in (call.q, call.k, call.v))
    out = written_out(q, k, v, call.form)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), call.grad_out.double()))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_computed_as_autograd_computes_its_definition(name: str) -> None:
    call = call_in(name, factor=2.0)
    expected = autograd(call)
    for n in range(N):
        true = exact(call, n)
        of_keys = [x.unflatten(0, (-1, call.groups)).sum(1) for x in (true.grad_k, true.grad_v)]
        for found, wanted in zip((true.out, true.grad_q, *of_keys), expected, strict=True):
            torch.testing.assert_close(found, wanted[n], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_an_error_of_delta_is_read_from_dq_in_every_form(name: str) -> None:
    """δ + ε in the backward pass, by autograd: L has the derivative P by S, so ε·L takes ε·P from dS."""
    call = call_in(name, factor=2.0)
    call, _, empty = without_empty_rows(call, Results())
    error = torch.randn(call.q.shape[:3], generator=torch.Generator().manual_seed(3)).double()
    if empty is not None:
        error = error.masked_fill(empty, 0.0)
    q, k, v = (x.double().requires_grad_() for x in (call.q, call.k, call.v))
    loss = (written_out(q, k, v, call.form) * call.grad_out.double()).sum()
    loss = loss - (error * weights_of(q, k, call.form)[1]).sum()
    (grad_q,) = torch.autograd.grad(loss, q)
    for n in range(N):
        true = exact(call, n)
        tells = true.attended_keys.norm(dim=-1) > 1e-3
        found = delta_error_of(grad_q[n], true)
        torch.testing.assert_close(found[tells], error[n][tells], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("closed", ["mask", "−∞", "least number"])
def test_rows_that_see_no_key_are_0_and_left_out(closed: str) -> None:
    call = call_in("full")
    mask = torch.ones(1, 1, T, T, dtype=torch.bool)
    mask[..., 7:9, :] = False
    least = -torch.inf if closed == "−∞" else torch.finfo(torch.bfloat16).min
    added = torch.zeros(1, 1, T, T).masked_fill(~mask, least)
    form = Form(False, call.form.scale, **({"mask": mask} if closed == "mask" else {"bias": added}))  # type: ignore[arg-type]
    call = dataclasses.replace(call, form=form)
    true = exact(call, 0)
    assert not true.out[:, 7:9].any()
    assert not true.grad_q[:, 7:9].any()
    assert true.grad_scores.isfinite().all()
    out = torch.full_like(call.grad_out, 2.0)
    out[:, :, 7] = torch.nan
    cleaned, results, rows = without_empty_rows(call, Results(out, out, out[:, ::2], out[:, ::2]))
    assert rows is not None
    assert rows.nonzero()[:, 2].unique().tolist() == [7, 8]
    assert int(rows.sum()) == N * H * 2
    assert results.out is not None
    assert not results.out[:, :, 7:9].any()
    assert not cleaned.grad_out[:, :, 7:9].any()
    assert results.grad_k is None
    assert results.grad_v is None
