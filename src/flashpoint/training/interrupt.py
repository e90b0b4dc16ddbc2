"""Ending a run cleanly on a signal."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

from flashpoint.errors import notify


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a clean end; a second one ends the process at once."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._request)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, _frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        signal.signal(number, self._previous[number])
        notify(f"{self.signal_name}: ending after this step; once more to quit at once")


@contextlib.contextmanager
def surely_interrupted() -> Iterator[None]:
    """Ctrl-C raises ``KeyboardInterrupt`` in the block, or at its end where a destructor or a callback dropped it."""
    received = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received = True
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if received:
        raise KeyboardInterrupt
