"""Runs that are kept as evidence: adding them to its tables, and taking them out."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.files import atomic_write
from flashpoint.lab.evidence.arrow import (
    HEAD_DIGITS,
    KEYS,
    chain_schema,
    chain_table,
    digits_of,
    digits_stored,
    metrics_schema,
    metrics_table,
    runs_together,
    write_parquet,
    wrong_chain_column,
    wrong_metrics_column,
)
from flashpoint.lab.evidence.tables import Evidence, Row, Table
from flashpoint.runs import migrations
from flashpoint.runs.metric_table import LOSS
from flashpoint.runs.metrics import Columns
from flashpoint.runs.run import Run

INDEX_COLUMNS = ("experiment", "run", "attention", "seed", "outcome", "onset", "steps", "digest", "date")


def archive(
    runs: Sequence[Run],
    experiment: str,
    root: Path,
    *,
    every: int = 10,
    only: Sequence[str] | None = None,
    spacing: int = 1,
    digits: int = HEAD_DIGITS,
) -> None:
    """Add ended runs to the evidence tables under ``root``, with most of their metrics left out.

    Configuration, manifest and outcome are kept whole, the digest chain as :meth:`.Chain.milestones`.

    Args:
        experiment: whose tables take them; they are made where there are none.
        every: of this many values of what is measured at each step, as the loss is, one stays, and the last.
        only: names of the metrics to keep; None keeps all.
        spacing: least steps between values of other metrics; the last stays, too.
        digits: significant decimal digits of metrics of heads; a run's metrics have six at least.

    Raises:
        UserError: a run cannot be kept, or an argument is out of its range; then the tables are as they were.
    """
    if min(every, spacing, digits) < 1:
        raise UserError(f"every {every}, spacing {spacing}, digits {digits}: give 1 or more")
    if not experiment.replace("-", "").replace("_", "").isalnum():
        raise UserError(f"{experiment!r}: no name of an experiment; give letters, digits, hyphens")
    with _alone(root) as evidence:
        _refuse_known(runs, experiment, evidence)
        _add(evidence, experiment, [(run, _thinned(_kept(run), run, every, only, spacing, digits)) for run in runs])


def remove(runs: Sequence[Run], root: Path) -> None:
    """Take runs out of the evidence tables under ``root``.

    Raises:
        UserError: a run is not in them.
    """
    for run in runs:
        if run.experiment is None:
            raise UserError(f"{run.where}: in a folder of its own, not in the tables; delete the folder")
    for experiment in sorted({str(run.experiment) for run in runs}):
        names = [run.name for run in runs if run.experiment == experiment]
        with _alone(root) as evidence:
            _rewrite(evidence, experiment, [], {}, {}, names)


def index_of(evidence: Evidence) -> str:
    """Return one line a run of the tables, as ``index.csv`` has them."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(INDEX_COLUMNS)
    for run in evidence.kept:
        table.writerow(
            [
                *(run.experiment, run.name, run.config.attn.name, run.config.seed),
                run.ending,
                *(run.outcome.onset_step, run.outcome.step, run.outcome.digest),
                run.manifest.day,
            ]
        )
    return text.getvalue()


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[Evidence]:
    """Be the only process that changes the tables; what others have added before is read now.

    Raises:
        UserError: a folder of tables is a link, behind which another one would be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / ".lock"):
        evidence = Evidence(root)
        folders = (evidence.metrics_path("").parent, evidence.chains_path("").parent)
        if link := next((folder for folder in folders if folder.is_symlink()), None):
            raise UserError(f"{link}: a link to another folder; put the folder itself in its place")
        yield evidence


def _refuse_known(runs: Sequence[Run], experiment: str, evidence: Evidence) -> None:
    known = evidence.experiments.get(experiment, {})
    times = Counter(run.name for run in runs)
    for run in runs:
        if run.name in known:
            raise UserError(f"{run.where}: {experiment}:{run.name} is kept already; rename the run, or --remove that")
        if times[run.name] > 1:
            raise UserError(f"{run.where}: a second run named {run.name}; rename one of them")


def _kept(run: Run) -> Columns:
    """Return the metrics of a run that has all that evidence needs."""
    if run.folder is None:
        raise UserError(f"{run.where}: is in the evidence tables already; give a run's folder")
    if not run.ended:
        raise UserError(f"{run.where}: has not ended; {run.folder.resume_setting} goes on with it")
    if not run.folder.chain.exists():
        missing = f"{run.where}: has no {run.folder.chain.name}, which evidence keeps"
        raise UserError(f"{missing}; {run.folder.replay_setting} makes the run anew")
    told = run.outcome.chain_digest
    if run.chain.digest != told:
        raise UserError(f"{run.folder.chain}: ends in {run.chain.digest}, the outcome says {told}; restore the file")
    return run.columns


def _thinned(columns: Columns, run: Run, every: int, only: Sequence[str] | None, spacing: int, digits: int) -> Columns:
    at_each_step = columns[LOSS.name][0] if LOSS.name in columns else np.empty(0, np.int64)
    thinned: Columns = {}
    for name, (steps, values) in columns.items():
        if only is not None and name not in only:
            continue
        each = np.array_equal(steps, at_each_step)
        kept = set(range(0, len(steps), every)) if each else _spaced(steps, spacing)
        places = sorted({*kept, len(steps) - 1})
        thinned[name] = steps[places], _rounded(values[..., places], digits_stored(digits, values.ndim))
    if taken := KEYS.intersection(thinned):
        raise UserError(f"{run.where}: a metric cannot be kept as {min(taken)}; --only NAME keeps others alone")
    if not thinned:
        raise UserError(
            f"{run.where}: measured no {', '.join(only or ['metric'])}; it has {', '.join(sorted(columns))}"
        )
    return thinned


def _spaced(steps: NDArray[np.int64], spacing: int) -> set[int]:
    """Return the places of steps at least ``spacing`` apart."""
    kept = [0]
    for place, step in enumerate(steps.tolist()):
        if step - steps[kept[-1]] >= spacing:
            kept.append(place)
    return set(kept)


def _rounded(values: NDArray[np.float64], digits: int) -> NDArray[np.float64]:
    return np.array([float(f"{value:.{digits}g}") for value in values.flat]).reshape(values.shape)


def _add(evidence: Evidence, experiment: str, runs: Sequence[tuple[Run, Columns]]) -> None:
    """Add runs with what is to be kept of their metrics."""
    digits = {run.name: digits_of(columns) for run, columns in runs}
    rows = [_row(experiment, run, digits[run.name]) for run, _ in runs]
    measured = {run.name: metrics_table(run.name, columns, digits[run.name]) for run, columns in runs}
    chains = {run.name: chain_table(run.name, run.chain.milestones()) for run, _ in runs}
    _rewrite(evidence, experiment, rows, measured, chains)


def _row(experiment: str, run: Run, digits: int) -> Row:
    assert run.folder, "the tables take runs of folders"
    parts = {
        "config": migrations.config_as_kept(_plain(run.folder.config)),
        "manifest": _plain(run.folder.manifest),
        "outcome": _plain(run.folder.outcome),
    }
    texts = {name: json.dumps(part, ensure_ascii=False, separators=(",", ":")) for name, part in parts.items()}
    return Row(experiment=experiment, name=run.name, digits=digits, chain=True, **texts)


def _plain(path: Path) -> Any:
    return json.loads(path.read_bytes())


def _rewrite(
    evidence: Evidence,
    experiment: str,
    rows: Sequence[Row],
    measured: Mapping[str, Any],
    chains: Mapping[str, Any],
    without: Collection[str] = (),
) -> None:
    """Write an experiment's tables with these runs and without those.

    What says which runs there are is written last: rows of a run that it does not name count for nothing.
    """
    import pyarrow as pa

    left = [row for row in evidence.rows if row.experiment != experiment or row.name not in without]
    of_experiment = [row.name for row in left if row.experiment == experiment]
    for path, new, schema, wrong in (
        (evidence.metrics_path(experiment), measured, None, wrong_metrics_column),
        (evidence.chains_path(experiment), chains, chain_schema(), wrong_chain_column),
    ):
        old = Table(path, wrong).by_run() if path.exists() else {}
        tables = {**{name: table for name, table in old.items() if name in of_experiment}, **new}
        _write(path, tables, schema or _metrics_schema(tables))
    everything = sorted([*left, *rows], key=lambda row: (row.experiment, row.name))
    table = pa.Table.from_pylist([row.model_dump() for row in everything], schema=_runs_schema())
    write_parquet(evidence.runs_path, table.schema, [table], dictionary=["experiment"])
    index = index_of(Evidence(evidence.root))
    with atomic_write(evidence.index_path) as partial:
        partial.write_text(index, encoding="utf-8")


def _write(path: Path, tables: Mapping[str, Any], schema: Any) -> None:
    if tables:
        write_parquet(path, schema, runs_together(tables, schema), dictionary=["run"])
    else:
        path.unlink(missing_ok=True)


def _metrics_schema(tables: Mapping[str, Any]) -> Any:
    import pyarrow as pa

    heads = {
        column: 3 if pa.types.is_list(table.schema.field(column).type) else 1
        for table in tables.values()
        for column in table.column_names[2:]
        if table[column].null_count < len(table)
    }
    return metrics_schema(heads)


def _runs_schema() -> Any:
    import pyarrow as pa

    text = {name: pa.string() for name in ("config", "manifest", "outcome")}
    return pa.schema(
        {"experiment": pa.string(), "name": pa.string(), "digits": pa.int32(), "chain": pa.bool_(), **text}
    )
