"""Databases of SQLite that hold several runs: MLflow's ``mlflow.db``, and one of trackio for each project."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashpoint.errors import UserError, nearest
from flashpoint.logs.record import Record, number_of, own_step, record_of, step_of

if TYPE_CHECKING:  # few logs are databases
    from sqlite3 import Connection

_STEP = ""
"""Name of trackio's own step beside the metrics of a row."""
_TOLD = 6
"""Runs that a message names."""


def is_database(head: bytes) -> bool:
    """Whether a file that begins so is one."""
    return head.startswith(b"SQLite format 3\0")


def runs_at(database: Path, path: Path) -> list[Path]:
    """Return the paths of the runs that a path names.

    Args:
        path: that of the database, of all its runs from the first one begun; or ``DATABASE/NAME``. A run is called by
            its name, or by its id where the name is missing, another's, too, or none that a path may end with.

    Returns:
        The path itself of one run, or of a database that cannot be read; none where it has no run of that name.
    """
    run = _run(database, path)
    try:
        with _opened(database) as (connection, kind):
            ids = _ids(connection, kind)
    except UserError:  # which reading it tells
        return [path]
    if run is None:
        return [path / name for name in ids] if len(ids) > 1 else [path]
    return [path] if run in {*ids, *ids.values()} else []


def read_database(database: Path, path: Path) -> Record:
    """Return what one run logged.

    Args:
        path: of the run (:func:`runs_at`).

    Raises:
        UserError: the database cannot be read, has several runs, or none of that name.
    """
    run = _run(database, path)
    with _opened(database) as (connection, kind):
        ids = _ids(connection, kind)
        if run is None and len(ids) == 1:
            (run,) = ids
        known = {**{one: one for one in ids.values()}, **ids}
        if run is None or run not in known:
            names = ", ".join(list(ids)[:_TOLD]) + (f" and {len(ids) - _TOLD} more" if len(ids) > _TOLD else "")
            there = f"it has {names}; {database}/NAME names one" if ids else "it has no run with metrics"
            raise UserError(f"{database}: {f'no run {run}; {nearest(run, ids)}' if run else ''}{there}")
        return kind.read(connection, known[run])


def _run(database: Path, path: Path) -> str | None:
    return None if path == database else str(path.relative_to(database))


@dataclass(frozen=True)
class _Kind:
    """A tool's database."""

    runs: str
    """Query of ids and names of the runs with metrics."""
    read: Callable[[Connection, str], Record]


def _mlflow(connection: Connection, run: str) -> Record:
    """Return a run of MLflow, which writes NaN as 0 with a mark beside it, and infinity as the largest number."""
    query = "SELECT key, step, value, is_nan FROM metrics WHERE run_uuid = ? ORDER BY rowid"
    metrics = list[tuple[str, object, float]]()
    for name, step, value, is_nan in connection.execute(query, (run,)):
        number = math.nan if is_nan else number_of(value)
        if number is not None:
            largest = abs(number) == sys.float_info.max
            metrics.append((name, step, math.copysign(math.inf, number) if largest else number))
    return record_of("MLflow", metrics)


def _trackio(connection: Connection, run: str) -> Record:
    """Return a run of trackio, which writes NaN and infinity as words."""
    query = f"SELECT step, metrics FROM metrics WHERE {_trackio_id(connection)} = ? ORDER BY id"
    items = list[dict[str, object]]()
    for step, written in connection.execute(query, (run,)):
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            items.append({_STEP: step} | json.loads(written))
    own = own_step(items)
    rows = []
    for item in items:
        step = step_of(item.pop(own or _STEP, None))
        named = ((name, number_of(value)) for name, value in item.items() if name != _STEP)
        if step is not None:
            rows.append((step, {name: number for name, number in named if number is not None}))
    return Record("trackio", rows, [f"its steps are those of {own}"] if own else [])


def _trackio_id(connection: Connection) -> str:
    """Return the column that tells runs apart: before 0.24 trackio had none beside the name."""
    return "run_id" if "run_id" in _columns(connection) else "run_name"


def _kind(connection: Connection) -> _Kind | None:
    """Return whose database it is, by the table of metrics that both have; None of another's."""
    columns = _columns(connection)
    if {"run_uuid", "key", "value", "step", "is_nan"} <= columns and _columns(connection, "runs"):
        of_run = "SELECT 1 FROM metrics WHERE metrics.run_uuid = runs.run_uuid"
        there = f"lifecycle_stage = 'active' AND EXISTS ({of_run})"
        return _Kind(f"SELECT run_uuid, name FROM runs WHERE {there} ORDER BY start_time, rowid", _mlflow)
    if {"run_name", "step", "metrics"} <= columns:
        one = _trackio_id(connection)
        return _Kind(f"SELECT {one}, run_name FROM metrics GROUP BY {one} ORDER BY MIN(id)", _trackio)
    return None


def _columns(connection: Connection, table: str = "metrics") -> set[str]:
    """Return the columns of a table; none where there is none, or a view, which may compute for ever."""
    query = "SELECT name FROM pragma_table_info((SELECT name FROM sqlite_master WHERE type = 'table' AND name = ?))"
    return {name for (name,) in connection.execute(query, (table,))}


def _ids(connection: Connection, kind: _Kind) -> dict[str, str]:
    """Return the ids of the runs by what they are called."""
    runs = [(str(one), str(name or "")) for one, name in connection.execute(kind.runs)]
    times = Counter(name for _, name in runs)
    return {name if times[name] == 1 and _ends_a_path(name) else one: one for one, name in runs}


def _ends_a_path(name: str) -> bool:
    return bool(name) and ".." not in Path(name).parts and str(Path("a", name)) == f"a/{name}"


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Connection, _Kind]]:
    """Open a database to read it, in the block."""
    import sqlite3

    with path.open("rb") as file:
        has_journal = file.read(20)[18:19] == b"\2"  # a write-ahead one, which even readers would write beside it
    alone = has_journal and not path.with_name(f"{path.name}-wal").exists()  # nobody else has it open
    address = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' * alone}"
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
            if (kind := _kind(connection)) is None:
                raise UserError(f"{path}: a database of SQLite, and neither MLflow's nor trackio's; export a CSV file")
            yield connection, kind
    except sqlite3.Error as error:
        raise UserError(f"{path}: SQLite cannot read it ({error}); give a whole copy of it") from error
