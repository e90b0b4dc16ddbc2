"""Which steps of a watched loop have their attention observed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.watching.capture_recorder import CAPTURED, CaptureRecorder
from flashpoint.watching.delta_collection import DeltaRecorder
from flashpoint.watching.events import (
    CaptureAsked,
    Dispatcher,
    Handler,
    LoopLeft,
    StepEnded,
    StepObserved,
    StepStarted,
)
from flashpoint.watching.latest_batches import LatestBatches
from flashpoint.watching.observer import Observer

_PATIENCE = 100
"""Steps at most that a collection leaves out for another watched model that is to be observed, and that a model waits
for another one, which may be trained no more, before it ends the observation of that one."""


class ObservationSchedule:
    """Has steps observed at an interval, for captures, and to measure δ after a capture.

    Args:
        observer: does it.
        captures, deltas: may want a step.
        batches: tell the sequences of a step apart, where the model's inputs do not.
        interval: steps between observations.
        search_interval: steps after which attention that no step has shown yet is first looked for again.
        first_step: of the loop; it is observed.
    """

    _awaited: ClassVar[int] = 0
    """Steps for which collections still give way: each would begin again before any other watched model could."""

    def __init__(
        self,
        observer: Observer,
        captures: CaptureRecorder,
        deltas: DeltaRecorder,
        batches: LatestBatches,
        interval: int,
        search_interval: int,
        first_step: int,
        dispatcher: Dispatcher,
    ) -> None:
        self._observer, self._captures, self._deltas, self._batches = observer, captures, deltas, batches
        self._interval, self._search_interval = interval, search_interval
        self._first_step = self._search_again = first_step
        self._dispatcher = dispatcher
        self._shown = False  # whether a step has shown attention
        self._postponed = 0  # steps for which another watched model has been observed when this one was due

    @property
    def handlers(self) -> Sequence[Handler]:
        """What it does, by event."""
        begin, end = "observing the attention", "measuring the attention"
        return (
            Handler(StepStarted, begin, lambda event: self._begin(event.step)),
            Handler(CaptureAsked, begin, lambda event: self._begin_asked(event.step)),
            Handler(StepEnded, end, lambda event: self._end(event.step)),
            Handler(LoopLeft, "putting the attention back", lambda _: self._stop()),
        )

    def _begin(self, step: int) -> None:
        """Observe the next forward pass, if the step is to be observed."""
        observer, wanted = self._observer, self._captures.wanted
        if observer.observing:
            return
        due = (step + 1) % self._interval == 0 or wanted
        due = due or self._postponed > 0 or (not self._shown and step == self._search_again)
        self._postponed = self._postponed + 1 if due and observer.must_wait else 0
        if self._postponed > _PATIENCE:
            observer.interrupt()
            self._postponed = 0
        elif self._postponed:
            ObservationSchedule._awaited = _PATIENCE
        measured = self._deltas.layers
        if observer.must_wait or not (due or measured):
            return
        if not due and ObservationSchedule._awaited:
            ObservationSchedule._awaited -= 1
            return
        if due:
            ObservationSchedule._awaited = 0
        observer.begin(step, CAPTURED if wanted or measured else 0, None if due else measured)

    def _begin_asked(self, step: int) -> None:
        """Observe all layers of the next forward pass, of this step if it is still to come."""
        if self._observer.partial:  # it does not observe all layers
            self._observer.drop()
        self._observer.keep_at_least(CAPTURED)
        self._begin(step)

    def _end(self, step: int) -> None:
        """Take in the step that was observed, if one was; one whose capture came after the forward pass waits."""
        observer = self._observer
        if not observer.observing or not (observer.has_calls or not self._captures.wanted or observer.since < step):
            return
        calls = self._identified(step, observer.finish(step))
        if not observer.partial:
            if calls:
                self._shown = True
            else:  # look again soon, at ever longer distances
                self._search_again = self._first_step + max(2 * (step - self._first_step), self._search_interval)
        self._dispatcher.publish(StepObserved(step, calls, observer.seen, observer.partial, observer.not_recorded))

    def _identified(self, step: int, calls: list[AttentionCall]) -> list[AttentionCall]:
        """Return calls that know their sequences by what the model was given or by the batch, where one shows them."""
        if not calls:
            return calls
        count = len(calls[0].q)
        with self._dispatcher.shield("telling the sequences of a batch apart"):
            found = self._observer.identities(count) or self._batches.identities(step, self._observer.rows, count)
            return [dataclasses.replace(call, identities=tuple(found)) for call in calls]
        return calls

    def _stop(self) -> None:
        """Put back what observing replaced: the loop has ended."""
        self._observer.drop()
        if self._postponed:
            ObservationSchedule._awaited = 0
