"""The evidence tables: runs that are kept, as Parquet files.

runs.parquet                 one row a run: experiment, name, configuration, manifest and outcome as JSON
metrics/EXPERIMENT.parquet   one row a run and step at which something was measured
chains/EXPERIMENT.parquet    one row a run and optimiser step of its digest chain that is kept
index.csv                    one line a run, for people and for diffs
EXPERIMENT/RUN/              a run that keeps its tape
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from flashpoint.errors import UserError
from flashpoint.files import regular
from flashpoint.lab.config import Config
from flashpoint.lab.evidence.arrow import (
    chain_of,
    metrics_of,
    repeated_column,
    wrong_chain_column,
    wrong_metrics_column,
)
from flashpoint.lab.stored_config import config_of
from flashpoint.runs import migrations
from flashpoint.runs.chain import Chain
from flashpoint.runs.folder import RunFolder, runs_in_folders_of
from flashpoint.runs.manifest import Manifest
from flashpoint.runs.metrics import Columns
from flashpoint.runs.outcome import Outcome, outcome_of
from flashpoint.runs.run import Run
from flashpoint.schema import Kind, checked, understood

_RESTORE = "restore the file"
_LARGEST_BYTES = 2 * 10**9
"""Of a table, or of a row group of one, in memory; 2,645 runs are 10 MB."""
_NUMBER_BYTES = 8
_LONGEST_NAME = 1000
_ROWS = 16
"""Of ``runs.parquet`` that are read at once: each has a few thousand characters."""


class Row(Kind):
    """A row of ``runs.parquet``."""

    experiment: str
    name: str
    digits: Annotated[int, Field(ge=1, le=17)] | None
    """Significant decimal digits of metrics of heads; None of a run that is kept without metrics."""
    chain: bool
    """Whether the run is kept with its digest chain."""
    config: str
    manifest: str
    outcome: str


class Table:
    """Parquet rows with a column ``run``, a run's in one row group.

    Args:
        wrong: says of a schema of Arrow what is wrong with its columns; None where nothing is.
    """

    def __init__(self, path: Path, wrong: Callable[[Any], str | None]) -> None:
        self.path, self._wrong = path, wrong
        self._group: tuple[int, Any] = -1, None

    def of(self, run: str) -> Any:
        """The run's rows; reading runs in the order of their names reads each row group once.

        Raises:
            UserError: the file is missing or damaged.
        """
        with damage_in_one_line(self.path):
            if run not in self._places:
                raise UserError(f"{self.path}: no rows of {run}; restore the file")
            number, start, length = self._places[run]
            if self._group[0] != number:
                self._group = number, self._file.read_row_group(number)
            return self._group[1].slice(start, length)

    def by_run(self) -> dict[str, Any]:
        """Return all rows."""
        with damage_in_one_line(self.path):
            return {run: self.of(run) for run in self._places}

    @cached_property
    def _file(self) -> Any:
        import pyarrow.parquet as pq

        file = pq.ParquetFile(regular(self.path), page_checksum_verification=True)
        if wrong := self._wrong(file.schema_arrow):
            raise UserError(f"{self.path}: {wrong}; {_RESTORE}")
        table = file.metadata
        for number in range(table.num_row_groups):
            check_size(self.path, table.row_group(number).num_rows * table.num_columns * _NUMBER_BYTES)
        return file

    @cached_property
    def _places(self) -> dict[str, tuple[int, int, int]]:
        """Of each run the row group, the first row in it and the number of rows, which lie together.

        No Python value is handed to Arrow, which would import pandas to see whether it is one of that library's.
        """
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        found: dict[str, tuple[int, int, int]] = {}
        groups = self._file.num_row_groups  # first: what is no such table is not opened again
        # Each name once: a file of few bytes may say that a long one comes a billion times.
        file = pq.ParquetFile(self.path, read_dictionary=["run"], page_checksum_verification=True)
        for number in range(groups):
            names = file.read_row_group(number, columns=["run"])["run"].combine_chunks()
            known = names.dictionary.to_pylist()
            if any(len(name) > _LONGEST_NAME for name in known):
                raise UserError(f"{self.path}: a name of more than {_LONGEST_NAME} characters; {_RESTORE}")
            together, start = pc.run_end_encode(names.indices), 0
            runs = (known[at] for at in together.values.to_pylist())
            for run, end in zip(runs, together.run_ends.to_pylist(), strict=True):
                if run in found:
                    raise UserError(f"{self.path}: rows of {run} lie apart; {_RESTORE}")
                found[run], start = (number, start, end - start), end
        return found


@dataclass(frozen=True)
class InTables:
    """A run in the evidence tables."""

    experiment: str
    name: str
    row: Row
    path: Path
    """Of ``runs.parquet``."""
    measured: Table
    chains: Table

    @property
    def where(self) -> str:
        return f"{self.experiment}:{self.name}"

    @property
    def folder(self) -> None:
        return None

    @property
    def ended(self) -> bool:
        return True

    def config(self) -> Config:
        return config_of(self.row.config, self._place("config"), _RESTORE)

    def manifest(self) -> Manifest:
        return understood(self.row.manifest, Manifest, self._place("manifest"), _RESTORE, migrations.manifest)

    def outcome(self) -> Outcome:
        return outcome_of(self.row.outcome, self._place("outcome"), _RESTORE)

    def metrics(self) -> Columns:
        if self.row.digits is None:
            raise UserError(f"{self.where}: kept without metrics; give a run that has them")
        rows = self.measured.of(self.name)
        with damage_in_one_line(self.measured.path):
            return metrics_of(rows, self.row.digits)

    def chain(self) -> Chain:
        if not self.row.chain:
            raise UserError(f"{self.where}: kept without its digest chain; give a run that has one")
        rows = self.chains.of(self.name)
        with damage_in_one_line(self.chains.path):
            chain = chain_of(rows)
        if chain.digest != (told := self.outcome().chain_digest):
            raise UserError(f"{self.chains.path}: {self.name} ends in {chain.digest}, not {told}; restore the file")
        return chain

    def _place(self, column: str) -> str:
        """Return what messages call a column of the row."""
        return f"{self.path}: {self.where}: {column}"


def check_size(path: Path, size: int) -> None:
    """Refuse a table that holds more bytes than anyone has measured.

    Raises:
        UserError: with its name.
    """
    if size > _LARGEST_BYTES:
        raise UserError(f"{path}: holds more than {_LARGEST_BYTES // 10**9} GB of rows; {_RESTORE}")


class Evidence:
    """The runs kept under a folder, in tables and in folders of their own.

    Raises:
        UserError: a table is damaged, here and from what reads one.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def runs_path(self) -> Path:
        return self.root / "runs.parquet"

    @property
    def index_path(self) -> Path:
        return self.root / "index.csv"

    def metrics_path(self, experiment: str) -> Path:
        return self.root / "metrics" / f"{experiment}.parquet"

    def chains_path(self, experiment: str) -> Path:
        return self.root / "chains" / f"{experiment}.parquet"

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of ``runs.parquet`` by experiment and name; empty if there is no such file."""
        import pyarrow.parquet as pq

        if not self.runs_path.exists():
            return []
        with damage_in_one_line(self.runs_path):  # not read_table, which imports pandas
            file = pq.ParquetFile(regular(self.runs_path), page_checksum_verification=True)
            if wrong := repeated_column(file.schema_arrow):
                raise UserError(f"{self.runs_path}: {wrong}; {_RESTORE}")
            rows, size = list[Row](), 0
            for batch in file.iter_batches(batch_size=_ROWS):
                few = batch.to_pylist()
                size += sum(len(cell) for row in few for cell in row.values() if isinstance(cell, str))
                check_size(self.runs_path, size)
                told = enumerate(few, len(rows) + 1)  # checked at once: a small file may hold a million rows of nothing
                rows += [checked(row, Row, f"{self.runs_path}: row {number}", _RESTORE) for number, row in told]
        return rows

    @cached_property
    def kept(self) -> list[Run]:
        """The runs of :attr:`rows`."""
        tables: dict[str, tuple[Table, Table]] = {}
        found = []
        for row in self.rows:
            name, experiment = row.name, row.experiment
            if experiment not in tables:
                measured = Table(self.metrics_path(experiment), wrong_metrics_column)
                tables[experiment] = measured, Table(self.chains_path(experiment), wrong_chain_column)
            found.append(Run(InTables(experiment, name, row, self.runs_path, *tables[experiment])))
        return found

    @cached_property
    def experiments(self) -> dict[str, dict[str, Run]]:
        """Runs by experiment and name, both in order; a folder is preferred to a row of its name."""
        found: dict[str, dict[str, Run]] = {}
        for run in self.kept:
            found.setdefault(str(run.experiment), {})[run.name] = run
        for path in runs_in_folders_of(self.root):
            found.setdefault(path.parent.name, {})[path.name] = Run.of_folder(RunFolder(path))
        return {experiment: dict(sorted(found[experiment].items())) for experiment in sorted(found)}


@contextmanager
def damage_in_one_line(path: Path) -> Iterator[None]:
    """What Arrow raises of a file that is damaged or missing, as a :class:`UserError`."""
    import pyarrow as pa

    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {_RESTORE}") from None
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: damaged ({reason}); {_RESTORE}") from error
