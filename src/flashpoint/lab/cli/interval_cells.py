"""Cells of several values: means, ratios, medians and their intervals."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flashpoint.cli.table import Cell, number, step
from flashpoint.lab.analysis.intervals import mean_interval, ratio_interval
from flashpoint.lab.analysis.lifetimes import Lasting


def steps_between(low: float | None, high: float | None, none: str) -> Cell:
    """Return an interval of steps, with this text for an unknown end."""
    return Cell({"low": low, "high": high}, f"{step(low, none).text} to {step(high, none).text}")


def ratio(values: ArrayLike, form: str) -> Cell:
    """Return ``mean (low to high)`` of ratios, geometric and with a 95 % interval, or one ratio alone."""
    middle, ends = ratio_interval(values)
    low, high = ends or (None, None)
    told = "" if ends is None else f" ({low:{form}} to {high:{form}})"
    return Cell({"mean": middle, "low": low, "high": high}, f"{middle:{form}}{told}")


def plus_minus(values: ArrayLike, form: str) -> Cell:
    """Return ``mean ± half`` of a 95 % interval (Student's t), or one value alone, in this format."""
    mean, half = mean_interval(values)
    told = "" if half is None else f" ± {half:{form.lstrip('+')}}"
    return Cell({"mean": mean, "half": half}, f"{mean:{form}}{told}")


def median_and_range(values: ArrayLike, form: str) -> Cell:
    """Return ``median (least to most)``, one value alone, or nothing for none."""
    values = np.asarray(values, np.float64)
    if not len(values):
        return Cell(None, "")
    middle, least, most = (float(value) for value in (np.median(values), values.min(), values.max()))
    told = f" ({least:{form}} to {most:{form}})" if len(values) > 1 else ""
    return Cell({"median": middle, "least": least, "most": most}, f"{middle:{form}}{told}")


def lasting_cell(found: Lasting) -> Cell:
    """Return ``7 of 7``: of the runs that exploded and have the tail to say it, those with a lasting rise.

    Runs with a shorter tail follow, with how many of them are up at their end, and runs that were not validated. Empty
    where no run exploded."""
    known = f"{found.count} of {found.of}" if found.of else ""
    short = f"short: {found.up} of {found.short} up" if found.short else ""
    unknown = f"{found.unknown} unknown" if found.unknown else ""
    return Cell(vars(found), "; ".join(filter(None, (known, short, unknown))))


def mean(values: ArrayLike, form: str) -> Cell:
    """Return the mean, in this format."""
    return number(mean_interval(values)[0], form)


def interval(values: ArrayLike, form: str) -> Cell:
    """Return the mean's 95 % interval (Student's t), in this format; empty for one value."""
    middle, half = mean_interval(values)
    if half is None:
        return Cell(None, "")
    return Cell({"low": middle - half, "high": middle + half}, f"{middle - half:{form}} to {middle + half:{form}}")


def mean_and_interval(values: ArrayLike, form: str) -> Cell:
    """Return ``mean (low to high)``; empty for fewer than two values."""
    middle, ends = mean(values, form), interval(values, form)
    return Cell({"mean": middle.value, **ends.value}, f"{middle.text} ({ends.text})")
