"""The losses of a watched loop: read when they have arrived, judged for what goes wrong, and logged."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from flashpoint.detector import DetectorConfig, ExplosionDetector
from flashpoint.early_warning import Sentinel
from flashpoint.listeners import Metrics
from flashpoint.runs.outcome import Verdict
from flashpoint.watching.arrivals import Arrivals, Number
from flashpoint.watching.batches import LatestBatches
from flashpoint.watching.guard import Guard
from flashpoint.watching.observation_schedule import ObservationSchedule
from flashpoint.watching.overflows import Overflows
from flashpoint.watching.run import WatchedRun
from flashpoint.watching.values import floats, one_number

_SUM = 30.0
"""Nats. The mean loss of a token begins near the logarithm of the vocabulary's size: 12.5 with 256,000 tokens."""
_LATEST = 10
"""Losses at the end of a loop that are compared with its first. One alone may be that of a hard batch."""


class Losses:
    """Judges losses and gradient norms in the order of their steps. What they show is captured.

    The detector compares with a mean of earlier losses. Where a loop diverges at once they are as high as what follows.

    Attributes:
        loop_goes_on: whether another step may follow.
    """

    def __init__(
        self,
        run: WatchedRun,
        schedule: ObservationSchedule,
        batches: LatestBatches,
        sentinel: Sentinel,
        arrivals: Arrivals,
        guard: Guard,
        bounds: DetectorConfig,
    ) -> None:
        self._run, self._schedule, self._batches, self._sentinel = run, schedule, batches, sentinel
        self._arrivals, self._guard, self._bounds = arrivals, guard, bounds
        self._detector, self._overflows = ExplosionDetector(bounds), Overflows()
        self._pending: list[tuple[int, Number, Number | None]] = []
        self._first: float | None = None
        self._latest: deque[float] = deque(maxlen=_LATEST)
        self.loop_goes_on = True

    @property
    def verdict(self) -> Verdict:
        return self._detector.verdict

    @property
    def onset_step(self) -> int | None:
        return self._detector.onset_step

    @property
    def last(self) -> float:
        """The latest loss that has been read, nats; NaN before any."""
        return self._latest[-1] if self._latest else math.nan

    @property
    def none_read(self) -> bool:
        return not self._latest

    @property
    def undecided(self) -> str | None:
        """What is said of a loss that ends too high for a loop that is called stable; None of any other."""
        above, of, margin = self._detector.steps_above, self._bounds.hold_steps, self._bounds.margin
        if self.verdict != "stable":
            return None
        if above:
            return (
                f"the loop ends with the loss more than {margin} nats above its minimum for {above} steps of the {of} "
                f"that make an explosion; {of - above} more would decide"
            )
        if self._first is not None and len(self._latest) == _LATEST and min(self._latest) > self._first + margin:
            return (
                f"the loop ends with {_LATEST} losses that lie more than {margin} nats above its first, "
                f"{self._first:.3g}: a mean of {self._bounds.window} losses shows no explosion that came so early; "
                "look at learning rate, warm-up and data first"
            )
        return None

    def add(self, step: int, loss: Tensor | float) -> None:
        self._pending.append((step, one_number(loss, "the loss"), None))

    def add_norm(self, step: int, grad_norm: Tensor | float) -> None:
        """Add the gradient norm to the loss of its step, if there is one."""
        if self._pending and self._pending[-1][0] == step:
            self._pending[-1] = step, self._pending[-1][1], one_number(grad_norm, "grad_norm")

    def flush(self) -> None:
        """Have the losses since the last time read, judged and logged."""
        pending, self._pending = self._pending, []
        numbers = [loss for _, loss, _ in pending] + [norm for _, _, norm in pending if norm is not None]
        if pending:
            self._arrivals.ask("logging the losses", numbers, partial(self._judge, pending))

    def _judge(self, pending: Sequence[tuple[int, Number, Number | None]], read: Sequence[Number]) -> None:
        """Judge and log losses, after which come the gradient norms that there are."""
        losses, norms = floats(read[: len(pending)]), iter(self._norms(read[len(pending) :]))
        lines: list[tuple[int, Metrics]] = []
        for (step, _, taken), loss in zip(pending, losses, strict=True):
            norm = None if taken is None else next(norms)
            self._judge_step(step, loss, norm)
            lines.append((step, {"loss": loss} if norm is None else {"loss": loss, "grad_norm": norm}))
        self._schedule.read(pending[-1][0])
        if self._first is None:
            self._first = losses[0]
            self._tell_sum(self._first)
        self._latest.extend(losses)
        if self.verdict == "nonfinite":
            self._schedule.collect_no_more()
        else:
            self._batches.forget(pending[-1][0])
        self._run.log_all(lines)  # last: all are judged on a full disk

    def _tell_sum(self, first: float) -> None:
        if _SUM < first < math.inf:
            self._guard.tell(
                f"the first loss is {first:.3g}: if it is a sum, divide it by the number of its tokens; an explosion "
                f"is judged by {self._bounds.margin} nats of their mean"
            )

    def _judge_step(self, step: int, loss: float, norm: float | None) -> None:
        stable = self.verdict == "stable"
        self._detector.update(step, loss, 0.0)  # by the loss: a step that a GradScaler skips has no finite norm
        overflow = norm is not None and self._overflows.update(norm)
        if stable and (overflow or self.verdict == "nonfinite"):
            reason = f"loss {loss}" if norm is None else f"loss {loss}, gradient norm {norm}"
            keep = partial(self._schedule.keep_nonfinite, reason, step, self.loop_goes_on)
            self._guard.do("writing a capture", keep)
        elif stable and self.verdict == "exploded":
            hottest = self._sentinel.hottest(1)
            self._schedule.want_next(self._detector.decision, hottest[0].layer if hottest else None)

    def _norms(self, read: Sequence[Number]) -> Sequence[float | None]:
        """Return gradient norms; None for all of them where one cannot be read, which is no reason to lose losses."""
        found: list[float | None] = [None] * len(read)

        def take() -> None:
            found[:] = floats(read)

        self._guard.do("reading the gradient norms", take)
        return found
