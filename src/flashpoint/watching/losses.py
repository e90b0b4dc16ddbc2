"""Recorders of a watched loop's losses: read when they have arrived, judged for what goes wrong, and logged; and of the
verdict at its end."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from flashpoint.detector import (
    LATEST,
    REACH,
    SHARE,
    DetectorConfig,
    ExplosionDetector,
    LoopDetector,
    NoiseScaledDetector,
    early_margin,
    undecided,
)
from flashpoint.early_warning import Sentinel
from flashpoint.runs.metric_table import GRAD_NORM, LOSS
from flashpoint.runs.outcome import NO_LOSS, Verdict
from flashpoint.watching.arrivals import Arrivals, Number, floats, one_number
from flashpoint.watching.events import (
    CaptureWanted,
    Dispatcher,
    Handler,
    LastRead,
    LoopEnded,
    LoopLeft,
    LossesRead,
    LossSeen,
    NormSeen,
    NotFinite,
    ReadDue,
    StepStarted,
)
from flashpoint.watching.left_out import is_dtensor, is_foreign, is_sharded, local
from flashpoint.watching.notices import Notices
from flashpoint.watching.watched_run import WatchedRun

if TYPE_CHECKING:  # most loops have no listener
    from flashpoint.listeners import Metrics
    from flashpoint.watching.passing_gradients import PassingGradients

_SUM = 30.0
"""Nats. The mean loss of a token begins near the logarithm of the vocabulary's size: 12.5 with 256,000 tokens."""
_OVERFLOW_CAPTURES = 3
"""That gradient norms which are not finite get in a run, at most."""
_BAD_CAPTURES = 3
"""That losses which are not finite, and do not last, get in a run at most; so often they are told."""


@dataclass(frozen=True, slots=True)
class _LossesArrived:
    """Losses and gradient norms can be read.

    Attributes:
        steps: of each loss, and whether a gradient norm is of the same step.
        numbers: the losses, and behind them the norms that there are.
    """

    steps: Sequence[tuple[int, bool]]
    numbers: Sequence[Number]


class GradientNorms:
    """Computes the norm of a model's gradients, and looks at its parameters.

    Args:
        interval: steps between looks at which parameters there are.
    """

    def __init__(self, model: nn.Module, interval: int, notices: Notices) -> None:
        self._model, self._interval, self._notices = model, interval, notices
        self._parameters = list[nn.Parameter]()
        self._sharded = False
        self._begun = 0  # steps
        self._passing: PassingGradients | None = None

    def begin(self) -> None:
        """A step begins: if the first one had no gradients, or zeros alone as was read later, find out why."""
        self._begun += 1
        if self._begun == 2 and all(one.grad is None for one in self._model.parameters()):
            self.look_for_gradients()
        if self._passing is not None:
            self._passing.begin(list(self._model.parameters()))
            self._passing = None if self._passing.over else self._passing

    def look_for_gradients(self) -> None:
        """Find out from the next step on why there are none."""
        if self._passing is None and not is_sharded(self._model):
            from flashpoint.watching.passing_gradients import PassingGradients  # most loops have them

            self._passing = PassingGradients(self._notices)

    def end(self) -> None:
        """No step follows."""
        if self._passing is not None:
            self._passing.end()

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """Return gradients, or what stands for them where the backward pass gives them up."""
        if self._passing is not None and self._passing.inside:
            return self._passing.of(parameters)
        return [one.grad for one in parameters]

    def of(self, step: int) -> Tensor | None:
        """Return the norm at a step, 0 where there are no gradients; None where processes share them."""
        if not self._parameters or (step + 1) % self._interval == 0:
            self._parameters = list(self._model.parameters())  # takes longer than their norm
            self._sharded = is_sharded(self._model)
        if self._sharded:
            self._notices.warn(
                "the norm of sharded gradients is not measured: all processes would have to; hand over what they "
                "computed together: watched.step(…, grad_norm=…)"
            )
            return None
        return gradient_norm(self.gradients(self._parameters))

    def parameters_are_finite(self) -> bool:
        """Return whether the trained parameters, as far as this process holds them, are finite now."""
        held = (local(one.detach()) for one in self._model.parameters() if one.requires_grad and not one.is_meta)
        return all(bool(one.isfinite().all()) for one in held if not is_foreign(one))


