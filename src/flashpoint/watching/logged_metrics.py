"""Numbers that a watched loop logs beside its losses: measures of its attention, and those that it hands over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.measure_table import MEASURES
from flashpoint.diagnosis.measures import Measures, Results, by_sequence, finite_part, of_scores, over_sequences
from flashpoint.diagnosis.result_measures import of_grad_q, of_out
from flashpoint.diagnosis.sink import with_sink
from flashpoint.runs.metric_table import GRAD_NORM, LOSS, W_K_NORM, W_Q_NORM
from flashpoint.watching.arrivals import Arrivals, Number, one_number
from flashpoint.watching.events import Handler, NumbersSeen, StepObserved
from flashpoint.watching.notices import Notices
from flashpoint.watching.watched_run import WatchedRun

if TYPE_CHECKING:
    from flashpoint.diagnosis.probe import Probed

_LOGGED_MEASURES = {measure.name: measure.logged_as.name for measure in MEASURES.values() if measure.logged_as}
"""Measures of a diagnosis that are logged, and the metrics that they are."""
LOGGED = frozenset(("step", LOSS.name, GRAD_NORM.name, W_Q_NORM.name, W_K_NORM.name, *_LOGGED_MEASURES.values()))
"""What a watch writes itself: a number of the loop by such a name would make the metrics file unreadable."""


def measures_of(calls: Sequence[AttentionCall]) -> dict[str, NDArray[np.float64]]:
    """Return the logged measures of the layers' calls, which have as many heads, [n_layer, H] each: of all sequences
    together, as the probes of this package's own runs give them."""
    known = [with_sink(call, call.out) for call in calls]
    by_layer = [over_sequences(by_sequence(call, Results.kept(call), None, _of_heads)) for call in known]
    return {
        _LOGGED_MEASURES[name]: torch.stack([one[name] for one in by_layer]).numpy()
        for name in by_layer[0]
        if name in _LOGGED_MEASURES
    }


def _of_heads(call: AttentionCall, results: Results, _: Probed | None, n: int) -> Measures:
    """Those of a diagnosis that need no second attention to compare with: a training waits for them."""
    true = exact(call, n)
    found = of_scores(true)
    if results.out is not None:
        found |= of_out(finite_part(results.out[n]), true, call.grad_out[n].double())
    if results.grad_q is not None:
        of_dq = of_grad_q(finite_part(results.grad_q[n]), true, call.form.scale)
        # What came through another output than O is not to be told from an error of δ.
        judged = 1.0 if call.is_of_out_alone else torch.nan
        found |= {name: values * judged for name, values in of_dq.items()}
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
