"""What takes the events of a watched loop in: the recorders of the first process, and nothing in the others."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from flashpoint.detector import DetectorConfig
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.early_warning import Sentinel
from flashpoint.errors import counted
from flashpoint.files import shown
from flashpoint.runs.outcome import Verdict
from flashpoint.watching.arrivals import Arrivals
from flashpoint.watching.capture_recorder import CaptureRecorder, DeltaRecorder
from flashpoint.watching.events import Dispatcher, Handler, LoopLeft, LossSeen, StepEnded, StepObserved, StepStarted
from flashpoint.watching.first_nonfinite import FirstNonfinite
from flashpoint.watching.functions import NamedFunction
from flashpoint.watching.latest_batches import BatchRecorder, LatestBatches, MicroBatches
from flashpoint.watching.logged_metrics import AttentionMetrics, LoopMetrics, MaxLogits
from flashpoint.watching.losses import GradientNorms, LossRecorder, VerdictRecorder
from flashpoint.watching.notices import Notices, tell
from flashpoint.watching.observer import ObservationSchedule, Observer
from flashpoint.watching.projections import WeightNorms
from flashpoint.watching.watched_run import Options, WatchedRun

if TYPE_CHECKING:  # most loops have no listener
    from flashpoint.listeners import Listener


class Recorder(Protocol):
    """Takes all events of a loop."""

    @property
    def run(self) -> WatchedRun | None:
        """The run's folder and files."""

    @property
    def verdict(self) -> Verdict:
        """By the losses that have been read."""

    @property
    def busy(self) -> bool:
        """Whether a capture, or sequences of the steps after it, are still to come."""

    def take(self, event: Any) -> None:
        """Take in an event."""

    def warn(self, line: str) -> None:
        """Tell a mistake of the loop once."""


class NullRecorder:
    """Takes everything and does nothing: what processes other than the first have."""

    run: WatchedRun | None = None
    verdict: Verdict = "stable"
    busy = False

    def take(self, event: Any) -> None:
        """Do nothing."""

    def warn(self, line: str) -> None:
        """Tell nothing: the first process does."""


class RecorderOfAnImport(NullRecorder):
    """Tells of a step and does nothing else: what a process has that another one starts, as a worker of a DataLoader,
    while it imports the main program. Without a fork every such process runs the program's lines anew, but for those
    below ``if __name__ == "__main__":``."""

    def __init__(self) -> None:
        self._told = False

    def take(self, event: Any) -> None:
        """Tell of the first step."""
        if isinstance(event, LossSeen) and not self._told:
            self._told = True
            tell(
                "watch: made while a process that multiprocessing started imported the main program: its steps are not "
                'recorded; call flashpoint.watch below if __name__ == "__main__":, or in the function that trains',
                logging.WARNING,
            )