def gradient_norm(of_parameters: Iterable[Tensor | None]) -> Tensor | None:
    """Return the norm of all gradients together, 0 where no parameter has one; None where processes share one."""
    gradients = [one for one in of_parameters if one is not None]
    if any(map(is_dtensor, gradients)):  # their norm is summed over processes, and this one alone asks for it
        return None
    dense = [one.coalesce().values() if one.is_sparse else one for one in gradients]
    return nn.utils.get_total_norm(dense)


class LossRecorder:
    """Judges losses and gradient norms in the order of their steps. What they show is captured.

    The detector compares with a mean of earlier losses. Where a loop diverges at once they are as high as what follows.
    """

    def __init__(
        self,
        run: WatchedRun,
        gradient_norms: GradientNorms,
        sentinel: Sentinel,
        bounds: DetectorConfig,
        noise_scaled: bool,
        arrivals: Arrivals,
        dispatcher: Dispatcher,
        notices: Notices,
    ) -> None:
        self._run, self._gradient_norms, self._sentinel, self._bounds = run, gradient_norms, sentinel, bounds
        self._arrivals, self._dispatcher, self._notices = arrivals, dispatcher, notices
        self._detector = NoiseScaledDetector(bounds) if noise_scaled else ExplosionDetector(bounds, unit="")
        self._loop = LoopDetector(self._detector)
        self._overflows, self._told_margin = _Overflows(), False
        self._told_bad: tuple[int, Verdict] | None = None
        self._stretches = 0  # losses in a row that are no finite numbers count once
        self._pending: list[tuple[int, Number, Number | None]] = []
        self._first: float | None = None
        self._first_step: int | None = None
        self._last: float | None = None
        self._norm: float | None = None  # of the gradients of losses of 0, the latest one that is known
        self._latest: deque[float] = deque(maxlen=LATEST)
        self._loop_goes_on = True

    @property
    def handlers(self) -> Sequence[Handler]:
        """What it does, by event."""
        logging = "logging the losses"
        return (
            Handler(StepStarted, "looking for gradients", lambda _: self._gradient_norms.begin()),
            Handler(LossSeen, "reading the loss", self._add),
            Handler(NormSeen, "reading the gradient norm", self._add_norm),
            Handler(ReadDue, logging, self._ask),
            Handler(LoopLeft, logging, self._leave),
            Handler(LastRead, logging, self._ask),
            Handler(_LossesArrived, logging, self._judge),
            Handler(LoopEnded, "judging the end", self._end),
        )

    @property
    def verdict(self) -> Verdict:
        """By the losses that have been read."""
        return self._loop.verdict

    @property
    def onset_step(self) -> int | None:
        """Of an explosion, or of the first loss that is no finite number, of those that lasted."""
        return self._loop.onset_step

    @property
    def last(self) -> float:
        """The latest loss that has been read, nats; NaN before any."""
        return math.nan if self._last is None else self._last

    @property
    def none_read(self) -> bool:
        """Whether no loss has been read."""
        return self._last is None

    def _add(self, event: LossSeen) -> None:
        self._pending.append((event.step, one_number(event.loss, "the loss"), None))

    def _add_norm(self, event: NormSeen) -> None:
        """Add the gradient norm to the loss of its step, if there is one."""
        norm = self._gradient_norms.of(event.step) if event.norm is None else event.norm
        if norm is not None and self._pending and self._pending[-1][0] == event.step:
            self._pending[-1] = event.step, self._pending[-1][1], one_number(norm, "grad_norm")

    def _leave(self, _: LoopLeft) -> None:
        self._loop_goes_on = False

    def _ask(self, _: ReadDue | LastRead) -> None:
        """Have the losses since the last time read, judged and logged."""
        pending, self._pending = self._pending, []
        if pending:
            numbers = [loss for _, loss, _ in pending] + [norm for _, _, norm in pending if norm is not None]
            self._arrivals.ask(_LossesArrived([(step, norm is not None) for step, _, norm in pending], numbers))

    def _judge(self, event: _LossesArrived) -> None:
        """Judge and log losses, and the gradient norms that there are."""
        count, last_step = len(event.steps), event.steps[-1][0]
        losses, norms = floats(event.numbers[:count]), iter(self._norms(event.numbers[count:]))
        lines: list[tuple[int, Metrics]] = []
        for (step, has_norm), loss in zip(event.steps, losses, strict=True):
            norm = next(norms) if has_norm else None
            self._judge_step(step, loss, norm)
            self._tell_margin(step)
            lines.append((step, {LOSS.name: loss} if norm is None else {LOSS.name: loss, GRAD_NORM.name: norm}))
        self._look(losses[-1])
        by_step = dict(zip((step for step, _ in event.steps), losses, strict=True))
        self._dispatcher.publish(LossesRead(last_step, self.verdict, by_step))
        self._last = losses[-1]
        finite = list(filter(math.isfinite, losses))
        if self._first is None and finite:
            self._first = finite[0]
            self._warn_of_sum(self._first)
        self._latest.extend(finite)
        self._warn_of_jump(event.steps)
        self._run.log_all(lines)  # last: all are judged on a full disk

    def _norms(self, read: Sequence[Number]) -> Sequence[float | None]:
        """Return gradient norms; None for all of them where one cannot be read, which is no reason to lose losses."""
        with self._dispatcher.shield("reading the gradient norms"):
            return floats(read)
        return [None] * len(read)

    def _judge_step(self, step: int, loss: float, norm: float | None) -> None:
        if self.verdict != "stable":
            return
        since = self._loop.since
        if norm == 0 and loss and math.isfinite(loss):  # the mean of no labels is NaN, and its gradients are 0
            self._gradient_norms.look_for_gradients()
        self._loop.update(step, loss)  # by the loss: a step that a GradScaler skips has no finite norm
        overflow = norm is not None and self._overflows.update(norm)
        began = since is None and self._loop.since is not None
        self._stretches += began
        if overflow or (began and self._stretches <= _BAD_CAPTURES):
            reason = f"loss {loss:.4g}" if norm is None else f"loss {loss:.4g}, gradient norm {norm:.4g}"
            self._dispatcher.publish(NotFinite(step, reason, self._loop_goes_on))
        if since is not None and self._loop.since is None and self._stretches <= _BAD_CAPTURES:
            some = f"of step {since:,}" if since == step - 1 else f"of steps {since:,} to {step - 1:,}"
            self._notices.tell(
                f"step {step:,}: the loss is a finite number again: the verdict leaves out that {some}. A batch "
                "without labels has NaN for a loss, the mean of nothing"
            )
        self._norm = None if loss else self._norm if norm is None else norm
        if self._loop.zeros == LATEST:
            why = "has the batch labels, and does the mask or the weight of the loss leave some of them?"
            if self._norm:
                why = (
                    "gradients are not 0, so it is perhaps a policy gradient whose advantages sum to 0. Hand over a "
                    "number that is to fall, as minus the mean reward"
                )
            self._notices.warn(
                f"the losses of {LATEST} steps in a row are exactly 0, and the verdict leaves such out: {why}"
            )
        if self.verdict == "exploded":
            hottest = self._sentinel.hottest(1)
            self._dispatcher.publish(CaptureWanted(self._detector.decision, hottest[0].layer if hottest else None))

    def _look(self, loss: float) -> None:
        """Tell what the latest loss means, if it is no finite number."""
        told, since = self._told_bad, self._loop.since
        self._loop.look(self._parameters_are_finite)
        if since is None or told == (since, self.verdict):
            return
        self._told_bad = since, self.verdict
        if self.verdict == "nonfinite":
            if self._stretches > _BAD_CAPTURES:
                self._dispatcher.publish(NotFinite(since, f"loss {loss:.4g}", self._loop_goes_on))
            self._tell_nonfinite()
        elif self._stretches <= _BAD_CAPTURES:
            self._notices.tell(
                f"step {since:,}: the loss is {loss}, and the parameters are finite: has the batch no label, so that "
                "its loss is the mean of nothing? The losses that follow decide",
                logging.WARNING,
            )

    def _tell_nonfinite(self) -> None:
        self._notices.tell(
            f"step {self._loop.since:,}: the loss is no finite number, {self._loop.lasts}: the verdict is nonfinite",
            logging.WARNING,
        )

    def _parameters_are_finite(self) -> bool:
        """Return whether the parameters that this process holds and trains are finite; waits for the GPU."""
        with self._dispatcher.shield("looking at the parameters"):
            return self._gradient_norms.parameters_are_finite()
        return True

    def _warn_of_jump(self, steps: Sequence[tuple[int, bool]]) -> None:
        """Tell of losses that rise at once where a loop goes on from a checkpoint, while it happens."""
        if self._first_step is None:
            self._first_step = steps[0][0]
        first, begun = self._first, self._first_step
        if not begun or first is None or math.isfinite(self._detector.minimum) or len(self._latest) < LATEST:
            return
        if min(self._latest) > first + early_margin(self._latest, first):
            self._notices.warn(
                f"the loss rose from {first:.3g} to {max(self._latest):.3g} in the first {steps[-1][0] - begun + 1} "
                f"steps after step {begun:,}: look at optimiser state, schedule and order of the data first"
            )

    def _tell_margin(self, step: int) -> None:
        """Tell once how the margin was set, when a window of losses is full."""
        detector, bounds = self._detector, self._bounds
        if self._told_margin or not math.isfinite(detector.minimum):
            return
        self._told_margin = True
        how = "what margin= says"
        if isinstance(detector, NoiseScaledDetector):
            how = f"{REACH:.1f} times the wander of such means, {detector.wander:.2g}"
            if detector.margin > REACH * detector.wander:
                how = f"{SHARE:.0%} of the minimum, for {REACH:.1f} times the wander of such means is less"
            how += ", and follows later losses; margin= of flashpoint.watch sets another"
        self._notices.tell(
            f"step {step:,}: an explosion is called once the mean of {bounds.window} steps stands more than "
            f"{detector.margin:.3g} above its minimum ({detector.minimum:.3g} now) for {bounds.hold_steps} steps; the "
            f"margin is {how}"
        )

    def _warn_of_sum(self, first: float) -> None:
        if _SUM < first < math.inf:
            self._notices.warn(
                f"the first loss is {first:.3g}: if it is a sum, divide it by the number of its tokens; an explosion "
                "is judged by their mean"
            )

    def _end(self, event: LoopEnded) -> None:
        """Tell of a loop whose losses do not decide, and have its last observation kept: no other one comes."""
        self._gradient_norms.end()
        stable = self.verdict == "stable"
        self._loop.end()
        if stable and self.verdict == "nonfinite":
            self._tell_nonfinite()
        if (left_out := len(self._loop.left_out)) > _BAD_CAPTURES:
            self._notices.tell(f"{left_out:,} losses were no finite numbers: the verdict leaves them out")
        if self.none_read:
            if event.made:
                self._notices.warn(f"{NO_LOSS}, and nothing is judged: the run counts as stopped")
        elif self._first is not None and self.verdict == "stable":
            said = undecided(self._detector, self._bounds, self._first, self._latest)
            if said is not None:
                self._dispatcher.publish(CaptureWanted(f"the loop {said}", None))


