"""The evidence tables: runs that are kept, as Parquet files.

runs.parquet                 one row a run: experiment, name, configuration, manifest and outcome as JSON
metrics/EXPERIMENT.parquet   one row a run and step at which something was measured
chains/EXPERIMENT.parquet    one row a run and optimiser step: loss, gradient norm and checksum of the state
index.csv                    one line a run, for people and for diffs
EXPERIMENT/RUN/              a run that keeps its tape
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flashpoint.errors import UserError
from flashpoint.runs.arrow import chain_of, metrics_of
from flashpoint.runs.chain import Chain
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.metrics import Columns
from flashpoint.runs.recorded import Run

EVIDENCE = "reference"
"""Folder of the evidence under ``runs_dir``."""


class Table:
    """Parquet rows with a column ``run``, a run's in one row group."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._group: tuple[int, Any] = -1, None

    def of(self, run: str) -> Any:
        """The run's rows; reading runs in the order of their names reads each row group once.

        Raises:
            UserError: the file is missing or damaged.
        """
        import pyarrow.compute as pc

        with told_in_one_line(self.path):
            number = self._groups.get(run)
            if number is None:
                raise UserError(f"{self.path}: no rows of {run}; restore the file")
            if self._group[0] != number:
                self._group = number, self._file.read_row_group(number)
            rows = self._group[1]
            return rows.filter(pc.equal(rows["run"], run))

    def by_run(self) -> dict[str, Any]:
        """Return all rows."""
        with told_in_one_line(self.path):
            return {run: self.of(run) for run in self._groups}

    @cached_property
    def _file(self) -> Any:
        import pyarrow.parquet as pq

        return pq.ParquetFile(self.path, page_checksum_verification=True)

    @cached_property
    def _groups(self) -> dict[str, int]:
        groups = range(self._file.num_row_groups)
        return {
            run: number
            for number in groups
            for run in self._file.read_row_group(number, columns=["run"])["run"].unique().to_pylist()
        }


@dataclass(frozen=True)
class InTables:
    """A run in the evidence tables."""

    experiment: str
    name: str
    row: dict[str, Any]
    """The run's row of ``runs.parquet``."""
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

    def config(self) -> dict[str, Any]:
        return self._json("config")

    def manifest(self) -> dict[str, Any]:
        return self._json("manifest")

    def outcome(self) -> dict[str, Any]:
        return self._json("outcome")

    def metrics(self) -> Columns:
        if self.row["digits"] is None:
            raise UserError(f"{self.where}: kept without metrics; give a run that has them")
        return metrics_of(self.measured.of(self.name), self.row["digits"])

    def chain(self) -> Chain:
        if not self.row["chain"]:
            raise UserError(f"{self.where}: kept without its digest chain; give a run that has one")
        chain = chain_of(self.chains.of(self.name))
        if chain.digest != (told := self.outcome()["chain_digest"]):
            raise UserError(f"{self.chains.path}: {self.name} ends in {chain.digest}, not {told}; restore the file")
        return chain

    def _json(self, column: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.row[column])
        return value


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
    def rows(self) -> list[dict[str, Any]]:
        """The rows of ``runs.parquet`` by experiment and name; empty if there is no such file."""
        import pyarrow.parquet as pq

        if not self.runs_path.exists():
            return []
        with told_in_one_line(self.runs_path):
            rows: list[dict[str, Any]] = pq.read_table(self.runs_path, page_checksum_verification=True).to_pylist()
            return rows

    @cached_property
    def experiments(self) -> dict[str, dict[str, Run]]:
        """Runs by experiment and name, both in order; a folder is preferred to a row of its name."""
        found: dict[str, dict[str, Run]] = {}
        tables: dict[str, tuple[Table, Table]] = {}
        for row in self.rows:
            name, experiment = row["name"], row["experiment"]
            paths = self.metrics_path(experiment), self.chains_path(experiment)
            measured, chains = tables.setdefault(experiment, (Table(paths[0]), Table(paths[1])))
            found.setdefault(experiment, {})[name] = Run(InTables(experiment, name, row, measured, chains))
        for config in self.root.glob("*/*/config.json"):
            folder = RunFolder(config.parent)
            found.setdefault(config.parent.parent.name, {})[config.parent.name] = Run.of_folder(folder)
        return {experiment: dict(sorted(found[experiment].items())) for experiment in sorted(found)}


@contextmanager
def told_in_one_line(path: Path) -> Iterator[None]:
    """What Arrow raises of a file that is damaged or missing, as a :class:`UserError`."""
    import pyarrow as pa

    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: missing; restore the file") from None
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise UserError(f"{path}: damaged ({str(error).splitlines()[0]}); restore the file") from error
