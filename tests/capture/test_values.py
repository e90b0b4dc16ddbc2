"""What a watched loop logs of its attention."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from flashpoint.capture.values import METRICS, measures_of
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.measured import measured
from flashpoint.diagnosis.measures import Results
from flashpoint.diagnosis.probe import results_of
from flashpoint.drop_in import attention


def attend(q: Tensor, k: Tensor, v: Tensor, _: bool, scale: float) -> Tensor:
    return attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("heads_kv", [1, 2])
@pytest.mark.parametrize("off", [0.0, float("nan"), float("inf")])
def test_each_is_the_mean_of_what_a_diagnosis_measures(heads_kv: int, off: float) -> None:
    generator = torch.Generator().manual_seed(heads_kv)
    calls = []
    for layer in (1, 2):
        q, k, v, grad_out = (
            (3 * torch.randn(3, heads, 24, 16, generator=generator)).bfloat16() for heads in (2, heads_kv, heads_kv, 2)
        )
        k[:, :, 5] = k[:, :, 4]  # so that rows are tied
        call = AttentionCall(q, k, v, grad_out, None, None, None, None, True, 0.25, layer, 7, "f")
        results = results_of(attend, call)
        assert results.out is not None
        results.out[1, 0, 3] += off
        calls.append(dataclasses.replace(call, **vars(results)))
    found = measures_of(calls)
    for name, metric in METRICS.items():
        expected = [measured(call, Results.kept(call))[name].mean(0).numpy() for call in calls]
        np.testing.assert_array_equal(found[metric], np.stack(expected))
    assert found.keys() == set(METRICS.values())
    assert (found["tied_rows"] > 0).any()
