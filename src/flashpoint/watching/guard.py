"""What watching does may not stop the training that is watched."""

from __future__ import annotations

import re
from collections.abc import Callable

from flashpoint.errors import notify

_LONGEST = 300  # characters of somebody else's message
_NUMBER = re.compile(r"(?<!\w)\d[\w.,]*")  # an address, too; not the digit of a name


class Guard:
    """Does what may fail, and tells each thing once.

    Args:
        step: returns the training's step.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self._told: set[str] = set()

    def do(self, what: str, do: Callable[[], None]) -> None:
        """Do something; where it fails, tell so."""
        try:
            do()
        except Exception as error:  # whatever fails in watching, the training goes on
            self.tell(f"{what} failed ({described(error)}); training goes on")

    def tell(self, line: str) -> None:
        """Tell something once, with the step at which it was first so; with other numbers it is the same thing."""
        if (thing := without_numbers(line)) not in self._told:
            self._told.add(thing)
            notify(f"watch: step {self._step():,}: {line}")


def without_numbers(line: str) -> str:
    """Return a line by which the same thing is known again, whatever numbers and shapes it has."""
    return _NUMBER.sub("#", line)


def described(error: Exception) -> str:
    """Return an error's kind and the first line of its message."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return f"{type(error).__name__}: {first[:_LONGEST]}"
