"""Tables on the screen, and in files that documents show."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks import other_work
from flashpoint.cli.table import Table, show
from flashpoint.hardware import hardware_name


def heading(device: torch.device, what: str) -> str:
    """Return a line for the top of a table: hardware, versions, date, and what the table has."""
    versions = f"torch {torch.__version__}, triton {version('triton')}"
    return f"{hardware_name(device)}, {versions}, {date.today()}; {what}"


class Report:
    """One table that grows. What is added is printed at once, and written with all that was added before.

    Its first line tells what other work there was, too.

    Args:
        name: of the files, without what comes after the dot: NAME.txt for people and NAME.csv for programs.
        folder: where they are written; None writes none.
    """

    def __init__(self, name: str, heading: str, folder: Path | None) -> None:
        self._name, self._heading, self._folder = name, heading, folder
        self._whole: Table | None = None
        self._start = other_work.at_start()

    def add(self, table: Table) -> None:
        """Print a table, and write it below the rows that are there; its columns are theirs."""
        heading = f"{self._heading}; {other_work.told(self._start, other_work.load())}"
        print(_text(table, "markdown", heading), flush=True)
        self._whole = table if self._whole is None else _joined(self._whole, table)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            for ending, form in (("txt", "markdown"), ("csv", "csv")):
                text = _text(self._whole, form, heading)
                (self._folder / f"{self._name}.{ending}").write_text(text)


def _joined(first: Table, second: Table) -> Table:
    note = " ".join(filter(None, (first.note, second.note)))
    return dataclasses.replace(first, rows=[*first.rows, *second.rows], note=note)


def _text(table: Table, form: str, heading: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        show(table, form, heading)
    return printed.getvalue()
