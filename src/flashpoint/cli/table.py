"""Tables as values, and their text: Markdown for people, as a table or as a list; CSV and JSON for programs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from flashpoint.errors import UserError, answer, escaped
from flashpoint.quantiles import clopper_pearson

FORMATS = ("markdown", "list", "csv", "json")
COLUMNS = "flashpoint.columns"
"""A key of click's context: the names of the columns to show. Absent, people are not shown those that are further."""
ALL = "all"
"""The name of all columns."""


@dataclass(frozen=True)
class Cell:
    """A value whose text is not the obvious one."""

    value: Any
    """The value in CSV and JSON: a string, a number, None, or a dict of these. In CSV each key has a column."""
    text: str
    """What people are shown."""


@dataclass(frozen=True)
class Table:
    """Rows under columns.

    A cell is a :class:`Cell`, or a string, a number or None, which are shown as they are; an integer with commas.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    """A line about the whole table."""
    further: Collection[str] = ()
    """Columns that people are not shown where nobody asks for them. CSV and JSON have them."""
    instead: Table | None = None
    """What people are shown in its place where nobody asks for columns; without columns it is its note alone."""


def show(tables: Table | Sequence[Table], form: str, heading: str = "") -> None:
    """Print tables in one of :data:`FORMATS`.

    Args:
        heading: a line before the tables, e.g. where their runs were made. CSV leaves it and the notes out.

    Raises:
        UserError: ``--columns`` names one that no table has.
    """
    tables = [tables] if isinstance(tables, Table) else tables
    if names := _asked():
        tables = with_columns(tables, names)
    elif form in ("markdown", "list"):
        tables = [_brief(table) for table in tables]
    if form == "json":
        plain = {"heading": heading, "tables": [_plain(table) for table in tables]}
        dumped = json.dumps(plain, ensure_ascii=False)
        answer(dumped if dumped.isprintable() else json.dumps(plain))  # in JSON's own escapes
    elif form == "csv":
        answer("\n".join(_csv(table) for table in tables), end="")
    else:
        text = _list if form == "list" else _markdown
        parts = [heading, *(part for table in tables for part in (text(table) if table.columns else "", table.note))]
        answer("\n\n".join(filter(None, parts)))


def text_of(table: Table) -> str:
    """Return a table in Markdown, without its further columns."""
    return _markdown(_brief(table))


def is_shown(column: str) -> bool:
    """Whether a column is among those to show."""
    names = _asked()
    return names is None or names == [ALL] or any(_places([column], name) for name in names)


def _asked() -> Sequence[str] | None:
    """Return the names of the columns to show; None where nobody asked for some."""
    context = click.get_current_context(silent=True)
    return context.meta.get(COLUMNS) if context else None


def with_columns(tables: Sequence[Table], names: Sequence[str]) -> list[Table]:
    """Return the tables that have the first of these columns, with only these, in the order of the names.

    A name stands for the columns that have it, or else for those that begin with it. :data:`ALL` alone stands for all
    columns of all tables.

    Raises:
        UserError: a name stands for no column.
    """
    if names == [ALL]:
        return list(tables)
    known = list(dict.fromkeys(column for table in tables for column in table.columns))
    for name in names:
        if not _places(known, name):
            raise UserError(f"--columns {name}: no such column; give {ALL}, or some of {', '.join(known)}")
    shown = [table for table in tables if _places(table.columns, names[0])]
    return [_only(table, dict.fromkeys(at for name in names for at in _places(table.columns, name))) for table in shown]


def _places(columns: Sequence[str], name: str) -> list[int]:
    exact = [at for at, column in enumerate(columns) if column == name]
    return exact or [at for at, column in enumerate(columns) if column.startswith(name)]


def _only(table: Table, places: Iterable[int]) -> Table:
    places = list(places)
    rows = [[row[at] for at in places] for row in table.rows]
    return replace(table, columns=[table.columns[at] for at in places], rows=rows)


def _brief(table: Table) -> Table:
    """Return what people are shown of a table: what stands in its place, or the table without its further columns and
    with a line that names those that have values."""
    if table.instead is not None:
        return table.instead
    if not table.further:
        return table
    places = [at for at, column in enumerate(table.columns) if column not in table.further]
    brief = _only(table, places)
    further = [at for at in range(len(table.columns)) if at not in places]
    filled = [table.columns[at] for at in further if any(cell_text(row[at]) for row in table.rows)]
    if not filled:
        return brief
    return replace(brief, note=f"{table.note}\n\nNot shown: {', '.join(filled)}; --columns {ALL} shows them.".strip())


def _markdown(table: Table) -> str:
    from tabulate import tabulate

    texts = [[cell_text(cell).replace("|", "\\|") for cell in row] for row in table.rows]
    columns = [escaped(column).replace("|", "\\|") for column in table.columns]
    numeric = [all(_is_number(row[at]) for row in table.rows) for at in range(len(columns))]
    sides = ["right" if right else "left" for right in numeric]
    return tabulate(texts, columns, "pipe", colalign=sides if texts else None, disable_numparse=True)


def _list(table: Table) -> str:
    """Return an item for each row: its first cell, then the name and the text of every cell that has one."""
    items = []
    for first, *rest in table.rows:
        named = zip(map(escaped, table.columns[1:]), map(cell_text, rest), strict=True)
        told = "; ".join(f"*{name}* {text}" for name, text in named if text)
        items.append(f"- **{cell_text(first)}** {told}".rstrip())
    return "\n".join(items)


def cell_text(cell: Any) -> str:
    """Return what people are shown, in one line."""
    match cell:
        case Cell():
            return escaped(cell.text)
        case None:
            return ""
        case bool() | float():
            return str(cell)
        case int():
            return f"{cell:,}"
    return escaped(str(cell))


def _value(cell: Any) -> Any:
    value = cell.value if isinstance(cell, Cell) else cell
    if isinstance(value, dict):
        return {name: _value(part) for name, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    return value


def _is_number(cell: Any) -> bool:
    value = _value(cell)
    return value is None or isinstance(value, dict) or (isinstance(value, int | float) and not isinstance(value, bool))


def _csv(table: Table) -> str:
    headings: list[str] = []
    columns: list[list[Any]] = []
    for at, column in enumerate(table.columns):
        parts = [_parts(row[at]) for row in table.rows]
        names = dict.fromkeys(name for of_row in parts for name in of_row) or {"": None}
        headings += [f"{column} {name}".strip() for name in names]
        columns += [[of_row.get(name) for of_row in parts] for name in names]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([headings, *zip(*columns, strict=True)])
    return text.getvalue()


def _parts(cell: Any) -> dict[str, Any]:
    """Return the values by name; one alone has none."""
    value = _value(cell)
    if isinstance(value, dict):
        return value
    return {} if value is None else {"": value}


def _plain(table: Table) -> dict[str, Any]:
    rows = [dict(zip(table.columns, map(_value, row), strict=True)) for row in table.rows]
    return {"rows": rows, "note": table.note}


def code(label: str) -> Cell:
    """Return a name; Markdown shows it as code."""
    return Cell(label, f"`{label}`")


def number(value: float | None, form: str) -> Cell:
    """Return a number in this format; None becomes an empty cell."""
    return Cell(value, "" if value is None else f"{value:{form}}")


def step(value: float | None, none: str) -> Cell:
    """Return a step, or this text if there is none."""
    return Cell(value, none if value is None else f"{value:,.0f}")


def share(count: int, total: int) -> Cell:
    """Return ``5 of 6``."""
    return Cell({"count": count, "of": total}, f"{count} of {total}")


def share_interval(count: int, total: int) -> Cell:
    """Return the 95 % interval of a share (Clopper–Pearson), in percent."""
    low, high = clopper_pearson(count, total)
    return Cell({"low": low, "high": high}, f"{100 * low:.0f} to {100 * high:.0f} %")
