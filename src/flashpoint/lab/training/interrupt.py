"""Ending cleanly on a signal."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

from flashpoint.errors import notify

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to end."""


class StopRequests:
    """Notes :data:`STOPS`, which would end the process. One that is ignored, as after nohup, stays so.

    Args:
        answer: told at the first one, after which the next ends the process at once. Without it all are noted.
    """

    def __init__(self, answer: str | None = None) -> None:
        self.received: list[signal.Signals] = []
        self._answer = answer
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        if self._answer is not None:
            self.__exit__()
            notify(f"{self.received[0].name}: {self._answer}")


@contextlib.contextmanager
def surely_interrupted() -> Iterator[None]:
    """Ctrl-C raises ``KeyboardInterrupt`` in the block, or at its end where a destructor or a callback dropped it.

    Where it is ignored, as of a script's process in the background, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
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
