"""What a reader of one format finds in a log: numbers by name, in the order in which they were written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

FormatName = str
"""What people are told that the file is."""


@dataclass(frozen=True)
class Record:
    """A log as it was written: steps may come twice, and go back."""

    format: FormatName
    rows: Sequence[tuple[int, Mapping[str, float]]]
    """Step, and the numbers of it that the row has. NaN and infinities are numbers; what is missing is not there."""
    remarks: Sequence[str] = ()
    """What is to be told of the file: where it is cut short, or what its writer hides."""
    begins: Sequence[int] = field(default=())
    """Places in ``rows`` at which another process went on, where the format shows it."""


def number_of(value: object) -> float | None:
    """Return a value as a number, NaN and infinities as Python's ``float`` spells them; None of others."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def step_of(value: object) -> int | None:
    """Return a value as a step; None where it is no whole number of 0 or more."""
    number = number_of(value)
    return int(number) if number is not None and 0 <= number < 2**53 and number == int(number) else None
