"""A bias of δ that a call's few sequences cannot show is found in further ones, of which no tensors are kept."""

import dataclasses

import numpy as np
import pytest
import torch

from flashpoint.diagnosis.call import AttentionCall, digests
from flashpoint.diagnosis.delta_bias import DeltaBias, DeltaSample, delta_sample, joined_samples
from flashpoint.diagnosis.faults import Fault, faulty_attention
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.measures import Results
from flashpoint.diagnosis.probe import Function, probe, results_of
from flashpoint.diagnosis.verdict import diagnose, measured
from flashpoint.drop_in import attention

HEADS, LENGTH, SIZE = 2, 48, 32
FEW, MANY = 8, 256


def planted(size: float) -> Function:
    """A bias of δ of a size in head 2; its own noise is 4e-4 a row."""
    function = faulty_attention(Fault("delta_bias", head=1, size=size))
    return lambda q, k, v, _causal, scale: function(q, k, v, scale=scale)


def clean(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    return attention(q, k, v, is_causal=causal, scale=scale, variant="flash_fp32")


def called(function: Function, seed: int, sequences: int, step: int = 7, heads_kv: int = HEADS) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sequences, heads, LENGTH, SIZE) for heads in (HEADS, heads_kv, heads_kv, HEADS)]
    q, k, v, grad_out = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    call = AttentionCall(q, k, v, grad_out, Form(True, SIZE**-0.5), 2, step, "f")
    return dataclasses.replace(call, **vars(results_of(function, call)))


def test_a_digest_is_of_numbers_and_not_of_their_strides() -> None:
    strided = torch.arange(8.0).bfloat16()[::2].reshape(4, 1)
    for row in (strided, strided[..., None], torch.arange(8.0).bfloat16().view(4, 2)[:, ::2]):
        assert digests([row]) == digests([row.flatten().clone().view(4, 1)])
    assert len(set(digests([strided]))) == 4


@pytest.mark.slow
@pytest.mark.parametrize("anew", [False, True])
def test_a_bias_that_few_sequences_do_not_show_is_found_in_many(anew: bool) -> None:
    function = planted(3e-5)
    asked = function if anew else None
    few, many = called(function, 0, FEW), called(function, 1, MANY, step=9)
    assert diagnose(few, asked).findings == ()
    (found,) = diagnose(few, asked, sample=delta_sample(many, asked)).findings
    assert (found.kind, found.layer, found.heads) == ("delta_bias", 2, (2,))
    assert f"standard errors of {FEW + MANY} sequences of 2 steps" in found.text


@pytest.mark.slow
@pytest.mark.parametrize("function", [planted(0.0), clean])
@pytest.mark.parametrize("seed", [2, 4])
def test_no_bias_is_found_in_many_sequences_where_there_is_none(function: Function, seed: int) -> None:
    sample = delta_sample(called(function, seed, MANY))
    assert diagnose(called(function, seed + 1, FEW), sample=sample).findings == ()


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_a_sample_has_the_errors_that_all_measures_have(heads_kv: int) -> None:
    call = called(planted(1e-3), 3, 3, heads_kv=heads_kv)
    sample, every = delta_sample(call), measured(call, Results.kept(call))
    assert sample.steps == (7, 7, 7)
    assert {"delta_bias", "grad_delta_noise", "grad_delta_sum"} <= set(sample.measures)
    assert all(torch.equal(of, every[name]) for name, of in sample.measures.items())
    function = planted(1e-3)
    every = measured(call, Results.kept(call), probe(function, call))
    anew = delta_sample(call, function).measures
    assert set(anew) == {"row_sum_bias", "row_sum_noise", "row_sum_sum", "row_sum_bound", "row_sum_rows"}
    assert all(torch.equal(of, every[name]) for name, of in anew.items())


def test_a_sequence_that_is_not_finite_is_left_out() -> None:
    call = called(planted(1e-3), 3, 4)
    call.grad_out[2, 0, 5] = torch.inf
    whole = delta_sample(called(planted(1e-3), 3, 4)).measures
    sample = delta_sample(call)
    assert len(sample.steps) == 3
    assert all(torch.equal(of, whole[name][[0, 1, 3]]) for name, of in sample.measures.items())


