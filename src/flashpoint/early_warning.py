"""An early warning from W_Q's spectral norms, and the heads that grow fastest."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flashpoint.schema import Kind, Number, Step

GROWTH, LOOKBACK, ABOVE_MEDIAN = 2.0, 500, 2.0
"""The rule: after the warm-up a head's W_Q spectral norm doubles within 500 steps, and is twice the median of all."""


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


class SentinelState(Kind):
    """What :meth:`Sentinel.state` returns."""

    history: list[tuple[Step, list[list[Number]]]]
    warning: dict[str, float] | None


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
        """Take the norms [n_layer, n_head] at ``step``; return the warning if this step raises it."""
        if step < self._warmup_steps:
            return None
        latest = np.asarray(norms, np.float64)
        self._history.append((step, latest))
        while len(self._history) > 1 and self._history[1][0] <= step - LOOKBACK:
            self._history.popleft()
        least = ABOVE_MEDIAN * np.median(latest)
        broken = [head for head in self.hottest(latest.size) if head.norm >= least]
        if self.warning or not broken or broken[0].growth < GROWTH:
            return None
        self.warning = broken[0]
        return self.warning

    def hottest(self, count: int) -> list[HeadGrowth]:
        """Return the heads that grew most over :data:`LOOKBACK` steps, largest growth first; none before that step."""
        if not self._history or self._history[0][0] > self._history[-1][0] - LOOKBACK:
            return []
        (_, before), (step, latest) = self._history[0], self._history[-1]
        growth = latest / np.maximum(before, 1e-30)
        order = np.argsort(growth, axis=None)[::-1][:count]
        places = zip(*np.unravel_index(order, growth.shape), strict=True)
        return [HeadGrowth(step, int(i) + 1, int(j) + 1, float(latest[i, j]), float(growth[i, j])) for i, j in places]

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on, as plain values."""
        return {
            "history": [(step, norms.tolist()) for step, norms in self._history],
            "warning": self.warning and vars(self.warning),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state`."""
        self._history = deque((step, np.array(norms)) for step, norms in state["history"])
        self.warning = HeadGrowth(**state["warning"]) if state["warning"] else None
