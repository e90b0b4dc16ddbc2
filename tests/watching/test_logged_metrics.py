"""What a watched loop logs of its attention."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.measures import Results, over_sequences
from flashpoint.diagnosis.probe import results_of
from flashpoint.diagnosis.verdict import measured
from flashpoint.drop_in import attention
from flashpoint.watching.logged_metrics import measures_of

METRICS = {
    "delta_bias": "row_sum_relative_bias",
    "delta_noise": "row_sum_relative_noise",
    "tied_rows": "tied_rows",
    "score_max": "score_max",
    "dead_rows": "half_norm_rows",
    "out_error": "out_deviation_rms",
    "along_mean_key": "grad_q_error_mean_key_share",
}
"""Measures of a diagnosis, and the metrics that runs of earlier versions have them under."""


def attend(q: Tensor, k: Tensor, v: Tensor, _: bool, scale: float) -> Tensor:
    return attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def calls_of(heads_kv: int, off: float, losses: list[float]) -> list[AttentionCall]:
    """Two layers of two heads; dO of each sequence is of this size, and one row of O is off."""
    generator = torch.Generator().manual_seed(heads_kv)
    calls = []
    for layer in (1, 2):
        q, k, v, grad_out = (
            (3 * torch.randn(3, heads, 24, 16, generator=generator)).bfloat16() for heads in (2, heads_kv, heads_kv, 2)
        )
        k[:, :, 5] = k[:, :, 4]  # so that rows are tied
        grad_out *= torch.tensor(losses, dtype=torch.bfloat16)[:, None, None, None]
        call = AttentionCall(q, k, v, grad_out, Form(True, 0.25), layer, 7, "f")
        results = results_of(attend, call)
        assert results.out is not None
        results.out[1, 0, 3] += off
        calls.append(dataclasses.replace(call, **vars(results)))
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("heads_kv", [1, 2])
@pytest.mark.parametrize("off", [0.0, float("nan"), float("inf")])
def test_they_are_what_a_diagnosis_measures_of_all_sequences(heads_kv: int, off: float) -> None:
    calls = calls_of(heads_kv, off, [1.0, 1.0, 1.0])
    found = measures_of(calls)
    for name, metric in METRICS.items():
        expected = [over_sequences(measured(call, Results.kept(call)))[name].numpy() for call in calls]
        np.testing.assert_array_equal(found[metric], np.stack(expected))
    assert found.keys() == set(METRICS.values())
    assert (found["tied_rows"] > 0).any()


def test_a_sequence_without_loss_does_not_make_the_bias_smaller() -> None:
    """Worked out here in FP64 over the rows of all sequences at once, as the probe of the package's own runs does; the
    noise, for which sequences weigh by the square of Σ |dO||O|, from the definition in docs/watching.md."""
    calls = calls_of(1, 0.0, [1.0, 0.0, 64.0])
    found = measures_of(calls)
    without = measures_of([dataclasses.replace(call, **_sequences(call, [0, 2])) for call in calls])
    for metric in ("row_sum_relative_bias", "row_sum_relative_noise"):
        np.testing.assert_allclose(found[metric], without[metric], rtol=1e-12)
    for at, call in enumerate(calls):
        q, k, v, grad_out = (x.double() for x in (call.q, call.k, call.v, call.grad_out))
        assert call.out is not None
        scores = (0.25 * q @ k.mT).masked_fill(torch.ones(24, 24, dtype=torch.bool).triu(1), -torch.inf)
        exactly = scores.softmax(-1) @ v
        errors = (grad_out * (call.out.double() - exactly)).sum(-1)
        bounds = grad_out.norm(dim=-1) * exactly.norm(dim=-1)
        bias = errors.sum((0, 2)) / bounds.sum((0, 2))
        np.testing.assert_allclose(found["row_sum_relative_bias"][at], bias, rtol=1e-9)
        weights = bounds.sum(2).square()
        squares = errors.square().sum(2) / bounds.square().sum(2).clamp_min(1e-300)
        noise = ((squares * weights).sum(0) / weights.sum(0)).sqrt()
        np.testing.assert_allclose(found["row_sum_relative_noise"][at], noise, rtol=1e-9)
        largest = scores.masked_fill(scores.isinf(), 0.0).abs().amax((0, 2, 3))
        np.testing.assert_allclose(found["score_max"][at], largest, rtol=1e-12)


def _sequences(call: AttentionCall, which: list[int]) -> dict[str, Tensor]:
    return {name: x[which] for name, x in vars(call).items() if isinstance(x, Tensor)}
