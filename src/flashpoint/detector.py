"""The explosion detector: one rule, applied to the loss of every step in order."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Annotated

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
        """Take in one step; steps come in order, none left out."""
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
        # More than the hold steps where the run branches off one that held longer.
        if self.steps_above >= self._config.hold_steps and self._stays():
            self.verdict = "exploded"
            self.onset_step = step - self.steps_above + 1
            self.last_step = step + self._config.tail_steps

    def _fell(self) -> None:
        """The mean loss has a new minimum."""

    def _stays(self) -> bool:
        """Whether a mean that has held out of bounds is an explosion."""
        return True


NOISES, SHARE = 3, 0.1
"""The margin of a loss in any unit: standard deviations of a single loss, or a share of the minimum if that is more."""
_NOISE_OF = 100
"""Losses that tell the noise, at least: ten alone can lie near a line by chance."""


class NoiseScaledDetector(ExplosionDetector):
    """Judges losses whose unit nobody knows, as a mean square error.

    Its margin is 3 times the noise of the losses whose mean is the running minimum, their standard deviation about a
    straight line; or a tenth of the minimum, if that is more. It is set anew at each minimum: a loss can fall by powers
    of ten. A mean is moved by one high loss for a whole window. So the middle one of the last ``hold_steps`` losses has
    to be out of bounds, too. A window of less than 100 losses tells its noise together with those before it.

    Attributes:
        noise: of the losses whose mean is the minimum; NaN before there is one.
    """

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__(config)
        self.noise = math.nan
        short = config.window < _NOISE_OF
        self._noisy: deque[float] = deque(maxlen=_NOISE_OF) if short else self._losses

    @property
    def margin(self) -> float:
        """Above its running minimum the moving average is out of bounds; NaN before there is one, and of losses that
        are 0."""
        return max(NOISES * self.noise, SHARE * abs(self.minimum)) or math.nan

    @property
    def _rise(self) -> str:
        return f"{self.margin:.3g}"

    def update(self, step: int, loss: float, grad_norm: float) -> None:
        if self._noisy is not self._losses and math.isfinite(loss) and math.isfinite(grad_norm):
            self._noisy.append(loss)
        super().update(step, loss, grad_norm)

    def _fell(self) -> None:
        losses, window = list(self._noisy), self._config.window
        noises = [noise_about_line(losses[end - window : end]) for end in range(len(losses), window - 1, -window)]
        self.noise = noises[0] if len(noises) == 1 else math.sqrt(math.fsum(n * n for n in noises) / len(noises))

    def _stays(self) -> bool:
        latest = list(self._losses)[-self._config.hold_steps :]
        return statistics.median(latest) > self.minimum + self.margin


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
    above, of, margin = detector.steps_above, bounds.hold_steps, detector.margin
    if detector.verdict != "stable":
        return None
    if 0 < above < of:
        return (
            f"ends with the loss more than {margin:.3g} above its minimum for {above} losses of the {of} that make an "
            f"explosion; {of - above} more would decide"
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