class Recording:
    """The recorders of one run. A process that is forked from the one that made them takes no part in it.

    Raises:
        UserError: the run's folder cannot be made.
        OSError: a file in it cannot be written.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        functions: Sequence[NamedFunction],
        listeners: Sequence[Listener],
    ) -> None:
        parameters, noise_scaled = list(model.parameters()), options.margin is None
        bounds = DetectorConfig() if options.margin is None else DetectorConfig(margin=options.margin)
        count, sentinel = sum(one.numel() for one in parameters), Sentinel(options.warmup_steps)
        self.run = run = WatchedRun(options, bounds, count, parameters[0].device, listeners)
        self._notices = notices = Notices(run.name, options.first_step)
        self._dispatcher = dispatcher = Dispatcher(notices)
        publish = dispatcher.publish
        arrivals = Arrivals(publish)
        batches = LatestBatches(2 * options.log_interval)  # so old is a batch when the loss of its step is known
        observer = Observer(model, options.sequences, functions, dispatcher, notices)
        norms = GradientNorms(model, options.weights_interval, notices)
        self._losses = LossRecorder(run, norms, sentinel, bounds, noise_scaled, arrivals, dispatcher, notices)
        self._deltas, self._captures = DeltaRecorder(notices), CaptureRecorder(run, publish, notices)
        logits = MaxLogits(options.logits_interval, options.max_logit, options.sequences, run, arrivals, notices)
        dispatcher.add(
            observer,
            self._losses,
            FirstNonfinite(  # before the batches, which are let go of
                model, lambda: observer.projections, norms.gradients,
                {one.word for one in functions if one.by_token}, options.weights_interval, batches, run, arrivals,
                notices,
            ),
            BatchRecorder(run, batches, options.save_batch, arrivals, notices),
            MicroBatches(model, arrivals, notices),
            AttentionMetrics(run, notices),
            logits,
            self._deltas,  # before the captures: a step that is captured is the last that an earlier capture measures
            self._captures,  # before the schedule, which observes what is wanted
            ObservationSchedule(
                observer, self._captures, self._deltas, batches, options.interval, options.log_interval,
                options.first_step, logits.due, dispatcher,
            ),
            WeightNorms(
                lambda: observer.projections, options.weights_interval, run, sentinel, arrivals, publish, notices
            ),
            LoopMetrics(run, arrivals),
            arrivals,  # after those who ask for numbers
            VerdictRecorder(run, self._losses),
            _FirstStep(run, notices),  # after the schedule, which tells what the step has shown
        )  # fmt: skip
        self._process, self._forked = os.getpid(), False

    @property
    def verdict(self) -> Verdict:
        """By the losses that have been read."""
        return self._losses.verdict

    @property
    def busy(self) -> bool:
        """Whether a capture, or sequences of the steps after it, are still to come."""
        return self._captures.wanted or bool(self._deltas.layers)

    def take(self, event: Any) -> None:
        """Hand an event to the recorders."""
        if self._leave_to_parent():
            return
        if isinstance(event, StepStarted):
            self._notices.step = event.step
        self._dispatcher.publish(event)

    def warn(self, line: str) -> None:
        """Tell a mistake of the loop once."""
        if not self._leave_to_parent():
            self._notices.warn(line)

    def _leave_to_parent(self) -> bool:
        """Return whether this process was forked from the one that watches, which alone writes the run. If so, tell it
        once, and observe no more."""
        if os.getpid() != self._process and not self._forked:
            self._forked = True
            self._notices.warn(
                f"process {os.getpid()} was forked from the one that watches, {self._process}: what it does is not "
                "recorded; call flashpoint.watch in the process that trains"
            )
            self._dispatcher.publish(LoopLeft())
        return self._forked


class _FirstStep:
    """Tells once what is watched, where it is written and how to follow it."""

    def __init__(self, run: WatchedRun, notices: Notices) -> None:
        self._run, self._notices = run, notices
        self._told = False
        self._calls: Sequence[AttentionCall] = ()

    @property
    def handlers(self) -> Sequence[Handler]:
        """What it does, by event."""
        what = "telling what is watched"
        return Handler(StepObserved, what, self._observe), Handler(StepEnded, what, self._tell)

    def _observe(self, event: StepObserved) -> None:
        if not self._told:
            self._calls = event.calls

    def _tell(self, event: StepEnded) -> None:
        if self._told:
            return
        self._told = True
        watched = "the loss, and no attention so far"
        if self._calls:
            layers, heads = len(self._calls), [call.q.shape[1] for call in self._calls]
            names = ", ".join(dict.fromkeys(call.attention for call in self._calls))
            first, last = self._calls[0].module, self._calls[-1].module
            where = f" ({first}{f' to {last}' if layers > 1 else ''})" if first and last else ""
            watched = f"the loss and {names} in {counted('layer', layers)} of {counted('head', *heads)}{where}"
        folder = str(shown(self._run.folder.path))
        follow = shlex.join(["flashpoint", "watch", folder])
        self._notices.tell(f"step {event.step:,}: {watched}, written to {folder}; to follow: {follow}")
        self._calls = ()  # tensors
