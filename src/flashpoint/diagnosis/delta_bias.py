"""The bias of δ in each head of a layer: how large, how sure, and whether errors of that size ignited runs here.

A sequence gives one error and one bound, because tokens of one sequence are not independent. Nor are repetitions of a
sequence: they give their mean. The bias is the ratio of the sums of errors and bounds
(:func:`flashpoint.diagnosis.measures.of_errors`).

A bias is sure if two tests of one level say so.

- Student's t over sequences holds however rows of a sequence are correlated. A few sequences may be alike by luck.
- Student's t over rows takes them as independent. The mean of rows that are correlated spreads more, so that this is a
  floor: what independent rows make by chance is no bias, however much alike the sequences are. Where rows spread
  against each other the test says less than it could.

Each test has its own degrees of freedom: of many rows the spread is well known, of three sequences it is not. Rows and
sequences differ in size, |dO||O|. Where few of them make most of the sum, only those few tell its spread: the degrees
are nearly of as many of one size, (Σ s)² / Σ s², as Kish counts them. Both tests together err no more often than one.

The bias of δ is small beside its noise, and shows in the mean of many sequences. So there are sequences of which no
tensors are kept but a few numbers for each head, a :class:`DeltaSample`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall, averaged, identities_of
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.finding import FEW, standard_errors
from flashpoint.diagnosis.measure_table import DELTA, GRAD_DELTA, ROW_SUMS, SOURCES, DeltaErrorMeasures
from flashpoint.diagnosis.measures import (
    Measures,
    Probed,
    Results,
    by_sequence,
    of_errors,
    relative,
    without_empty_rows,
)
from flashpoint.diagnosis.probe import Function, delta_error_of_row_sums, probe, results_of
from flashpoint.diagnosis.result_measures import delta_error_of
from flashpoint.diagnosis.sink import with_sink

_MOST = 10**15
"""Sequences: no training has so many."""
IGNITED = {1e-6: "2 of 4", 3e-6: "3 of 4", 1e-5: "4 of 4"}
"""Runs that exploded with a constant error of δ of this share of |dO||O| in one layer (docs/findings/mechanism.md)."""


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
    call, kept, _ = without_empty_rows(call, Results.kept(call))
    probed = probe(function, call) if function else None
    if probed is not None:
        results = Results()  # row sums are the most direct: no others are needed
        call = with_sink(call, probed.out)
    else:
        results = without_empty_rows(call, results_of(function, call))[1] if function else kept
        call = with_sink(call, results.out)
    measures = by_sequence(call, results, probed, _of_heads)
    finite = torch.stack([values.isfinite().all(-1) for values in measures.values()]).all(0) & judged
    identities = tuple(one for one, counts in zip(identities_of(call), finite.tolist(), strict=True) if counts)
    return DeltaSample(
        (call.step,) * len(identities), identities, {name: values[finite] for name, values in measures.items()}
    )


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
        found |= relative(GRAD_DELTA, delta_error_of(results.grad_q[n].double(), true), true.bound)
    return found


@dataclass(frozen=True)
class DeltaBias:
    """The mean error of δ of each head [H], float64, over the sequences whose |dO||O| is not 0 everywhere.

    Attributes:
        mean, error: Σ ε / Σ |dO||O| and its standard error over different sequences; the latter is NaN with one.
        row_error: the standard error of the mean if errors of rows were independent; 0 where older files do not tell.
        rows, like_sized: as many rows, or different sequences, of one size tell the mean as surely: (Σ s)² / Σ s² of
            sizes s, which are |dO||O| of a row and its sum over a sequence.
        nats: Σ ε over all observed tokens, nats of the loss as backward was called on it: scaled by a GradScaler, or
            divided for gradient accumulation. Nothing is judged by it.
        noise: the root mean square over sequences of (Σ ε² / Σ (|dO||O|)²)^½, which weigh by (Σ |dO||O|)².
        counts: different sequences, of N of the call and M of the sample, int64.
        observed: the same with their repetitions.
        steps: of the training, that they are of.
        source: what the errors are from.
    """

    mean: Tensor
    error: Tensor
    row_error: Tensor
    rows: Tensor
    like_sized: Tensor
    nats: Tensor
    noise: Tensor
    counts: Tensor
    observed: Tensor
    steps: int
    source: DeltaErrorMeasures

    @classmethod
    def of(
        cls, measures: Measures, identities: Sequence[str], step: int = 0, sample: DeltaSample | None = None
    ) -> DeltaBias | None:
        """Return the bias by the most direct measure of δ's error; None where there is none.

        Args:
            measures: of a call, [N, H].
            identities: of its sequences.
            step: of the call.
            sample: further sequences of its layer. The measure is one that they have, too.
        """
        own = DeltaSample((step,) * len(identities), tuple(identities), measures)
        if sample is not None and sample.steps and (both := cls.of_samples([own, sample])):
            return both
        return cls.of_samples([own])

    @classmethod
    def of_samples(cls, samples: Sequence[DeltaSample]) -> DeltaBias | None:
        """Return the bias by the most direct measure that all samples of a layer have; None where there is none."""
        held = [sample.measures for sample in samples]
        source = next((one for one in SOURCES if all(one.bias.name in measures for measures in held)), None)
        if source is None:
            return None
        joined = {name: torch.cat([measures[name] for measures in held]) for name in source.names}
        together = of_errors(source, joined)
        identities = [identity for sample in samples for identity in sample.identities]
        different = {name: averaged(values, identities) for name, values in joined.items()}
        some, counts = joined[source.bound.name] != 0, (different[source.bound.name] != 0).sum(0)
        steps = (step for sample in samples for step in sample.steps)
        mean = of_errors(source, different)[source.bias.name]
        squared_bounds = joined[source.bound.name].square() / joined[source.rows.name].clamp_min(1.0)
        squared_errors = joined[source.noise.name].square() * squared_bounds
        bounds = different[source.bound.name]
        row_error, rows = _row_error(
            mean,
            bounds.sum(0),
            averaged(squared_errors, identities).sum(0),
            averaged(squared_bounds, identities).sum(0),
        )
        return cls(
            mean=mean,
            error=_standard_error(different[source.sum.name], bounds, counts),
            row_error=row_error,
            rows=rows,
            like_sized=bounds.sum(0).square() / bounds.square().sum(0).clamp_min(1e-300),
            nats=together[source.sum.name],
            noise=together[source.noise.name],
            counts=counts,
            observed=some.sum(0),
            steps=len({step for step, tells in zip(steps, some.any(-1).tolist(), strict=True) if tells}),
            source=source,
        )

    def __str__(self) -> str:
        """What it was measured on."""
        observed = int(self.observed.max())
        sequences = f"{observed:,} sequence{'s' * (observed != 1)}"
        if self.repeats:
            sequences += f", {self.sequences:,} different,"
        return f"{sequences} of {self.steps:,} steps" if self.steps > 1 else sequences.rstrip(",")

    @property
    def judges(self) -> bool:
        """Whether the errors are those of δ itself. A backward pass may take δ from another O than the returned one."""
        return self.source is not DELTA

    @property
    def of_grad_q(self) -> bool:
        """Whether the errors are read from dQ, in which other faults look like one of δ."""
        return self.source is GRAD_DELTA

    @property
    def repeats(self) -> bool:
        """Whether a sequence came more than once."""
        return bool((self.observed > self.counts).any())

    @property
    def sequences(self) -> int:
        """The different ones of the head that has the most."""
        return int(self.counts.max())

    @property
    def fewest(self) -> int:
        """The different ones of the head that has the fewest, of heads that have one; 0 where none has."""
        return int(self.counts[self.counts > 0].min()) if self.sequences else 0

    @property
    def smallest(self) -> Tensor:
        """The smallest bias [H] that these sequences could have shown: Student's t over sequences and over rows,
        Bonferroni over heads."""
        return self._smallest_of(self.counts)

    def _smallest_of(self, counts: Tensor) -> Tensor:
        """Return the smallest bias [H] that so many sequences of each head [H] would show, like these."""
        more = torch.where(self.counts > 0, counts / self.counts.clamp_min(1), 1.0).double()
        of_sequences, of_rows = (self._limits(numbers * more) for numbers in (self.like_sized, self.rows))
        return torch.maximum(of_sequences * self.error.clamp_min(1e-300), of_rows * self.row_error) / more.sqrt()

    def _limits(self, numbers: Tensor) -> Tensor:
        """Return how many standard errors [H] a mean of so many errors of one size surely stays below."""
        whole = numbers.nan_to_num(0.0).clamp_max(_MOST).round().long().tolist()
        return self.error.new_tensor([standard_errors(number, len(self.mean)) for number in whole])

    def needed(self, size: float) -> int:
        """Return how many different sequences would show a bias of a size in every head, if they spread as these
        do; their spread is finite."""

        def overlooked(count: int) -> bool:
            return count < _MOST and bool((self._smallest_of(torch.full_like(self.counts, count)) > size).any())

        least, most = 1, 2  # least is too few
        while overlooked(most):
            least, most = most, 2 * most
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if overlooked(middle) else (least, middle)
        return most

    @property
    def igniting(self) -> Tensor:
        """The heads [H] whose bias is sure and as large as the smallest that ignited a run."""
        size = self.mean.abs()
        return (self.counts >= FEW) & (size > self.smallest) & (size >= min(IGNITED))


def _standard_error(sums: Tensor, bounds: Tensor, counts: Tensor) -> Tensor:
    """Return that of Σ sums / Σ bounds [H] over sequences [S, H], from what each sequence has left.

    As many sequences as ``counts`` [H] have a bound. The error is NaN where that is one.
    """
    total = bounds.sum(0).clamp_min(1e-300)
    left = (sums - sums.sum(0) / total * bounds).square().sum(0) * counts / (counts - 1.0).clamp_min(1.0)
    return torch.where(counts == 1, torch.nan, left.sqrt() / total)


def _row_error(mean: Tensor, bound: Tensor, squared_errors: Tensor, squared_bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the standard error of Σ ε / Σ |dO||O| over independent rows, and how many of one size tell it, [H] each.

    Args:
        mean: that ratio m.
        bound: Σ |dO||O|.
        squared_errors: Σ ε².
        squared_bounds: Σ (|dO||O|)².

    Of a row ε − m|dO||O| is left. If that has nothing to do with the row's size, its squares add up to
    Σ ε² − m² Σ (|dO||O|)²; of rows of one size they do in any case.
    """
    share = squared_bounds / bound.square().clamp_min(1e-300)
    left = (squared_errors - mean.square() * squared_bounds).clamp_min(0.0) / (1.0 - share).clamp_min(1e-9)
    return left.sqrt() / bound.clamp_min(1e-300), 1.0 / share.clamp_min(1e-300)


def ignited(size: float) -> str:
    """Return what an error of a size has done: the runs with the largest one that is not larger."""
    tried = max((one for one in IGNITED if one <= abs(size)), default=min(IGNITED))
    return f"a constant error of {tried:.0e} in one layer made {IGNITED[tried]} runs explode"
