"""What a watch tells: records of the logger ``flashpoint.watch``.

A host program filters, redirects or silences them as it does those of any library. Where it has given neither the
logger nor one above it a handler, lines are printed on stderr as they are.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress

from flashpoint import errors

LOGGER = logging.getLogger("flashpoint.watch")
_LONGEST = 300  # characters of somebody else's message
_NUMBER = re.compile(r"(?<!\w)\d[\w.,]*")  # an address, too; not the digit of a name


class StderrHandler(logging.Handler):
    """Prints lines on stderr while the host program has set up no handler that takes them.

    A line that cannot be printed is dropped (:func:`flashpoint.errors.tell`).
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record's message."""
        if self._is_alone(logging.getLogger(record.name)):
            errors.tell(record.getMessage())

    def _is_alone(self, logger: logging.Logger | None) -> bool:
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return True


def _set_up() -> None:
    """Give the package's logger its handler, and the level at which nothing is lost if nobody has chosen one."""
    package = logging.getLogger("flashpoint")
    package.addHandler(StderrHandler())
    if package.level == logging.NOTSET:
        package.setLevel(logging.INFO)


_set_up()


def tell(line: str, level: int = logging.INFO) -> None:
    """Log one line, in the first of several processes only. A handler of the host program that fails loses it: the
    training goes on."""
    if errors.is_first_process():
        with suppress(Exception):
            LOGGER.log(level, "%s", errors.escaped(line))


class Notices:
    """The lines of one watch, each with the name of its run.

    Args:
        run: its name.
        step: of the loop, which :meth:`warn` tells.
    """

    def __init__(self, run: str, step: int) -> None:
        self._run = run
        self.step = step
        self._told: set[str] = set()

    def tell(self, line: str, level: int = logging.INFO) -> None:
        """Tell something that has happened."""
        tell(f"watch {self._run}: {line}", level)

    def warn(self, line: str) -> None:
        """Tell something once, with the step at which it was first so; with other numbers it is the same thing."""
        self._once(without_numbers(line), line)

    def failed(self, what: str, error: Exception) -> None:
        """Tell once that a part of watching failed with an error of this kind: its message can be another each time."""
        self._once(f"{what}: {type(error).__name__}", f"{what} failed ({described(error)}); training goes on")

    def _once(self, thing: str, line: str) -> None:
        if thing not in self._told:
            self._told.add(thing)
            self.tell(f"step {self.step:,}: {line}", logging.WARNING)


def without_numbers(line: str) -> str:
    """Return a line by which the same thing is known again, whatever numbers and shapes it has."""
    return _NUMBER.sub("#", line)


def described(error: Exception) -> str:
    """Return an error's kind and the first line of its message."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return f"{type(error).__name__}: {first[:_LONGEST]}"
