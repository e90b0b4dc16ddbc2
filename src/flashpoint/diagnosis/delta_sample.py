"""The error of δ in sequences of which no tensors are kept: a few numbers for each head.

The bias of δ is small beside its noise. It shows in the mean of many sequences, whose tensors nobody would store.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashpoint.diagnosis.call import AttentionCall, identities_of
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.measure_table import DELTA, GRAD_DELTA, ROW_SUMS
from flashpoint.diagnosis.measures import Measures, Results, by_sequence, relative
from flashpoint.diagnosis.probe import Function, Probed, delta_error_of_row_sums, probe, results_of
from flashpoint.diagnosis.result_measures import delta_error_of
from flashpoint.diagnosis.sink import with_sink


@dataclass(frozen=True)
class DeltaSample:
    """Errors of δ in M sequences of one layer with H heads.

    Attributes:
        steps: of the training, from 0, one for each sequence [M].
        identities: of the sequences [M] (:func:`.identities_of`).
        measures: all of some :data:`.measure_table.SOURCES`, [M, H] float64.
    """

    steps: tuple[int, ...]
    identities: tuple[str, ...]
    measures: Measures

    @property
    def heads(self) -> int:
        return next(iter(self.measures.values())).shape[1]


def delta_sample(call: AttentionCall, function: Function | None = None) -> DeltaSample:
    """Measure the error of δ in the sequences of a call, those left out that have a value that is not finite.

    Where gradients came through other outputs than O, none of the call's own counts: δ cannot be told from theirs.

    Args:
        call: with the results of the attention, unless ``function`` is given.
        function: the attention, which is called anew.
    """
    judged = function is not None or call.is_of_out_alone
    call = dataclasses.replace(call, grad_logsumexp=None, other_gradients="")
    probed = probe(function, call) if function else None
    if probed is not None:
        results = Results(None, None, None, None)  # row sums are the most direct: no others are needed
        call = with_sink(call, probed.out)
    else:
        results = results_of(function, call) if function else Results.kept(call)
        call = with_sink(call, results.out)
    measures = by_sequence(call, results, probed, _of_heads)
    finite = torch.stack([of.isfinite().all(-1) for of in measures.values()]).all(0) & judged
    identities = tuple(one for one, counts in zip(identities_of(call), finite.tolist(), strict=True) if counts)
    return DeltaSample((call.step,) * len(identities), identities, {name: of[finite] for name, of in measures.items()})


def joined_samples(samples: Sequence[DeltaSample]) -> DeltaSample:
    """Return samples of one layer as one, with the measures that all have."""
    names = [name for name in samples[0].measures if all(name in one.measures for one in samples)]
    steps = tuple(step for one in samples for step in one.steps)
    identities = tuple(identity for one in samples for identity in one.identities)
    return DeltaSample(steps, identities, {name: torch.cat([one.measures[name] for one in samples]) for name in names})


def _of_heads(call: AttentionCall, results: Results, probed: Probed | None, n: int) -> Measures:
    true = exact(call, n)
    if probed is not None:
        return relative(ROW_SUMS, delta_error_of_row_sums(probed, true, n), true.bound)
    found: Measures = {}
    if results.out is not None:
        error = (call.grad_out[n].double() * (results.out[n].double() - true.out)).sum(-1)
        found |= relative(DELTA, error, true.bound)
    if results.grad_q is not None:
        found |= relative(GRAD_DELTA, delta_error_of(results.grad_q[n].double(), true, call.scale), true.bound)
    return found
