"""Collects the errors of δ in the steps that follow a capture."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.delta_sample import delta_sample
from flashpoint.diagnosis.repeats import by_identity
from flashpoint.runs.subfolders import CaptureFolder
from flashpoint.watching import delta_file
from flashpoint.watching.events import CaptureMade, Handler, LoopEnded, LossesRead, StepObserved
from flashpoint.watching.notices import Notices

SEQUENCES = 256
"""How many are collected. Where δ has a noise of 2e-4 a row, as in the explosion of docs/findings/own_run.md, the bias
of a sequence of 2,048 rows spreads by 2e-4 / √2048 = 4.4e-6. Student's t of 256 sequences and 4 heads begins at 3.7:
what shows is 3.7 · 4.4e-6 / √256 = 1.0e-6, the smallest error that made a run explode (docs/findings/injected.md)."""
_PATIENCE = 100
"""Steps in a row that show none of the captured attentions, as where all batches are padded, after which no more are
awaited."""


class DeltaRecorder:
    """Measures the errors of δ in the steps that follow a capture, of one capture at a time.

    What follows a loss that is no finite number is none either: nothing is measured from then on.
    """

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._collection: _Collection | None = None
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
        if event.calls and event.sequences and self._collects:
            self._collection = _Collection(event.folder, event.calls, event.seen, event.sequences, self._notices)

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


class _Collection:
    """The errors of δ in the captured layers, step by step, until there are enough sequences.

    Args:
        folder: of the capture.
        calls: that were captured.
        seen: attentions of the model in the captured step. In a step that calls fewer or more, layers' numbers may
            stand for others.
        wanted: sequences.
    """

    def __init__(self, folder: Path, calls: Sequence[AttentionCall], seen: int, wanted: int, notices: Notices) -> None:
        self._folder, self._seen, self._wanted, self._notices = folder, seen, wanted, notices
        self._heads = {call.layer: call.q.shape[1] for call in calls}
        self._sequences = self._left_out = 0
        self._identities = list[str]()
        self._steps: list[int] = []

    @property
    def layers(self) -> frozenset[int]:
        return frozenset(self._heads)

    @property
    def complete(self) -> bool:
        return self._sequences >= self._wanted

    @property
    def given_up(self) -> bool:
        return self._left_out >= _PATIENCE

    def take(self, calls: Sequence[AttentionCall], seen: int) -> None:
        """Add the sequences of a step, if it called what the captured one did."""
        self._left_out += 1
        ours = [call for call in calls if call.layer in self._heads]
        if seen != self._seen or {call.layer: call.q.shape[1] for call in ours} != self._heads:
            return
        samples = {call.layer: delta_sample(call) for call in ours}
        fewest = min(samples.values(), key=lambda sample: len(sample.steps))
        count = len(fewest.steps)
        if not count:  # none is finite
            return
        self._folder.mkdir(parents=True, exist_ok=True)  # somebody may have removed the run
        delta_file.append(CaptureFolder(self._folder).new_delta, ours[0].step, samples)
        if not self._steps:
            self._notices.tell(f"step {ours[0].step:,}: from here on δ is measured, on {self._wanted:,} sequences")
        self._sequences += count
        self._identities += fewest.identities
        self._left_out = 0
        self._steps.append(ours[0].step)

    def tell(self) -> None:
        """Tell what there is to be diagnosed, if there is something."""
        if self.given_up:
            self._notices.tell(
                f"δ is measured no more: {_PATIENCE} steps in a row did not call the attentions of the captured step, "
                f"or only with numbers that are not finite; {self._sequences:,} of {self._wanted:,} sequences are there"
            )
        if not self._steps:
            return
        which = f"layer {min(self._heads)}" if len(self._heads) == 1 else f"{len(self._heads)} layers"
        count = f"{self._sequences:,}" if self.complete else f"{self._sequences:,} of {self._wanted:,}"
        first, last, different = self._steps[0], self._steps[-1], len(by_identity(self._identities))
        of_them = f", {different:,} different" if different < self._sequences else ""
        self._notices.tell(
            f"step {last:,}: δ of {which} was measured on {count} sequences{of_them}, of steps {first:,} to {last:,}; "
            f"{shlex.join(['flashpoint', 'diagnose', str(self._folder)])} counts them in"
        )
