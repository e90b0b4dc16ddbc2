"""Bad input of every kind, and how it ends: ``python scripts/faults/fuzz.py --cases 2000``, a table on stdout.

It ends well if it is done or refused with status 2 in one line that says why. Hypothesis draws the cases, always the
same ones; each runs in a tree of its own, with limits of memory and time. ``tests/fuzz/`` has the kinds and the judge.
``--into runs/reference/fuzz.txt`` puts each row into that table as its kind ends.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from flashpoint.cli.table import Cell, Table, show, text_of
from flashpoint.files import atomic_write
from flashpoint.lab.progress_bar import progress_bar
from tests.fuzz.judge import FAULTS, Command, Ending, Tally, explore, kinds, told

_COLUMNS = ("bad input", "cases", "refused", "refused before PyTorch is imported", *FAULTS)


def main() -> None:
    known = [kind.name for kind in kinds()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000, help="of each kind")
    parser.add_argument("--kind", action="append", choices=known, help="only this one; several times for several")
    parser.add_argument("--processes", type=int, default=1, help="that try a kind each")
    parser.add_argument("--into", type=Path, help="a table of which the rows of these kinds are replaced")
    parser.add_argument("--lacking", action="store_true", help="only kinds whose row there has fewer cases, or a fault")
    options = parser.parse_args()
    rows = _rows(options.into) if options.into else {}
    names = [name for name in options.kind or known if not options.lacking or _lacks(rows.get(name), options.cases)]
    failed, ended_kinds = False, list[str]()
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        asked = {pool.submit(tried, name, options.cases): name for name in names}
        for ended in as_completed(asked):
            name, tally = asked[ended], ended.result()
            failed = failed or bool(tally.faults) or tally.cases < options.cases
            faults = (tally.faults[fault] for fault in FAULTS)
            rows[name] = tally.cases, tally.refused, tally.without_pytorch, *faults
            ended_kinds.append(name)
            if options.into:
                with atomic_write(options.into) as path:
                    path.write_text(text_of(_table(rows, rows)) + "\n")
    show(_table(rows, ended_kinds), "markdown")
    sys.exit(failed)


def tried(name: str, cases: int) -> Tally:
    """Try cases of a kind; those that end badly, or are refused late, are told on stderr at once.

    There are fewer where the kind itself fails, which is told, too.
    """
    (kind,) = (kind for kind in kinds() if kind.name == name)
    tally = Tally()

    def judged(case: Any, command: Command, ending: Ending) -> None:
        tally.add(ending, command)
        bar.update()
        if ending.faults(command) or (ending.status == 2 and ending.pytorch and not command.warm):
            bar.write(told(case, command, ending), file=sys.stderr)

    with tempfile.TemporaryDirectory() as folder, progress_bar(cases, "case", kind.name) as bar:
        try:
            explore(kind, cases, Path(folder), judged)
        except Exception:
            bar.write(f"{name}: the fuzz itself failed\n{traceback.format_exc()}", file=sys.stderr)
    return tally


_Row = tuple[int | None, ...]
"""Counts under the columns but the first; None where nobody counted."""


def _rows(path: Path) -> dict[str, _Row]:
    """Return the rows of a table that this wrote, by kind."""
    lines = path.read_text().splitlines()[2:] if path.exists() else []
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name: tuple(None if cell == "-" else int(cell.replace(",", "")) for cell in cells) for name, *cells in rows}


def _lacks(row: _Row | None, cases: int) -> bool:
    """Whether a row has fewer cases, or a fault."""
    return row is None or (row[0] or 0) < cases or any(row[3:])


def _table(rows: dict[str, _Row], names: Collection[str]) -> Table:
    cells = ([Cell(count, "-" if count is None else f"{count:,}") for count in rows[name]] for name in names)
    return Table(_COLUMNS, [(name, *counts) for name, counts in zip(names, cells, strict=True)])


if __name__ == "__main__":
    main()
