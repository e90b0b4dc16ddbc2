"""CSV files with a step: those of Lightning's ``CSVLogger``, what W&B exports, and any other."""

from __future__ import annotations

import csv
from pathlib import Path

from flashpoint.errors import UserError
from flashpoint.logs.column_names import plain_name
from flashpoint.logs.record import Record, number_of, step_of

_STEPS = ("step", "global step", "trainer global step", "train global step", "iteration", "iter", "update", "epoch")
"""Plain names of the step, in the order in which they are preferred. W&B's ``_step`` is a step, too."""
_DELIMITERS = ",;\t"
_RANGE = ("__MIN", "__MAX")
"""Ends of the names of columns that W&B's web page exports beside each metric: of the points drawn as one."""


def is_csv(head: bytes) -> bool:
    """Whether a file that begins so is one: its first line names several columns, one of them the step."""
    first, *_ = head.decode(errors="replace").lstrip("\ufeff").splitlines() or [""]
    try:
        return _step_column(next(csv.reader([first], delimiter=_delimiter(first)), [])) is not None
    except csv.Error:
        return False


def read_csv(path: Path) -> Record:
    """Return the rows that have a step. Cells that hold no number are missing.

    A last line without its end is left out: it may be half a number.

    Raises:
        UserError: the file is not text, or a row is damaged.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: no text ({error}); give a CSV file in UTF-8") from error
    lines = text[: text.rfind("\n") + 1].splitlines()
    remarks = ["its last line has no end, and is left out"] if text and not text.endswith("\n") else []
    try:
        header, *cells = csv.reader(lines or [text], delimiter=_delimiter(text.split("\n", 1)[0]))
    except (csv.Error, ValueError) as error:
        raise UserError(f"{path}: no CSV ({error}); restore the file") from error
    at = _step_column(header)
    assert at is not None, header
    named = [(place, name) for place, name in enumerate(header) if place != at and not name.endswith(_RANGE)]
    rows = []
    for row in cells:
        if len(row) > at and (step := step_of(row[at])) is not None:
            numbers = ((name, number_of(row[place])) for place, name in named if place < len(row))
            rows.append((step, {name: number for name, number in numbers if number is not None}))
    if plain_name(header[at]) == "epoch":
        remarks.append("its steps are epochs")
    return Record("CSV", rows, remarks)


def _delimiter(header: str) -> str:
    return max(_DELIMITERS, key=header.count)


def _step_column(header: list[str]) -> int | None:
    names = [plain_name(name) for name in header]
    return next((names.index(name) for name in _STEPS if name in names), None) if len(names) > 1 else None
