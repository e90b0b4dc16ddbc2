"""Numbers that a watched loop logs beside its losses: measures of its attention, and those that it hands over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.input_measures import of_scores
from flashpoint.diagnosis.measured import by_sequence
from flashpoint.diagnosis.measures import Measures, Results, finite_part, over_sequences
from flashpoint.diagnosis.probe import Probed
from flashpoint.diagnosis.result_measures import of_grad_q, of_out
from flashpoint.diagnosis.sink import with_sink
from flashpoint.watching.arrivals import Arrivals, Number, one_number
from flashpoint.watching.events import Handler, NumbersSeen, StepObserved
from flashpoint.watching.notices import Notices
from flashpoint.watching.watched_run import WatchedRun

METRICS = {
    "delta_bias": "row_sum_relative_bias",
    "delta_noise": "row_sum_relative_noise",
    "tied_rows": "tied_rows",
    "score_max": "score_max",
    "dead_rows": "half_norm_rows",
    "out_error": "out_deviation_rms",
    "along_mean_key": "grad_q_error_mean_key_share",
}
"""Measures of a diagnosis that are logged, and the names of the same quantities in this package's own runs."""
LOGGED = frozenset(("step", "loss", "grad_norm", "w_q_spectral_norm", "w_k_spectral_norm", *METRICS.values()))
"""What a watch writes itself: a number of the loop by such a name would make the metrics file unreadable."""


def measures_of(calls: Sequence[AttentionCall]) -> dict[str, NDArray[np.float64]]:
    """Return the logged measures of the layers' calls, which have as many heads, [n_layer, H] each: of all sequences
    together, as the probes of this package's own runs give them."""
    known = [with_sink(call, call.out) for call in calls]
    by_layer = [over_sequences(by_sequence(call, Results.kept(call), None, _of_heads)) for call in known]
    return {
        METRICS[name]: torch.stack([one[name] for one in by_layer]).numpy() for name in by_layer[0] if name in METRICS
    }


def _of_heads(call: AttentionCall, results: Results, _: Probed | None, n: int) -> Measures:
    """Those of a diagnosis that need no second attention to compare with: a training waits for them."""
    true = exact(call, n)
    found = of_scores(true)
    if results.out is not None:
        found |= of_out(finite_part(results.out[n]), true, call.grad_out[n].double())
    if results.grad_q is not None:
        found |= of_grad_q(finite_part(results.grad_q[n]), true, call.scale)
    return found


class AttentionMetrics:
    """Logs measures of each observed step, and describes the model by the first."""

    def __init__(self, run: WatchedRun, notices: Notices) -> None:
        self._run, self._notices = run, notices
        self._shape: tuple[int, int] | None = None  # layers and heads

    @property
    def handlers(self) -> Sequence[Handler]:
        """What it does, by event."""
        return (
            Handler(StepObserved, "noting what is not recorded", self._note),
            Handler(StepObserved, "measuring the attention", self._take),
        )

    def _note(self, event: StepObserved) -> None:
        self._run.note_not_recorded(event.not_recorded)

    def _take(self, event: StepObserved) -> None:
        calls = event.calls
        if event.partial or not calls:
            return
        if self._shape is None:
            self._run.describe(calls)
            self._shape = len(calls), calls[0].q.shape[1]
        if {(len(calls), call.q.shape[1]) for call in calls} == {self._shape}:
            self._run.log(event.step, measures_of(calls))
        else:
            self._notices.warn("layers have different numbers of heads, or not every step has all of them: "
                       "bias of δ and the like are not logged there; captures have them")  # fmt: skip


@dataclass(frozen=True, slots=True)
class _NumbersArrived:
    """Numbers that the loop handed over can be read."""

    step: int
    names: Sequence[str]
    numbers: Sequence[Number]


class LoopMetrics:
    """Logs numbers that the loop hands over."""

    def __init__(self, run: WatchedRun, arrivals: Arrivals) -> None:
        self._run, self._arrivals = run, arrivals

    @property
    def handlers(self) -> Sequence[Handler]:
        """What it does, by event."""
        what = "logging metrics"
        return Handler(NumbersSeen, what, self._take), Handler(_NumbersArrived, what, self._log)

    def _take(self, event: NumbersSeen) -> None:
        if taken := sorted(LOGGED & event.numbers.keys()):
            raise ValueError(f"the watch itself logs {', '.join(taken)}: give the metric another name")
        given = [one_number(value, name) for name, value in event.numbers.items()]
        self._arrivals.ask(_NumbersArrived(event.step, tuple(event.numbers), given))

    def _log(self, event: _NumbersArrived) -> None:
        self._run.log(event.step, dict(zip(event.names, map(float, event.numbers), strict=True)))
