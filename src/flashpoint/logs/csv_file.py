"""CSV files with a step, or a loss whose rows are counted: those of Lightning's ``CSVLogger``, what W&B exports, what
spreadsheets save, and any other.

Spreadsheets part cells by semicolons where the comma is a decimal mark, and may name the delimiter in a line before the
header, as ``sep=;``.
"""

from __future__ import annotations

import contextlib
import csv
from pathlib import Path

from flashpoint.errors import UserError
from flashpoint.logs.column_names import is_loss, plain_name
from flashpoint.logs.numerals import has_decimal_comma, number_with
from flashpoint.logs.record import Record, step_of

_STEPS = ("step", "global step", "trainer global step", "train global step", "iteration", "iter", "update", "epoch")
"""Plain names of the step, in the order in which they are preferred. W&B's ``_step`` is a step, too."""
_DELIMITERS = ",;\t"
_RANGE = ("__MIN", "__MAX")
"""Ends of the names of columns that W&B's web page exports beside each metric: of the points drawn as one."""


def is_csv(head: bytes) -> bool:
    """Whether a file that begins so is one: its first line names several columns, one of them a step or a loss."""
    lines = _without_hint(head.decode(errors="replace").lstrip("\ufeff").splitlines())
    return bool(lines) and _delimiter(lines[0]) is not None


def read_csv(path: Path) -> Record:
    """Return the rows that have a step, or all of them, counted, where no column is one, as pandas writes a loss alone.
    Cells that hold no number are missing.

    A last line without its end is left out: it may be half a number.

    Raises:
        UserError: the file is not text, or a row is damaged.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: no text ({error}); give a CSV file in UTF-8") from error
    lines = _without_hint(text[: text.rfind("\n") + 1].splitlines()) or [text]
    remarks = ["its last line has no end, and is left out"] if text and not text.endswith("\n") else []
    delimiter = _delimiter(lines[0])
    assert delimiter is not None, lines[0]
    try:
        header, *cells = csv.reader(lines, delimiter=delimiter)
    except (csv.Error, ValueError) as error:
        raise UserError(f"{path}: no CSV ({error}); restore the file") from error
    at = _step_column(header)
    if at is None:
        remarks.append("no column is a step, so its rows are counted")
    comma = any("," in cell for row in cells for cell in row)
    comma = comma and has_decimal_comma((cell for row in cells for cell in row), unless_told=delimiter == ";")
    if comma:
        remarks.append("its numbers have decimal commas")
    named = [(place, name) for place, name in enumerate(header) if place != at and not name.endswith(_RANGE)]
    rows = []
    for number, row in enumerate(cells):
        step = number if at is None else _step(row, at, comma)
        if step is not None:
            cells_of = ((name, row[place]) for place, name in named if place < len(row))
            numbers = ((name, number_with(cell, decimal_comma=comma)) for name, cell in cells_of)
            rows.append((step, {name: number for name, number in numbers if number is not None}))
    if at is not None and plain_name(header[at]) == "epoch":
        remarks.append("its steps are epochs")
    return Record("CSV", rows, remarks)


def _step(row: list[str], at: int, comma: bool) -> int | None:
    return step_of(number_with(row[at], decimal_comma=comma)) if len(row) > at else None


def _without_hint(lines: list[str]) -> list[str]:
    """Return the lines from the header on."""
    return lines[1:] if lines and lines[0].lower().startswith("sep=") else lines


def _delimiter(header: str) -> str | None:
    """Return what parts a header into most columns, one of them a step or a loss; None where nothing does."""
    found: dict[str, int] = {}
    for delimiter in _DELIMITERS:
        with contextlib.suppress(csv.Error):
            names = next(csv.reader([header], delimiter=delimiter), [])
            if _step_column(names) is not None or (len(names) > 1 and any(map(is_loss, names))):
                found[delimiter] = len(names)
    return max(found, key=found.__getitem__) if found else None


def _step_column(header: list[str]) -> int | None:
    names = [plain_name(name) for name in header]
    return next((names.index(name) for name in _STEPS if name in names), None) if len(names) > 1 else None
