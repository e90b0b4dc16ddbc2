"""Which steps of a watched loop have their attention observed, and what is kept of it."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.errors import notify
from flashpoint.watching.batches import LatestBatches
from flashpoint.watching.delta_collection import SEQUENCES, DeltaCollection
from flashpoint.watching.guard import Guard
from flashpoint.watching.observations import Observations
from flashpoint.watching.observer import Observer
from flashpoint.watching.run import WatchedRun
from flashpoint.watching.values import measures_of

_CAPTURED = 16
"""Sequences of a capture, and of each step that is collected: a batch of any size fits beside the training."""
_TRIES = 10
"""Steps without attention, as of a loop that skips the backward pass, after which a capture is of the last step that
had some."""
_PATIENCE = 100
"""Steps at most that a collection leaves out for another watched model that is to be observed, and that a model waits
for another one, which may be trained no more, before it ends the observation of that one."""


@dataclass(frozen=True)
class _Capture:
    """One that is to be made of the next observation.

    Attributes:
        reasons: are told with it.
        layer: the only one to keep; None is all.
        sequences: of later steps, in which the error of δ is to be measured.
        by_last: whether the last observation serves where no step follows: it does not where it has been kept already.
    """

    reasons: tuple[str, ...]
    layer: int | None
    sequences: int
    by_last: bool = True

    def joined(self, other: _Capture | None) -> _Capture:
        """Return one that has what this one and another have, if there is another: no reason is lost."""
        if other is None:
            return self
        reasons = tuple(dict.fromkeys(other.reasons + self.reasons))
        layer = self.layer if self.layer == other.layer else None
        return _Capture(reasons, layer, max(self.sequences, other.sequences), self.by_last or other.by_last)

    @property
    def reason(self) -> str:
        return "; ".join(self.reasons)


class ObservationSchedule:
    """Has steps observed at an interval, for captures, and to collect errors of δ after a capture.

    Args:
        interval: steps between observations.
        search_interval: steps after which attention that no step has shown yet is first looked for again.
        first_step: of the loop; it is observed.
    """

    _awaited: ClassVar[int] = 0
    """Steps for which collections still give way: each would begin again before any other watched model could."""

    def __init__(
        self,
        observer: Observer,
        run: WatchedRun,
        batches: LatestBatches,
        guard: Guard,
        interval: int,
        search_interval: int,
        first_step: int,
    ) -> None:
        self._observer, self._run, self._batches, self._guard = observer, run, batches, guard
        self._interval, self._search_interval = interval, search_interval
        self._first_step = self._search_again = first_step
        self._postponed = 0  # steps for which another watched model has been observed when this one was due
        self._shape: tuple[int, int] | None = None
        self._observations = Observations()
        self._wanted: _Capture | None = None
        self._collection: DeltaCollection | None = None
        self._collects = True
        self._tried = 0

    @property
    def unfinished(self) -> bool:
        """Whether a capture is to be made, or errors of δ are to be collected."""
        return self._wanted is not None or self._collection is not None

    def want(self, step: int, reason: str, sequences: int) -> None:
        """Capture all layers of the next forward pass, of this step if it is still to come."""
        self._wanted = _Capture((reason,), None, sequences).joined(self._wanted)
        if self._observer.partial:  # it does not observe all layers
            self._observer.drop()
        self._observer.keep_at_least(_CAPTURED)
        self.begin(step)

    def want_next(self, reason: str, layer: int | None) -> None:
        """Capture a layer of the next step; None is all."""
        self._wanted = _Capture((reason,), layer, SEQUENCES).joined(self._wanted)

    def begin(self, step: int) -> None:
        """Observe the next forward pass, if the step is to be observed."""
        if self._observer.observing:
            return
        due = (step + 1) % self._interval == 0 or self._wanted is not None
        due = due or self._postponed > 0 or (self._shape is None and step == self._search_again)
        self._postponed = self._postponed + 1 if due and self._observer.must_wait else 0
        if self._postponed > _PATIENCE:
            self._observer.interrupt()
            self._postponed = 0
        elif self._postponed:
            ObservationSchedule._awaited = _PATIENCE
        if self._observer.must_wait or not (due or self._collection):
            return
        if not due and ObservationSchedule._awaited:
            ObservationSchedule._awaited -= 1
            return
        if due:
            ObservationSchedule._awaited = 0
        least = 0 if self._wanted is None and self._collection is None else _CAPTURED
        layers = None if due or self._collection is None else self._collection.layers
        self._guard.do("observing the attention", lambda: self._observer.begin(step, least, layers))

    def take(self, step: int) -> None:
        """Take in the step that was observed, if one was; one whose capture came after the forward pass waits."""
        if self._observer.observing and (
            self._observer.has_calls or self._wanted is None or self._observer.since < step
        ):
            self._guard.do("measuring the attention", lambda: self._observed(step))

    def keep_nonfinite(self, reason: str, step: int, goes_on: bool) -> None:
        """Write the last observation up to a step that had a number that is none, and its batch; if that step has a
        capture of its own, this stays. Where the observation is older than that and the loop goes on, capture the next
        step, too: it may not come, and what was last finite does not show where it began."""
        calls = [] if self._run.has_capture(step) else self._observations.until(step)
        told = reason
        earlier = bool(calls) and calls[0].step < step
        if earlier:
            told += f"; the tensors are of step {calls[0].step:,}, the last one before it that is held"
        if goes_on and earlier:  # first: writing may fail
            wanted = _Capture((f"{reason} at step {step:,}",), None, 0, by_last=False)
            self._wanted = wanted.joined(self._wanted)
            told += ", and those of the next step are to come"
        self._keep(f"step {step:,}: {told}", calls, step)

    def read(self, step: int) -> None:
        """The losses up to a step are known, and :meth:`keep_nonfinite` has been called for those that are none."""
        self._observations.read(step)

    def collect_no_more(self) -> None:
        """Collect no errors of δ from now on: what follows a loss that is no number is none either."""
        self._collects = False
        self._end_collection()

    def stop(self) -> None:
        """The loop has ended: put back what observing replaced."""
        self._observer.drop()
        if self._postponed:
            ObservationSchedule._awaited = 0

    def end(self) -> None:
        """Write what is still to be written. Without a step that follows, as after an explosion, what was asked for is
        made of the last observation."""
        self._end_collection()
        self._make_of_last()

    def _make_of_last(self) -> None:
        """Make what was asked for of the last observation."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None and self._observations.last:
            if wanted.by_last:
                self._keep_as(wanted, late=True)
        elif wanted is not None:
            self._guard.tell(f"no capture ({wanted.reason}): until now no step has shown attention")

    def _observed(self, step: int) -> None:
        partial = self._observer.partial
        calls = self._identified(step, self._observer.finish(step))
        self._guard.do("noting what is not recorded", lambda: self._run.note_not_recorded(self._observer.not_recorded))
        if self._collection is not None:
            self._collect(self._collection, calls)
        if partial:
            return
        if not calls:  # look again soon, at ever longer distances
            self._search_again = self._first_step + max(2 * (step - self._first_step), self._search_interval)
            self._tried += 1
            if self._shape is None or self._tried >= _TRIES:
                self._make_of_last()
            return
        self._tried = 0
        if self._shape is None:
            self._run.describe(calls)
            self._shape = len(calls), calls[0].q.shape[1]
        self._observations.add(calls)
        self._guard.do("measuring the attention", lambda: self._measure(step, calls))
        if self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            self._guard.do("writing a capture", lambda: self._make(wanted))

    def _make(self, wanted: _Capture) -> None:
        """Write a capture of the step that has just been observed, and begin to collect errors of δ."""
        if wanted.by_last:  # a step that a GradScaler skips is no reason to end one
            self._end_collection()
        kept, folder = self._keep_as(wanted)
        if kept and wanted.sequences and self._collects:
            self._collection = DeltaCollection(folder, kept, self._observer.seen, wanted.sequences)

    def _identified(self, step: int, calls: list[AttentionCall]) -> list[AttentionCall]:
        """Return calls that know their sequences by what the model was given or by the batch, where one shows them."""
        found: list[str] = []

        def find() -> None:
            count = len(calls[0].q)
            found[:] = self._observer.identities(count) or self._batches.identities(step, self._observer.rows, count)

        if calls:
            self._guard.do("telling the sequences of a batch apart", find)
        return [dataclasses.replace(call, identities=tuple(found)) for call in calls]

    def _measure(self, step: int, calls: list[AttentionCall]) -> None:
        if {(len(calls), call.q.shape[1]) for call in calls} == {self._shape}:
            self._run.log(step, measures_of(calls))
        else:
            self._guard.tell("layers have different numbers of heads, or not every step has all of them: "
                       "bias of δ and the like are not logged there; captures have them")  # fmt: skip

    def _collect(self, collection: DeltaCollection, calls: list[AttentionCall]) -> None:
        """Add a step to a collection. One that is complete, or in which measuring fails, is at its end."""
        failed = True
        try:
            collection.take(calls, self._observer.seen)
            failed = False
        finally:
            if failed or collection.complete or collection.given_up:
                self._end_collection()

    def _end_collection(self) -> None:
        ended, self._collection = self._collection, None
        if ended is not None:
            ended.tell()

    def _keep_as(self, wanted: _Capture, *, late: bool = False) -> tuple[list[AttentionCall], Path]:
        """Write what was asked for of the last observation, which may be an earlier one; return it and its folder."""
        last = self._observations.last
        step = last[0].step
        # In a step with other attentions than those whose W_Q is known, a layer's number can stand for another one.
        layer = wanted.layer if self._shape and len(last) == self._shape[0] else None
        calls = [call for call in last if layer in (None, call.layer)]
        if late:
            return calls, self._keep(
                f"watch: {wanted.reason}; the tensors are of step {step:,}, which was observed last", calls, step
            )
        return calls, self._keep(f"step {step:,}: {wanted.reason}", calls, step)

    def _keep(self, told: str, calls: list[AttentionCall], step: int) -> Path:
        folder = self._run.keep(calls, step)
        self._guard.do("keeping the batch", lambda: self._keep_batch(step))
        notify(told + (f"; wrote {folder}" if folder.is_dir() else ""))
        if calls:
            notify(f"{shlex.join(['flashpoint', 'diagnose', str(folder)])} says what its attention did")
        return folder

    def _keep_batch(self, step: int) -> None:
        batch, unchanged = self._batches.of(step)
        if not unchanged:
            self._guard.tell("a batch is not kept: its tensors have been overwritten since its step; hand over copies")
        elif batch is not None:
            self._run.keep_batch(batch, step)
