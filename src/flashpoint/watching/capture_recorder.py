"""Which captures of a watched loop are made, of which observation, and the errors of δ after them."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.measure_table import SEQUENCES
from flashpoint.files import shown
from flashpoint.runs.subfolders import CaptureFolder
from flashpoint.watching.events import (
    CaptureAsked,
    CaptureMade,
    CaptureWanted,
    CaptureWritten,
    Handler,
    LoopEnded,
    LossesRead,
    NotFinite,
    Publish,
    StepObserved,
)
from flashpoint.watching.notices import Notices
from flashpoint.watching.watched_run import WatchedRun

if TYPE_CHECKING:
    from flashpoint.watching.delta_collection import DeltaCollection

CAPTURED = 16
"""Sequences of a capture, and of each step in which δ is measured: a batch of any size fits beside the training."""
_TRIES = 10
"""Steps without attention, as of a loop that skips the backward pass, after which a capture is of the last step that
had some."""


class _HeldObservations:
    """The last observation of all layers, and an earlier one as long as a step before the last one can turn out to have
    failed. Losses are read some steps late.

    The earlier one lies in the memory of the CPU. It is the newest that no such step precedes.

    Attributes:
        last: the calls of the last observed step; empty before there is one.
    """

    def __init__(self) -> None:
        self.last: list[AttentionCall] = []
        self._before: list[AttentionCall] = []
        self._first_unread = 0

    def add(self, calls: Sequence[AttentionCall]) -> None:
        """Hold the calls of a step, which are some."""
        if self.last and self.last[0].step <= self._first_unread:
            self._before = [call.to(torch.device("cpu")) for call in self.last]
        self.last = list(calls)
        self._let_go()

    def read(self, step: int) -> None:
        """The losses up to a step are known, and captures of those that failed are made."""
        self._first_unread = step + 1
        self._let_go()

    def until(self, step: int) -> list[AttentionCall]:
        """Return the calls of the newest held observation that is not later than a step; empty where there is none."""
        held = (calls for calls in (self.last, self._before) if calls and calls[0].step <= step)
        return next(held, [])

    def _let_go(self) -> None:
        if self.last and self.last[0].step <= self._first_unread:
            self._before = []


@dataclass(frozen=True)
class _Capture:
    """One that is to be made of the next observation.

    Attributes:
        reasons: are told with it.
        layer: the only one to keep; None is all.
        sequences: of later steps, in which the error of δ is to be measured.
        by_last: whether the last observation serves where no step follows: it does not where it has been kept already.
        level: of the line that tells it.
    """

    reasons: tuple[str, ...]
    layer: int | None
    sequences: int
    by_last: bool = True
    level: int = logging.WARNING

    def joined(self, other: _Capture | None) -> _Capture:
        """Return one that has what this one and another have, if there is another: no reason is lost."""
        if other is None:
            return self
        reasons = tuple(dict.fromkeys(other.reasons + self.reasons))
        layer = self.layer if self.layer == other.layer else None
        sequences, level = max(self.sequences, other.sequences), max(self.level, other.level)
        return _Capture(reasons, layer, sequences, self.by_last or other.by_last, level)

    @property
    def reason(self) -> str:
        return "; ".join(self.reasons)


class CaptureRecorder:
    """Writes captures: of the next observation, or where none follows of the last one."""

    def __init__(self, run: WatchedRun, publish: Publish, notices: Notices) -> None:
        self._run, self._publish, self._notices = run, publish, notices
        self._observations = _HeldObservations()
        self._modules: list[str] | None = None  # of the layers, in the first observed step
        self._wanted: _Capture | None = None
        self._tried = 0

    @property
    def handlers(self) -> Sequence[Handler]:
        """What it does, by event."""
        writing = "writing a capture"
        return (
            Handler(CaptureAsked, writing, self._ask),
            Handler(CaptureWanted, writing, self._want),
            Handler(NotFinite, writing, self._keep_nonfinite),
            Handler(LossesRead, writing, lambda event: self._observations.read(event.step)),
            Handler(StepObserved, writing, self._take),
            Handler(LoopEnded, writing, lambda _: self._make_of_last()),
        )

    @property
    def wanted(self) -> bool:
        """Whether a capture is to be made."""
        return self._wanted is not None

    def _ask(self, event: CaptureAsked) -> None:
        """Capture all layers."""
        self._wanted = _Capture((event.reason,), None, event.sequences, level=logging.INFO).joined(self._wanted)

    def _want(self, event: CaptureWanted) -> None:
        """Capture a layer of the next step."""
        self._wanted = _Capture((event.reason,), event.layer, SEQUENCES).joined(self._wanted)

    def _keep_nonfinite(self, event: NotFinite) -> None:
        """Write the last observation up to a step that had a number that is none, and its batch; if that step has a
        capture of its own, this stays. Where the observation is older than that and the loop goes on, capture the next
        step, too. It may not come, and what was last finite does not show where it began."""
        step, told = event.step, event.reason
        calls = [] if self._run.has_capture(step) else self._observations.until(step)
        earlier = bool(calls) and calls[0].step < step
        if earlier:
            told += f"; the tensors are of step {calls[0].step:,}, the last one before it that is held"
        if event.loop_goes_on and earlier:  # first: writing may fail
            wanted = _Capture((f"{event.reason} at step {step:,}",), None, 0, by_last=False)
            self._wanted = wanted.joined(self._wanted)
            told += ", and those of the next step are to come"
        self._keep(f"step {step:,}: {told}", calls, step, logging.WARNING)

    def _take(self, event: StepObserved) -> None:
        """Hold an observation of all layers, and make the capture of it that is wanted."""
        if event.partial:
            return
        if not event.calls:
            self._tried += 1
            if self._modules is None or self._tried >= _TRIES:
                self._make_of_last()
            return
        self._tried = 0
        if self._modules is None:
            self._modules = [call.module for call in event.calls]
        self._observations.add(event.calls)
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            calls = self._wanted_of_last(wanted)
            folder = self._keep(f"step {event.step:,}: {wanted.reason}", calls, event.step, wanted.level)
            # A step that a GradScaler skips is no reason to end an earlier measuring.
            self._publish(CaptureMade(folder, calls, event.seen, wanted.sequences, replaces=wanted.by_last))

    def _make_of_last(self) -> None:
        """Make what is wanted of the last observation: none follows, as after an explosion, or none shows attention."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None and self._observations.last:
            if wanted.by_last:
                step = self._observations.last[0].step
                told = f"{wanted.reason}; the tensors are of step {step:,}, which was observed last"
                self._keep(told, self._wanted_of_last(wanted), step, wanted.level)
        elif wanted is not None:
            self._notices.warn(f"no capture ({wanted.reason}): until now no step has shown attention")

    def _wanted_of_last(self, wanted: _Capture) -> list[AttentionCall]:
        """Return the calls of the last observation that are wanted."""
        last = self._observations.last
        # In a step with other attentions than those whose W_Q is known, a layer's number can stand for another one.
        layer = wanted.layer if [call.module for call in last] == self._modules else None
        return [call for call in last if layer in (None, call.layer)]

    def _keep(self, told: str, calls: list[AttentionCall], step: int, level: int) -> Path:
        folder = self._run.keep(calls, step)
        self._publish(CaptureWritten(step))
        capture = CaptureFolder(shown(folder))
        if capture.batch_alone:
            told += f"; no attention was recorded, so there is nothing to diagnose; {capture.batch_alone}"
        elif folder.is_dir():
            batch = ", with the batch of that step (save_batch=False leaves it out)" * capture.batch.is_file()
            told += f"; wrote {capture.path}{batch}"
        self._notices.tell(told, level)
        if calls:
            self._notices.tell(
                f"{shlex.join(['flashpoint', 'diagnose', str(capture.path)])} says what its attention did"
            )
        return folder


