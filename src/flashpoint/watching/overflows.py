"""Which gradient norms that are not finite are worth a capture."""

from __future__ import annotations

import math

_MOST = 3  # captures of a run


class Overflows:
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
        if self._in_a_row != self._needed or self._captures == _MOST:
            return False
        self._captures += 1
        return True
