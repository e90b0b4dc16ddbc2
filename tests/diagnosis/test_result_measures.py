"""Measures of results, in NumPy and by their definition: FP64's results are those of autograd."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from flashpoint.diagnosis import measure_table as table
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.faults import Fault
from flashpoint.diagnosis.finding import fp32_error
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.measures import Results
from flashpoint.diagnosis.probe import probe
from flashpoint.diagnosis.result_measures import OUT_OFF, ROW_OFF, noise_of_grad_q
from flashpoint.diagnosis.verdict import measured
from tests.diagnosis.forms import call_in, weights_of, written_out
from tests.diagnosis.test_forms import recorded, with_fault

NO_RESULTS = Results()


def of_fp64(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """O, dQ and dV."""
    q, k, v = (x.double().requires_grad_() for x in (call.q, call.k, call.v))
    out = written_out(q, k, v, call.form)
    grad_q, grad_v = torch.autograd.grad(out, (q, v), call.grad_out.double())
    return out.detach(), grad_q, grad_v


def test_a_row_of_dq_is_off_by_its_own_length_or_the_typical_one() -> None:
    """A short row may err by as much as the others: an error of δ does not know how long a row is."""
    call = call_in("causal", factor=3.0)
    grad_q = of_fp64(call)[1]
    lengths = grad_q.norm(dim=-1).numpy()
    typical = np.sqrt((lengths**2).mean(-1, keepdims=True))
    errors = 0.5 * ROW_OFF * typical * np.where(np.arange(lengths.shape[-1]) % 2, 3.0, 1.0)
    along = torch.nn.functional.normalize(torch.ones_like(grad_q), dim=-1)
    found = measured(call, dataclasses.replace(NO_RESULTS, grad_q=grad_q + torch.from_numpy(errors)[..., None] * along))
    off = errors / np.maximum(lengths, typical) > ROW_OFF
    assert (errors / lengths > ROW_OFF).sum() > off.sum() > 0
    np.testing.assert_array_equal(found[table.GRAD_Q_ROWS_OFF.count.name], off.sum(-1))
    np.testing.assert_array_equal(found[table.GRAD_Q_ROWS_OFF.first.name], off.argmax(-1))


def test_the_mean_key_has_shares_of_keys_and_of_the_error_of_dq() -> None:
    call = call_in("causal")
    call = dataclasses.replace(call, k=call.k + torch.tensor([0.5, *[0.0] * 31]).bfloat16())
    error = torch.randn(call.q.shape, generator=torch.Generator().manual_seed(2)).double()
    keys = call.k.double().repeat_interleave(call.groups, 1).numpy()
    mean = keys.mean(-2, keepdims=True)
    found = measured(call, dataclasses.replace(NO_RESULTS, grad_q=of_fp64(call)[1] + error))
    share = (mean**2).sum((-2, -1)) / (keys**2).sum(-1).mean(-1)
    np.testing.assert_allclose(found[table.MEAN_KEY_SHARE.name], share)
    along = (error.numpy() * mean).sum(-1) / np.linalg.norm(mean, axis=-1)
    shares = (along**2).sum(-1) / (error.numpy() ** 2).sum((-2, -1))
    np.testing.assert_allclose(found[table.ALONG_MEAN_KEY.name], shares, rtol=1e-6)


@pytest.mark.parametrize("few", [False, True])
def test_few_errors_that_are_far_off_are_as_few_numbers(few: bool) -> None:
    """2 n / (κ − 1) of the kurtosis κ about 0. Of errors that scores make, row i has i, and d at most."""
    call = call_in("causal")
    out = of_fp64(call)[0].numpy()
    error = 1e-3 * np.random.default_rng(0).normal(size=out.shape)
    if few:
        error[..., :3, 0] *= 1000
    found = measured(call, dataclasses.replace(NO_RESULTS, out=torch.from_numpy(out + error)))
    flat = error.reshape(*error.shape[:2], -1)
    kurtosis = (flat**4).mean(-1) / (flat**2).mean(-1) ** 2
    numbers = np.clip(2 * flat.shape[-1] / (kurtosis - 1), 1, flat.shape[-1])
    np.testing.assert_allclose(found[table.OUT_NUMBERS.name], numbers, rtol=1e-6)
    of_scores = np.minimum(np.arange(out.shape[-2]), out.shape[-1]).sum()
    np.testing.assert_allclose(found[table.OUT_NUMBERS_OF_SCORES.name], np.minimum(numbers, of_scores), rtol=1e-6)
    along = (error * out).sum(-1, keepdims=True) / (out**2).sum(-1, keepdims=True)
    turned = np.linalg.norm((error - along * out).reshape(flat.shape), axis=-1)
    expected = turned / np.linalg.norm(out.reshape(flat.shape), axis=-1)
    np.testing.assert_allclose(found[table.OUT_TURNED.name], expected, rtol=1e-6)


def test_of_two_tokens_lengths_do_not_differ() -> None:
    """The first has one key and errs in nothing: of one row there is no deviation, which is not NaN."""
    q, k, v, grad_out = torch.randn(4, 2, 3, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    call = AttentionCall(q, k, v, grad_out, Form(True, 0.5), 1, 0, "f")
    found = measured(call, dataclasses.replace(NO_RESULTS, out=of_fp64(call)[0] * 1.01))
    for name in (table.LENGTH_ERROR.name, table.LENGTH_ERROR_EXPECTED.name):
        assert found[name].eq(0).all()


def test_a_dv_that_cancels_errs_by_a_share_of_the_random_walk_of_its_terms() -> None:
    """Without scores row i weighs i + 1 keys alike; rows of dO that are as much longer in turn leave a step of dV."""
    length, size = 40, 8
    q, k, v = (torch.zeros(1, 1, length, size), *torch.randn(2, 1, 1, length, size))
    count = torch.arange(1.0, length + 1)
    signs = 1 - 2 * (torch.arange(length) % 2)
    grad_out = (count * signs)[None, None, :, None].expand(1, 1, length, size)
    call = AttentionCall(q, k, v, grad_out, Form(True, 0.5), 1, 0, "f")
    grad_v = of_fp64(call)[2]
    walk = math.sqrt(sum((size * i**2) / i for i in range(1, length + 1)))
    assert grad_v.norm() < 0.5 * walk
    found = measured(call, dataclasses.replace(NO_RESULTS, grad_v=grad_v + 1.0))[table.GRAD_V.error.name]
    assert found.item() == pytest.approx(math.sqrt(length * size) / walk)


def test_dq_of_keys_that_are_0_tells_nothing_of_delta() -> None:
    call = call_in("causal")
    call = dataclasses.replace(call, k=torch.zeros_like(call.k))
    assert (noise_of_grad_q(exact(call, 0)) == math.inf).all()


@pytest.mark.parametrize("biased", [False, True])
def test_fp32_errs_by_the_spacing_of_the_largest_terms_of_scores_in_any_sequence(biased: bool) -> None:
    """|q|·|k| of a key that is seen, and a bias of either sign where there is a weight; kernels hold S·log₂e."""
    call = call_in("relative positions" if biased else "full")
    size = torch.tensor([1.0, 8.0, 64.0, 1.0, 8.0, 1.0])[:, None, None, None]
    form = dataclasses.replace(call.form, bias=None if call.form.bias is None else 8 * call.form.bias)
    call = dataclasses.replace(call, q=call.q * size.bfloat16(), form=form)
    q, k = (x.double().numpy() for x in (call.q, call.k))
    terms = np.abs(q) @ np.abs(k.repeat(call.groups, 1)).swapaxes(-1, -2)
    if form.bias is not None:
        has_weight = weights_of(call.q.double(), call.k.double(), form)[0].numpy() >= 2**-24
        terms += np.where(has_weight, np.abs(form.bias.double().numpy()), 0) / form.scale
    largest = (form.scale * terms.max((-2, -1)) / np.log(2)).astype(np.float32)
    found = measured(call, NO_RESULTS)
    spacing = np.spacing(largest).astype(np.float64) * np.log(2)
    np.testing.assert_allclose(found[table.SCORE_SPACING.name], spacing)
    np.testing.assert_allclose(fp32_error(found), np.expm1(2.5 * spacing.max(0)))


def of_one_sequence(call: AttentionCall, n: int) -> AttentionCall:
    """Written out, by the names of the fields."""
    told = {name: x if name == "sink" or len(x) == 1 else x[n : n + 1] for name, x in call.form.tensors.items()}
    names = ("q", "k", "v", "grad_out", "out", "grad_q", "grad_k", "grad_v", "grad_logsumexp")
    held = {name: x[n : n + 1] for name in names if (x := getattr(call, name)) is not None}
    return dataclasses.replace(call, **held, form=dataclasses.replace(call.form, **told))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["padding", "dropout and bias", "sink, window and soft cap", "wider values"])
def test_a_head_is_measured_alike_with_whichever_others(name: str) -> None:
    """Short sequences are measured together. A head that is far off changes nothing of the others."""
    call = recorded(call_in(name, factor=2.0), with_fault(Fault("stale_maximum", head=2)))
    call = dataclasses.replace(call, grad_logsumexp=call.grad_out[..., 0].float() / 10)
    probed = probe(lambda q, k, v, _causal, _scale: written_out(q, k, v, call.form), call)
    assert probed is not None
    plain, asked = (measured(call, Results.kept(call), of) for of in (None, probed))
    for n in (1, 4):
        one = of_one_sequence(call, n)
        features = {field: x[n : n + 1] for field, x in vars(probed).items() if field != "block"}
        alone = measured(one, Results.kept(one), dataclasses.replace(probed, **features))
        two = one.of_heads(slice(0, 1))
        for measures, found in ((alone, asked), (measured(two, Results.kept(two)), plain)):
            for field, values in measures.items():
                expected = found[field][n, : values.shape[1]]
                torch.testing.assert_close(values[0], expected, rtol=1e-9, atol=1e-12, equal_nan=True)
    assert (plain[table.OUT_ERROR.name] > OUT_OFF).any(0).tolist() == [False, False, True, False]


@pytest.mark.parametrize("forward_alone", [False, True])
def test_dv_has_the_weights_of_any_out_that_they_make(forward_alone: bool) -> None:
    """dOᵀO is dVᵀV: weights drawn at random make no other error than that of both."""
    call = call_in("causal")
    exact_out, _, exact_grad_v = of_fp64(call)
    weights = torch.rand(*call.q.shape[:3], call.k.shape[2], generator=torch.Generator().manual_seed(0)).double()
    out = weights @ call.v.double().repeat_interleave(call.groups, 1)
    grad_v = (weights.mT @ call.grad_out.double()).unflatten(1, (-1, call.groups)).sum(2)
    results = dataclasses.replace(NO_RESULTS, out=out, grad_v=exact_grad_v if forward_alone else grad_v)
    expected = torch.full(call.q.shape[:2], float(forward_alone), dtype=torch.float64)
    torch.testing.assert_close(measured(call, results)[table.OUT_UNSHARED.name], expected)
    right = measured(call, dataclasses.replace(results, out=exact_out, grad_v=exact_grad_v))
    assert (right[table.OUT_ERROR.name] < 1e-12).all()