def values(seed: int, sequences: int, *sources: str) -> dict[str, torch.Tensor]:
    """Errors of δ of 3 heads, without an attention."""
    generator = torch.Generator().manual_seed(seed)
    names = [f"{source}_{part}" for source in sources for part in ("bias", "noise", "sum", "bound")]
    found = {name: torch.randn(sequences, 3, dtype=torch.float64, generator=generator).abs() for name in names}
    return found | {f"{source}_rows": torch.full((sequences, 3), torch.inf).double() for source in sources}


def test_the_bias_of_a_call_and_a_sample_is_that_of_all_their_sequences() -> None:
    """By hand, in NumPy. The call's row sums do not count: the sample has none."""
    from scipy import stats

    own, further = values(0, 5, "row_sum", "grad_delta", "delta"), values(1, 40, "grad_delta", "delta")
    sample = DeltaSample((3,) * 20 + (4,) * 20, ("",) * 40, further)
    bias = DeltaBias.of(own, ("",) * 5, 2, sample)
    assert bias is not None
    both = {
        part: np.concatenate([of[f"grad_delta_{part}"].numpy() for of in (own, further)])
        for part in ("noise", "sum", "bound")
    }
    total = both["bound"].sum(0)
    left = both["sum"] - both["sum"].sum(0) / total * both["bound"]
    error = (45 / 44 * (left**2).sum(0)) ** 0.5 / total
    weights = both["bound"] ** 2 / (both["bound"] ** 2).sum(0)
    np.testing.assert_allclose(bias.mean, both["sum"].sum(0) / total, rtol=1e-12)
    np.testing.assert_allclose(bias.error, error, rtol=1e-12)
    np.testing.assert_allclose(bias.noise, (weights * both["noise"] ** 2).sum(0) ** 0.5, rtol=1e-12)
    np.testing.assert_allclose(bias.nats, both["sum"].sum(0), rtol=1e-12)
    threshold = stats.t.ppf(1 - 0.001 / 3 / 2, np.round(total**2 / (both["bound"] ** 2).sum(0)) - 1)
    np.testing.assert_allclose(bias.smallest, error * threshold, rtol=1e-9)
    assert str(bias) == "45 sequences of 3 steps"


def test_a_sample_that_has_nothing_in_common_with_the_call_does_not_count() -> None:
    others = DeltaSample((3, 3), ("",) * 2, values(1, 2, "row_sum")), DeltaSample((), (), values(1, 0, "delta"))
    for sample in others:
        bias = DeltaBias.of(values(0, 5, "delta"), ("",) * 5, 2, sample)
        assert bias is not None
        assert (bias.sequences, bias.steps, str(bias)) == (5, 1, "5 sequences")


def test_as_many_sequences_as_are_needed_would_show_the_bias() -> None:
    """By a search over counts, for values that spread by 5e-6 in the worst head."""
    from scipy import stats

    noise = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spreads = torch.tensor([5e-6, 1e-6, 1e-6], dtype=torch.float64)
    biases = noise / noise.std(0) * spreads
    ones = torch.ones_like(biases)
    parts = {"bias": biases, "noise": biases, "sum": biases, "bound": ones, "rows": torch.inf * ones}
    bias = DeltaBias.of({f"delta_{part}": of for part, of in parts.items()}, ("",) * 8)
    assert bias is not None
    for size in (1e-6, 1e-5):
        limit = next(n for n in range(2, 999) if stats.t.ppf(1 - 0.001 / 6, n - 1) * 5e-6 / n**0.5 <= size)
        assert bias.needed(size) == pytest.approx(limit, abs=1)


def test_samples_of_several_steps_are_joined() -> None:
    parts = [
        DeltaSample((5, 5), ("a", "b"), values(0, 2, "delta", "grad_delta")),
        DeltaSample((6,), ("a",), values(1, 1, "delta")),
    ]
    both = joined_samples(parts)
    assert both.steps == (5, 5, 6)
    assert both.identities == ("a", "b", "a")
    assert set(both.measures) == {"delta_bias", "delta_noise", "delta_sum", "delta_bound", "delta_rows"}
    for name, of in both.measures.items():
        assert torch.equal(of, torch.cat([part.measures[name] for part in parts]))