class DeltaRecorder:
    """Measures the errors of δ in the steps that follow a capture, of one capture at a time.

    What follows a loss that is no finite number is none either: nothing is measured from then on.
    """

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._collection: DeltaCollection | None = None
        self._collects = True

    @property
    def handlers(self) -> Sequence[Handler]:
        """What it does, by event."""
        what = "measuring δ"
        return (
            Handler(StepObserved, what, self._take),
            Handler(CaptureMade, what, self._begin),
            Handler(LossesRead, what, self._read),
            Handler(LoopEnded, what, lambda _: self._end()),
        )

    @property
    def layers(self) -> frozenset[int]:
        """Those in which δ is being measured; none where it is not."""
        return frozenset() if self._collection is None else self._collection.layers

    def _begin(self, event: CaptureMade) -> None:
        if event.replaces:
            self._end()
        calls = [call for call in event.calls if call.is_of_out_alone]  # δ of the others cannot be measured
        if calls and event.sequences and self._collects:
            from flashpoint.watching.delta_collection import DeltaCollection  # few loops come so far

            self._collection = DeltaCollection(event.folder, calls, event.seen, event.sequences, self._notices)

    def _take(self, event: StepObserved) -> None:
        """Add a step. A collection that is complete, or in which measuring fails, is at its end."""
        if (collection := self._collection) is None:
            return
        failed = True
        try:
            collection.take(event.calls, event.seen)
            failed = False
        finally:
            if failed or collection.complete or collection.given_up:
                self._end()

    def _read(self, event: LossesRead) -> None:
        if event.verdict == "nonfinite":
            self._collects = False
            self._end()

    def _end(self) -> None:
        ended, self._collection = self._collection, None
        if ended is not None:
            ended.tell()
