"""An early warning from W_Q's spectral norms, and the heads that grow fastest."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flashpoint.runs.metric_table import W_Q_NORM
from flashpoint.schema import Kind, Number, Step

if TYPE_CHECKING:
    from torch import Tensor

    from flashpoint.runs.run import Run

GROWTH, LOOKBACK, ABOVE_MEDIAN = 2.0, 500, 2.0
"""The rule: after the warm-up a head's W_Q spectral norm doubles within 500 steps, and is twice the median of all.

Where half of a few heads grow alike, so does the median, and hardly a warning comes.
"""
LEAST_LEAD = 100
"""Steps. A warning that comes later than so many before the onset foretells nothing: the explosion is under way."""
_SQUARINGS = 12


@dataclass(frozen=True)
class HeadGrowth:
    """One head at one step; layer and head from 1."""

    step: int
    layer: int
    head: int
    norm: float
    """Spectral norm of W_Q."""
    growth: float
    """Over what it was :data:`LOOKBACK` steps before."""

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head} {self.norm:.1f} (×{self.growth:.2f})"


class GrowthState(Kind):
    """A :class:`HeadGrowth` as checkpoints hold it."""

    step: Step
    layer: int
    head: int
    norm: Number
    growth: Number


class SentinelState(Kind):
    """What :meth:`Sentinel.state` returns."""

    history: tuple[tuple[Step, tuple[tuple[Number, ...], ...]], ...]
    warning: GrowthState | None


class Sentinel:
    """Takes the norms of all heads at intervals; warns once, at the first head that breaks the rule.

    Args:
        warmup_steps: norms of earlier steps are passed over: while the learning rate rises, weights leave their
            small initial values, and those of every head multiply.
    """

    def __init__(self, warmup_steps: int = 0) -> None:
        self._warmup_steps = warmup_steps
        self._history: deque[tuple[int, NDArray[np.float64]]] = deque()
        self.warning: HeadGrowth | None = None
        """The first head that broke the rule, and when."""

    def update(self, step: int, norms: ArrayLike) -> HeadGrowth | None:
        """Take the norms [n_layer, n_head] at ``step``, NaN where there is no head; return the warning if this step
        raises it."""
        if step < self._warmup_steps:
            return None
        latest = np.asarray(norms, np.float64)
        self._history.append((step, latest))
        while len(self._history) > 1 and self._history[1][0] <= step - LOOKBACK:
            self._history.popleft()
        if self.warning or not (grown := self.grown()):
            return None
        self.warning = grown[0]
        return self.warning

    def grown(self) -> list[HeadGrowth]:
        """Return the heads that break the rule at the last step, largest growth first."""
        heads = self.hottest()
        least = ABOVE_MEDIAN * np.median([head.norm for head in heads]) if heads else 0
        return [head for head in heads if head.growth >= GROWTH and head.norm >= least]

    def hottest(self, count: int | None = None) -> list[HeadGrowth]:
        """Return the heads that grew most over :data:`LOOKBACK` steps, largest growth first; none before that step.

        Args:
            count: of them at most; None is all.
        """
        if not self._history or self._history[0][0] > self._history[-1][0] - LOOKBACK:
            return []
        (_, before), (step, latest) = self._history[0], self._history[-1]
        growth = latest / np.maximum(before, 1e-30)
        known = np.count_nonzero(~np.isnan(growth))
        order = np.argsort(growth, axis=None)[:known][::-1][:count]  # NaN sorts last
        places = zip(*np.unravel_index(order, growth.shape), strict=True)
        return [HeadGrowth(step, int(i) + 1, int(j) + 1, float(latest[i, j]), float(growth[i, j])) for i, j in places]

    def state(self) -> SentinelState:
        """Return what a resumed run needs to go on."""
        history = tuple((step, tuple(map(tuple, norms.tolist()))) for step, norms in self._history)
        return SentinelState(history=history, warning=GrowthState(**vars(self.warning)) if self.warning else None)

    def load_state(self, state: SentinelState) -> None:
        """Inverse of :meth:`state`."""
        self._history = deque((step, np.array(norms)) for step, norms in state.history)
        self.warning = HeadGrowth(**dict(state.warning)) if state.warning else None


@dataclass(frozen=True)
class Alarms:
    """Of runs that ended without an explosion."""

    warned: int
    held: int


@dataclass(frozen=True)
class Foretold:
    """Warnings of several runs."""

    leads: tuple[int, ...]
    """Steps from the warning to the onset, of the explosions that were warned of at least :data:`LEAST_LEAD` before."""
    late: int
    """Explosions that were warned of before, but later than that."""
    exploded: int
    at_risk: Alarms
    """Of the runs that held, those of attentions that exploded in other runs."""
    others: Alarms
    """Those of attentions that exploded in none."""


def warning_of(run: Run) -> HeadGrowth | None:
    """Return the warning that the run's W_Q norms give, or None.

    Raises:
        UserError: the run has not measured them.
    """
    return sentinel_of(run).warning


def sentinel_of(run: Run, before: int | None = None) -> Sentinel:
    """Return what watches W_Q, after the run's norms of the steps before one, or of all.

    Raises:
        UserError: the run has not measured them.
    """
    steps, norms = run.measured_by_head(W_Q_NORM.name)
    sentinel = Sentinel(run.config.train.warmup_steps)
    for step, norms_then in zip(steps, np.moveaxis(norms, -1, 0), strict=True):
        if before is None or step < before:
            sentinel.update(int(step), norms_then)
    return sentinel


def foretold(warnings: Sequence[tuple[Run, HeadGrowth | None]]) -> Foretold:
    """Count the warnings of these runs, of those under way none: what they were warned of may come."""
    ended = [(run.title, run.failed_at, warning) for run, warning in warnings if run.ended]
    exploded = [(onset, warning) for _, onset, warning in ended if onset is not None]
    explosive = {title for title, onset, _ in ended if onset is not None}
    before = [onset - warning.step for onset, warning in exploded if warning and warning.step < onset]
    leads = tuple(lead for lead in before if lead >= LEAST_LEAD)
    at_risk, others = (
        [warning for title, onset, warning in ended if onset is None and (title in explosive) == risk]
        for risk in (True, False)
    )
    return Foretold(leads, len(before) - len(leads), len(exploded), _alarms(at_risk), _alarms(others))


def _alarms(held: Sequence[HeadGrowth | None]) -> Alarms:
    return Alarms(sum(warning is not None for warning in held), len(held))


def largest_eigenvalue(matrices: Tensor, others: Tensor) -> Tensor:
    """Return the largest eigenvalue of products A·B of symmetric positive semidefinite matrices [..., d, d]: [...].

    The power method by repeated squaring: after 12 squarings a column is the 4,096-th power times a unit vector. Its
    Rayleigh quotient, under the inner product uᵀBv in which A·B is symmetric, is off by some ln(d) / 4,096 at most,
    however close the eigenvalues are.
    """
    product = matrices @ others
    power = product
    for _ in range(_SQUARINGS):
        power = power / power.abs().amax((-2, -1), keepdim=True).clamp_min(1e-300)
        power = power @ power
    column = power.square().sum(-2).argmax(-1)  # of the largest
    vector = power.gather(-1, column[..., None, None].expand(*power.shape[:-1], 1))
    vector = vector / vector.abs().amax((-2, -1), keepdim=True).clamp_min(1e-300)
    weighted = others @ vector
    return (weighted * (product @ vector)).sum((-2, -1)) / (weighted * vector).sum((-2, -1)).clamp_min(1e-300)