class _Overflows:
    """Judges the gradient norms of a run, in order.

    The first one that is not finite is worth a capture, as the loss may fail with it. A GradScaler skips such steps
    now and then, at the start of a run above all. So later, after finite norms, it takes two in a row.
    """

    def __init__(self) -> None:
        self._captures, self._in_a_row, self._needed = 0, 0, 1

    def update(self, norm: float) -> bool:
        """Take in the next norm; return whether a capture is to be made."""
        if math.isfinite(norm):
            self._in_a_row, self._needed = 0, 2 if self._captures else 1
            return False
        self._in_a_row += 1
        if self._in_a_row != self._needed or self._captures == _OVERFLOW_CAPTURES:
            return False
        self._captures += 1
        return True


class VerdictRecorder:
    """Writes the verdict at the end of the loop."""

    def __init__(self, run: WatchedRun, losses: LossRecorder) -> None:
        self._run, self._losses = run, losses
        self._started = time.perf_counter()

    @property
    def handlers(self) -> Sequence[Handler]:
        """What it does, by event."""
        return (Handler(LoopEnded, "writing the verdict", self._write),)

    def _write(self, event: LoopEnded) -> None:
        losses, seconds = self._losses, time.perf_counter() - self._started
        interrupted = event.interrupted or (NO_LOSS if losses.none_read else None)
        self._run.close(losses.verdict, losses.onset_step, event.steps, losses.last, seconds, interrupted)
