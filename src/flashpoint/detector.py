"""The explosion detector: one rule, applied to the loss of every step in order."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass

from flashpoint.runs.outcome import Verdict
from flashpoint.schema import CHECKED, EXPERIMENT, Count, CountOrNone, Kind, Number, Step


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class DetectorConfig:
    """When a run counts as exploded."""

    window: Annotated[int, Field(gt=0, le=10**6), EXPERIMENT] = 100
    """Steps of the moving average of the loss."""
    margin: Annotated[float, Field(gt=0), EXPERIMENT] = 0.3
    """Nats above its running minimum at which the moving average is out of bounds."""
    hold_steps: Annotated[Count, EXPERIMENT] = 50
    """Consecutive steps out of bounds that make an explosion; its onset is the first of them."""
    tail_steps: CountOrNone = 500
    """Steps run on after the verdict, so that the explosion is seen."""


class DetectorState(Kind):
    """What :meth:`ExplosionDetector.state` returns."""

    losses: tuple[float, ...]
    minimum: Number
    above: Step
    verdict: Verdict
    onset_step: Step | None
    last_step: Step | None


class ExplosionDetector:
    """Decides when a run has exploded.

    Exploded: the mean loss of the last ``window`` steps stays ``margin`` nats above its running minimum for
    ``hold_steps`` steps; the onset is the first of them. Nonfinite: a loss or gradient norm is no finite number.

    Args:
        unit: of the loss, with a space before it; empty where nobody knows it.

    Attributes:
        minimum: running minimum of the mean loss; infinite before a window is full.
        steps_above: steps in a row, up to the last one, for which the mean loss has been out of bounds; 0 while it is
            not.
        verdict: ``stable`` until decided; the first decision stands.
        onset_step: None while stable.
        last_step: the step after which the run is to stop, None while stable. It is ``tail_steps`` after the decision
            for an explosion, and the step itself for a non-finite value, which no step recovers from.
    """

    def __init__(self, config: DetectorConfig, unit: str = " nats") -> None:
        self._config, self._unit = config, unit
        self._losses: deque[float] = deque(maxlen=config.window)
        self.minimum = math.inf
        self.steps_above = 0
        self._above_since: int | None = None
        self.verdict: Verdict = "stable"
        self.onset_step: int | None = None
        self.last_step: int | None = None

    @property
    def margin(self) -> float:
        """Above its running minimum the moving average is out of bounds."""
        return self._config.margin

    @property
    def decision(self) -> str:
        """What was decided, in words; empty while stable."""
        if self.onset_step is None:
            return ""
        if self.verdict == "nonfinite":
            return f"the loss or the gradient norm of step {self.onset_step:,} is no finite number"
        return (
            f"the loss has exploded, since step {self.onset_step:,}: the mean of {self._config.window} steps has stood "
            f"more than {self._rise} above its minimum for {self._config.hold_steps} steps"
        )

    @property
    def _rise(self) -> str:
        return f"{self._config.margin}{self._unit}"

    def state(self) -> DetectorState:
        """Return what :meth:`load_state` takes back."""
        return DetectorState(
            losses=tuple(self._losses),
            minimum=self.minimum,
            above=self.steps_above,
            verdict=self.verdict,
            onset_step=self.onset_step,
            last_step=self.last_step,
        )

    def load_state(self, state: DetectorState) -> None:
        """Go on from :meth:`state`, also of a detector with other settings.

        Steps out of bounds that are ``hold_steps`` or more by now are an explosion if the next one is, too.
        """
        self._losses.extend(state.losses)
        self.minimum, self.steps_above = state.minimum, state.above
        self.verdict, self.onset_step, self.last_step = state.verdict, state.onset_step, state.last_step

    def update(self, step: int, loss: float, grad_norm: float) -> None:
        """Take in one step; steps come in order."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            if self.verdict == "stable":
                self.verdict, self.onset_step = "nonfinite", step
            self.last_step = step if self.last_step is None else min(self.last_step, step)
            return
        self._losses.append(loss)
        if self.verdict != "stable" or len(self._losses) < self._config.window:
            return
        mean = math.fsum(self._losses) / self._config.window
        if mean < self.minimum:
            self.minimum = mean
            self._fell()
        self.steps_above = self.steps_above + 1 if mean > self.minimum + self.margin else 0
        if self.steps_above == 1:
            self._above_since = step
        # More than the hold steps where the run branches off one that held longer.
        if self.steps_above >= self._config.hold_steps and self._stays():
            self.verdict = "exploded"
            # None where the first of them was before the state from which this detector went on.
            self.onset_step = step - self.steps_above + 1 if self._above_since is None else self._above_since
            self.last_step = step + self._config.tail_steps

    def _fell(self) -> None:
        """The mean loss has a new minimum."""

    def _stays(self) -> bool:
        """Whether a mean that has held out of bounds is an explosion."""
        return True


