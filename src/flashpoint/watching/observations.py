"""The observations that a capture can still be made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashpoint.diagnosis.call import AttentionCall


class Observations:
    """The last observation of all layers, and an earlier one as long as a step before the last one can turn out to have
    failed: losses are read some steps late.

    The earlier one lies in the memory of the CPU. It is the newest that no such step precedes.

    Attributes:
        last: the calls of the last observed step; empty before there is one.
    """

    def __init__(self) -> None:
        self.last: list[AttentionCall] = []
        self._before: list[AttentionCall] = []
        self._first_unread = 0

    def add(self, calls: Sequence[AttentionCall]) -> None:
        """Hold the calls of a step, which are some."""
        if self.last and self.last[0].step <= self._first_unread:
            self._before = [call.to(torch.device("cpu")) for call in self.last]
        self.last = list(calls)
        self._let_go()

    def read(self, step: int) -> None:
        """The losses up to a step are known, and captures of those that failed are made."""
        self._first_unread = step + 1
        self._let_go()

    def until(self, step: int) -> list[AttentionCall]:
        """Return the calls of the newest held observation that is not later than a step; empty where there is none."""
        held = (calls for calls in (self.last, self._before) if calls and calls[0].step <= step)
        return next(held, [])

    def _let_go(self) -> None:
        if self.last and self.last[0].step <= self._first_unread:
            self._before = []
