"""Cells that many tables have: labels, numbers, steps and shares."""

from __future__ import annotations

from flashpoint.cli.table import Cell
from flashpoint.quantiles import clopper_pearson


def code(label: str) -> Cell:
    """Return a name; Markdown shows it as code."""
    return Cell(label, f"`{label}`")


def number(value: float | None, form: str) -> Cell:
    """Return a number in this format; None becomes an empty cell."""
    return Cell(value, "" if value is None else f"{value:{form}}")


def step(value: float | None, none: str) -> Cell:
    """Return a step, or this text if there is none."""
    return Cell(value, none if value is None else f"{value:,.0f}")


def share(count: int, of: int) -> Cell:
    """Return ``5 of 6``."""
    return Cell({"count": count, "of": of}, f"{count} of {of}")


def share_interval(count: int, of: int) -> Cell:
    """Return the 95 % interval of a share (Clopper–Pearson), in percent."""
    low, high = clopper_pearson(count, of)
    return Cell({"low": low, "high": high}, f"{100 * low:.0f} to {100 * high:.0f} %")