NOISES, SHARE = 3, 0.1
"""What few losses are compared by: standard deviations of a single one, or a share of the loss if that is more."""
REACH = 6 / 0.617
"""The margin over the wander of means: from three standard deviations below a level to three above it. The largest
Allan deviation of first-order noise (Gauss-Markov, of any correlation time) is 0.617 of its standard deviation."""
_NOISE_OF = 100
"""Losses that tell the noise of a single one, at least: ten alone can lie near a line, or far from it, by chance."""
_BLOCKS = 8
"""Blocks of a window, and the fewest by which a length is judged."""
_WINDOWS = 64
"""Windows whose blocks are kept: the wander may change as a loss falls."""
_SURE = -1.645
"""The normal quantile of 5 %: the wander is the upper end of its one-sided 95 % interval."""


class NoiseScaledDetector(ExplosionDetector):
    """Judges losses whose unit nobody knows, as a mean square error.

    Its margin is :data:`REACH` times the :class:`Wander` of earlier losses, or a tenth of the minimum if that is more.
    The wander is at least what independent losses have that are as noisy as those whose mean is the minimum. A window
    of less than 100 losses tells its noise together with those before it. A mean is moved by one high loss for a whole
    window. So the middle one of the last ``hold_steps`` losses has to be out of bounds, too.

    Attributes:
        wander: standard deviation of means that the margin is made of; NaN before a window is full.
    """

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__(config)
        self._earlier = Wander(config.window)
        self._independent = math.nan
        self._noisy: deque[float] = deque(maxlen=config.window * max(1, _NOISE_OF // config.window))

    @property
    def wander(self) -> float:
        """Standard deviation of the moving average of a loss that holds, in the loss's unit; NaN before it is known."""
        return max(self._independent, self._earlier.deviation)

    @property
    def margin(self) -> float:
        """Above its running minimum the moving average is out of bounds; NaN before there is one, and of losses that
        are 0."""
        return max(REACH * self.wander, SHARE * abs(self.minimum)) or math.nan

    @property
    def _rise(self) -> str:
        return f"{self.margin:.3g}"

    def update(self, step: int, loss: float, grad_norm: float) -> None:
        if math.isfinite(loss):
            self._earlier.add(loss, judge=not self.steps_above)
            self._noisy.append(loss)
        super().update(step, loss, grad_norm)

    def _fell(self) -> None:
        losses, window = list(self._noisy), self._config.window
        noises = [noise_about_line(losses[end - window : end]) for end in range(len(losses), window - 1, -window)]
        noise = math.hypot(*noises) / math.sqrt(len(noises))
        self._independent = noise / math.sqrt(window) * _excess(max(2, len(noises) * (window - 2)))

    def _stays(self) -> bool:
        latest = list(self._losses)[-self._config.hold_steps :]
        return statistics.median(latest) > self.minimum + self.margin


class Wander:
    """How far means of losses wander, by means of earlier blocks of several lengths (batch means).

    Of each length, doubled from a window on, it is the Allan deviation: the root of half the mean squared difference of
    neighbours. The largest counts. A learning loss falls, so the rises alone are squared, and taken for half of what
    there is. A length is judged by eight blocks or more. Until windows are so many it is by the longest parts of a
    window that are.

    The blocks end where the window that is judged begins. So a rise is not its own measure at first.

    Args:
        window: losses of a mean that is judged.

    Attributes:
        deviation: the upper end of its one-sided 95 % interval; 0 before a window is full.
    """

    def __init__(self, window: int) -> None:
        self._size = max(1, window // _BLOCKS)
        self._latest = -(-window // self._size)  # blocks of the window that is judged
        self._means: deque[float] = deque(maxlen=_BLOCKS * _WINDOWS)
        self._open: list[float] = []
        self.deviation = 0.0

    def add(self, loss: float, judge: bool) -> None:
        """Take in the next loss.

        Args:
            judge: whether the deviation may change.
        """
        self._open.append(loss)
        if len(self._open) == self._size:
            self._means.append(math.fsum(self._open) / self._size)
            self._open.clear()
            if judge and len(self._means) >= _BLOCKS:
                self.deviation = self._of(list(self._means)[: max(_BLOCKS, len(self._means) - self._latest)])

    def _of(self, means: list[float]) -> float:
        scale = max(map(abs, means))
        if not 0 < scale < math.inf:
            return 0.0
        sums = np.concatenate([[0.0], np.cumsum(np.array(means) / scale)])
        longest = int(math.log2(len(means) / _BLOCKS))
        lengths = (2**doubled for doubled in range(min(longest, int(math.log2(_BLOCKS))), longest + 1))
        return scale * max(_rises(sums, length) for length in lengths)


def _rises(sums: NDArray[np.float64], length: int) -> float:
    """Return the upper end of the Allan deviation of a block length, by its rises, from sums that begin with 0."""
    means = (sums[length:] - sums[:-length]) / length
    steps = means[length:] - means[:-length]
    blocks = (len(sums) - 1) // length
    return float(np.sqrt(np.square(np.maximum(steps, 0)).mean())) * _excess(blocks - 1)


def _excess(degrees: int) -> float:
    """Return the upper end of a standard deviation's one-sided 95 % interval over its estimate, from two
    degrees of freedom on (Wilson & Hilferty 1931)."""
    spread = 2 / (9 * degrees)
    return float((1 - spread + _SURE * math.sqrt(spread)) ** -1.5)


LASTING = 10
"""Losses in a row that are no finite number, by which a loop is judged that goes on."""


class LoopDetector:
    """Judges the losses of somebody's loop, of which single ones can be no losses.

    A batch without labels has the mean of nothing, which is NaN. A loop may skip such a step and go on well. So a loss
    that is no finite number is left out if a finite one follows. It makes the verdict ``nonfinite`` if :data:`LASTING`
    of them come in a row, if parameters of the model are no finite numbers either, or if the loop ends with it. A loss
    of exactly 0, as of a mean that counts no label as one, is left out too.

    Args:
        detector: judges the other losses.

    Attributes:
        left_out: steps whose loss was no finite number, with a finite one after them.
        since: the first of the latest steps in a row whose loss is no finite number; None if the last one's is.
        lasts: why it is not waited for a finite loss; empty while it is.
        zeros: losses in a row, up to the last one, that are 0.
    """

    def __init__(self, detector: ExplosionDetector) -> None:
        self.detector = detector
        self.left_out: list[int] = []
        self.lasts = ""
        self.zeros = 0
        self._bad: list[int] = []

    @property
    def since(self) -> int | None:
        return self._bad[0] if self._bad else None

    @property
    def verdict(self) -> Verdict:
        """By the losses so far."""
        return "nonfinite" if self.lasts else self.detector.verdict

    @property
    def onset_step(self) -> int | None:
        """Of an explosion, or of the first loss that is no finite number, of those that lasted."""
        return self.since if self.lasts else self.detector.onset_step

    def update(self, step: int, loss: float) -> None:
        """Take in one loss; steps come in order. After a decision nothing changes."""
        if self.verdict != "stable":
            return
        if not math.isfinite(loss):
            self._bad.append(step)
            if len(self._bad) == LASTING:
                self.lasts = f"nor are the {LASTING - 1} after it"
            return
        self.left_out += self._bad
        self._bad.clear()
        self.zeros = self.zeros + 1 if loss == 0 else 0
        if not self.zeros:
            self.detector.update(step, loss, 0.0)

    def look(self, sound: Callable[[], bool]) -> None:
        """Judge a loss that is no finite number by the model as it is after it.

        Args:
            sound: says whether the parameters are finite. It is asked only if the last loss is not.
        """
        if self._bad and self.verdict == "stable" and not sound():
            self.lasts = "nor are parameters of the model"

    def end(self) -> None:
        """No loss follows."""
        if self._bad and self.verdict == "stable":
            self.lasts = "and no loss followed that is"


def noise_about_line(losses: Sequence[float]) -> float:
    """Return the standard deviation of numbers about their least-squares line; 0 of less than three."""
    if len(losses) < 3:
        return 0.0
    mean, middle = math.fsum(losses) / len(losses), (len(losses) - 1) / 2
    scale = max(abs(loss - mean) for loss in losses)
    if not 0 < scale < math.inf:
        return 0.0
    deviations = [(loss - mean) / scale for loss in losses]  # their squares are numbers
    along = math.fsum((at - middle) * one for at, one in enumerate(deviations))
    explained = along * along / math.fsum((at - middle) ** 2 for at in range(len(losses)))
    squares = max(0.0, math.fsum(one * one for one in deviations) - explained)
    return scale * math.sqrt(squares / len(losses))


LATEST = 10
"""Losses at an end that are compared with the first. One alone may be that of a hard batch."""


def early_margin(losses: Sequence[float], before: float) -> float:
    """Return by how much losses have to lie above one before them, where no window of losses was full."""
    return max(NOISES * noise_about_line(losses), SHARE * abs(before))


def undecided(detector: ExplosionDetector, bounds: DetectorConfig, first: float, latest: Sequence[float]) -> str | None:
    """Return what is said of losses that end too high for what is called stable; None of any other.

    Args:
        bounds: the detector's.
        first: loss of all.
        latest: the last :data:`LATEST` losses, or all if they are fewer.
    """
    above, needed, margin = detector.steps_above, bounds.hold_steps, detector.margin
    if detector.verdict != "stable":
        return None
    if 0 < above < needed:
        return (
            f"ends with the loss more than {margin:.3g} above its minimum for {above} losses of the {needed} that make "
            f"an explosion; {needed - above} more would decide"
        )
    if len(latest) == LATEST:
        if math.isnan(margin):  # no window of losses was full
            margin = early_margin(latest, first)
        if not min(latest) > first + margin:
            return None
        return (
            f"ends with {LATEST} losses that lie more than {margin:.3g} above its first, {first:.3g}: a mean of "
            f"{bounds.window} losses shows no explosion that came so early; look at learning rate, warm-up and data "
            "first"
        )
    return None
