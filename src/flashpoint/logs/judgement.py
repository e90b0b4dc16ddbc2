"""What a log shows of an explosion: the verdict that a watch would give, and what came before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flashpoint.detector import LATEST, DetectorConfig, LoopDetector, NoiseScaledDetector, early_margin, undecided
from flashpoint.early_warning import GROWTH, LOOKBACK
from flashpoint.logs.log import Log, Resume
from flashpoint.runs.metric_table import GRAD_NORM, LOSS
from flashpoint.runs.outcome import Verdict

_FEWEST = LATEST
"""Losses of which a mean is taken, at least: fewer do not tell their noise."""


@dataclass(frozen=True)
class Jump:
    """Losses around the place where a training went on."""

    resume: Resume
    before: float
    """Mean of the last :data:`.LATEST` losses before."""
    after: float
    """Mean of the first :data:`.LATEST` losses from there on."""
    jumped: bool
    """Whether all those after lie above the mean before by more than the margin, which is set by the noise before."""


@dataclass(frozen=True)
class Judgement:
    """The rule of :func:`flashpoint.watch` for losses of any unit, applied to a log of another tool.

    A watch takes the mean of 100 losses, one a step. A log has one in so many steps, and here the mean is of the losses
    of 100 steps, but of ten losses at least. The time for which it has to stand above its minimum is half of that.
    """

    log: Log

    @property
    def losses(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps [n] and losses [n]."""
        return self.log.columns[LOSS.name]

    @cached_property
    def spacing(self) -> int:
        """Steps from one loss to the next, by the median."""
        steps = self.losses[0]
        return max(1, int(np.median(np.diff(steps)))) if len(steps) > 1 else 1

    @cached_property
    def bounds(self) -> DetectorConfig:
        """The rule in losses of this log, not in steps."""
        usual = DetectorConfig()
        window = max(_FEWEST, round(usual.window / self.spacing))
        return DetectorConfig(window=window, hold_steps=round(window * usual.hold_steps / usual.window))

    @cached_property
    def _loop(self) -> LoopDetector:
        """Begins anew where the loss jumped after a resume, as the watch of the later process does."""
        anew = {jump.resume.step for jump in self.jumps if jump.jumped}
        loop = LoopDetector(NoiseScaledDetector(self.bounds))
        for place, (step, loss) in enumerate(zip(*self.losses, strict=True)):
            if step in anew and loop.verdict == "stable":
                loop = LoopDetector(NoiseScaledDetector(self.bounds))
            loop.update(place, float(loss))  # as a watch, by the loss alone
        loop.end()
        return loop

    @property
    def verdict(self) -> Verdict:
        return self._loop.verdict

    @property
    def onset(self) -> int | None:
        """The first step of an explosion, or of losses that are no finite numbers and last."""
        return None if self._onset_place is None else int(self.losses[0][self._onset_place])

    @property
    def _onset_place(self) -> int | None:
        return self._loop.onset_step

    @property
    def undecided(self) -> str | None:
        """What is said of losses that end too high for a log that is called stable; None of any other."""
        jumped = [jump.resume.step for jump in self.jumps if jump.jumped]
        steps, losses = self.losses
        finite = losses[np.isfinite(losses) & (steps >= max(jumped, default=0))]
        if not len(finite):
            return None
        return undecided(self._loop.detector, self.bounds, float(finite[0]), finite[-LATEST:].tolist())

    @property
    def is_short(self) -> bool:
        """Whether there are too few losses for an explosion to be seen."""
        return len(self.losses[0]) < self.bounds.window + self.bounds.hold_steps

    @cached_property
    def norm_rose(self) -> int | None:
        """The step from which on, up to the onset, the gradient norm was twice what it had been within 500 steps. None
        without an onset or norms, and where it had not risen before the onset. The rule is the early warning's.

        What doubles is the median of the last ten norms. One that is no finite number counts as infinite.
        """
        if self.onset is None or GRAD_NORM.name not in self.log.columns:
            return None
        steps, norms = self.log.columns[GRAD_NORM.name]
        known = steps < self.onset
        if known.sum() <= LATEST:
            return None
        norms = np.where(np.isfinite(norms), norms, np.inf)[known]
        medians = np.median(np.lib.stride_tricks.sliding_window_view(norms, LATEST), axis=1)
        back = max(LATEST, round(LOOKBACK / self.spacing))
        since = None
        for place, (step, median) in enumerate(zip(steps[known][LATEST - 1 :].tolist(), medians, strict=True)):
            doubled = median >= GROWTH * medians[max(0, place - back) : place + 1].min()
            since = (step if since is None else since) if doubled else None
        return since

    def not_finite(self, metric: str) -> NDArray[np.int64]:
        """Return the steps [n] at which a metric is NaN or infinite; none of one that is not there."""
        if metric not in self.log.columns:
            return np.empty(0, np.int64)
        steps, values = self.log.columns[metric]
        return steps[~np.isfinite(values)]

    @cached_property
    def jumps(self) -> Sequence[Jump]:
        """The losses around each resume; without those that have fewer than :data:`.LATEST` finite losses on a side."""
        steps, losses = self.losses
        finite = np.isfinite(losses)
        steps, losses = steps[finite], losses[finite]
        found = []
        for resume in self.log.resumes:
            at = int(np.searchsorted(steps, resume.step))
            before, after = losses[max(0, at - LATEST) : at], losses[at : at + LATEST]
            if len(before) == len(after) == LATEST:
                mean = float(before.mean())
                jumped = bool(after.min() > mean + early_margin(before.tolist(), mean))
                found.append(Jump(resume, mean, float(after.mean()), jumped))
        return found
