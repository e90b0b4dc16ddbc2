"""What a reader of one format finds in a log: numbers by name, in the order in which they were written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

FormatName = str
"""What people are told that the file is."""
_OWN_STEPS = ("train/global_step", "trainer/global_step", "global_step")
"""Names of a step among the metrics."""


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


def record_of(name: FormatName, metrics: Sequence[tuple[str, object, float]], remarks: Sequence[str] = ()) -> Record:
    """Return names, steps and values, each of a row of its own, as a record.

    Some tools write step 0, or none, where they are told none: where all rows are so, the values of each name are
    counted.
    """
    rows = [(at, {key: value}) for key, step, value in metrics if (at := step_of(step or 0)) is not None]
    times = Counter[str]()
    if not any(step for step, _ in rows) and len(rows) > len({key for key, _, _ in metrics}):
        remarks = [*remarks, "no value has a step, so those of each name are counted"]
        rows.clear()
        for key, _, value in metrics:
            rows.append((times[key], {key: value}))
            times[key] += 1
    return Record(name, rows, remarks)


def own_step(items: Sequence[Mapping[str, object]]) -> str | None:
    """Return the name under which the training logged its own step in half of the items, or more; None without one.

    The steps of W&B and trackio count calls of ``log``, which the Trainer and Lightning do not make in every step: they
    log their step beside it.
    """
    return next((name for name in _OWN_STEPS if 0 < len(items) <= 2 * sum(name in item for item in items)), None)


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
