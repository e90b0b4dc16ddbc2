"""A log of another tool as one reads a run: columns over steps that rise, and where the training went on anew."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flashpoint.errors import UserError
from flashpoint.files import regular
from flashpoint.logs import (
    csv_file,
    databases,
    event_files,
    metric_entries,
    mlflow_folder,
    text_lines,
    trainer_state,
    wandb_file,
)
from flashpoint.logs.column_names import metric_columns, plain_name
from flashpoint.logs.record import FormatName, Record
from flashpoint.runs.metric_table import GRAD_NORM, LOSS
from flashpoint.runs.metrics import Columns, Series

_HEAD = 2**16  # bytes by which a format is known
_MOST_MB = 2000
"""Of a log: it is held in memory as a whole."""
_UTF16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE
_COMPRESSED = b"\x1f\x8b", b"PK\x03\x04", b"\xfd7zXZ\x00", b"BZh", b"\x28\xb5\x2f\xfd"
_STATE, _LIGHTNING = "trainer_state.json", "metrics.csv"
"""Names of logs in a folder; those of the other formats are patterns."""
_UNREAD = {"*.swanlab": "SwanLab", "run-*/*.swanlab": "SwanLab", ".aim/": "Aim"}
"""Whose stores are not read, by what a folder of them has."""


_EPOCH = "epoch"
_LINES = ("CSV", "text")
"""Formats whose rows are whole: the epoch stands beside the loss."""
Rows = Sequence[tuple[int, Mapping[str, float]]]


@dataclass(frozen=True)
class Resume:
    """Where a training went on."""

    step: int
    """The first one of the later process."""
    after: int
    """The last one of the earlier process; from ``step`` on the later one's entries stand in its place."""


@dataclass(frozen=True)
class Log:
    """What a log says."""

    where: str
    format: FormatName
    columns: Columns
    """Every column by its name, and again by the name of the metric that it is: steps [n], rising, and values [n]."""
    names: dict[str, str]
    """The columns that are metrics of every run, by the metric's name; ``loss`` is among them."""
    resumes: tuple[Resume, ...]
    repeated: int
    """Losses that another value of the same step replaced, without a step back: the last one stands."""
    remarks: tuple[str, ...]


@dataclass
class _Column:
    """One column while it is put in order."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    count: int = 0
    """Of values as they were written."""
    repeated: int = 0
    process: int = 0
    """Number of the process that wrote the last value."""
    resumes: list[Resume] = field(default_factory=list)

    def add(self, step: int, value: float, process: int) -> None:
        self.count += 1
        if self.steps:
            if step < self.steps[-1] or process != self.process:
                self.resumes.append(Resume(step, self.steps[-1]))
            elif step == self.steps[-1] and not _same(value, self.values[-1]):
                self.repeated += 1
            while self.steps and self.steps[-1] >= step:
                self.steps.pop()
                self.values.pop()
        self.process = process
        self.steps.append(step)
        self.values.append(value)

    def series(self) -> Series:
        return np.array(self.steps, np.int64), np.array(self.values, np.float64)


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def logs_at(path: Path) -> list[Path]:
    """Return the paths of the logs that a path names: itself, or the runs of a store that has several; none where it is
    no log. A run in a database has the path ``DATABASE/NAME``."""
    files = log_files(path)
    if files and _is_database(files[0]):
        return databases.runs_at(files[0], path)
    return mlflow_folder.runs_in(path) or ([path] if files else [])


def log_files(path: Path) -> list[Path]:
    """Return the files of the log that a path names: itself, those of a folder that a tool has written, or the database
    that has the run; none where it is no log. A folder of checkpoints has the log of the newest.

    Raises:
        UserError: a folder has several logs.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        file = next(filter(Path.is_file, path.parents), None)
        return [file] if file is not None and _is_database(file) else []
    if metrics := mlflow_folder.metric_files(path):
        return metrics
    if states := [*path.glob(_STATE)] or sorted(path.glob(f"checkpoint-*/{_STATE}"), key=_checkpoint)[-1:]:
        return states
    kinds = [sorted(path.glob(pattern)) for pattern in (_LIGHTNING, wandb_file.PATTERN, event_files.PATTERN)]
    found = [files for files in kinds if files]
    if len(found) > 1 or (found and found[0] is kinds[1] and len(kinds[1]) > 1):
        names = ", ".join(file.name for files in found for file in files[:2])
        raise UserError(f"{path}: has several logs, {names}; name one")
    if not found:
        for pattern, tool in _UNREAD.items():
            if any(path.glob(pattern)):
                raise _not_read(path, tool)
    return found[0] if found else []


def _not_read(path: Path, tool: str) -> UserError:
    return UserError(f"{path}: a store of {tool}, which is not read; write step and loss to a CSV file, and name that")


def _checkpoint(path: Path) -> int:
    number = path.parent.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def read_log(path: Path, loss: str | None) -> Log:
    """Read a log.

    Args:
        path: of one log (:func:`logs_at`).
        loss: the column that is the training loss; None where names are to tell.

    Raises:
        UserError: it is of no known format, is empty, or does not say which column is the loss.
    """
    where, record = str(path), _read(path)
    columns = dict[str, _Column]()
    begins = frozenset(record.begins)
    process = 0
    rows, anew = _counted_on(record.rows) if record.format in _LINES else (record.rows, [])
    for place, (step, numbers) in enumerate(rows):
        process += place in begins
        for name, value in numbers.items():
            columns.setdefault(name, _Column()).add(step, value, process)
    if not columns:
        needed = "a step and a number with a name, as 'step 100: loss 2.31'"
        raise UserError(f"{where}: {_nothing(record)}; a log has {needed}")
    names = metric_columns(where, {name: column.count for name, column in columns.items()}, loss)
    series = {name: column.series() for name, column in columns.items()}
    of_loss = columns[names[LOSS.name]]
    if GRAD_NORM.name in names:
        series[names[LOSS.name]], hidden = _nan_again(series[names[LOSS.name]], series[names[GRAD_NORM.name]])
        anew = [*anew, *hidden]
    series |= {metric: series[name] for metric, name in names.items()}
    return Log(where, record.format, series, names, tuple(of_loss.resumes), of_loss.repeated, (*record.remarks, *anew))


def _nan_again(loss: Series, norm: Series) -> tuple[Series, list[str]]:
    """Return losses of 0 beside a gradient norm that is no finite number as NaN, and a remark if there are some.

    The Trainer of Transformers leaves losses that are NaN or infinite out of the mean that it logs, so that entries of
    them alone say 0 (``logging_nan_inf_filter``), whatever they are logged to.
    """
    steps, losses = loss
    hidden = (losses == 0) & np.isin(steps, norm[0][~np.isfinite(norm[1])])
    if not hidden.any():
        return loss, []
    told = (
        f"{hidden.sum():,} losses are 0, from step {steps[hidden][0]:,} on, beside a gradient norm that is no finite "
        "number: they are taken as NaN, for which the Trainer logs 0 (its logging_nan_inf_filter)"
    )
    return (steps, np.where(hidden, math.nan, losses)), [told]


def _counted_on(rows: Rows) -> tuple[Rows, list[str]]:
    """Return rows whose steps count on from epoch to epoch, and a remark if they began anew in one.

    A step that goes back while the epoch rises is no resume.
    """
    found, offset, remarks = list[tuple[int, Mapping[str, float]]](), 0, list[str]()
    last, gap, last_epoch = -1, 1, math.inf
    for step, numbers in rows:
        epoch = next((numbers[name] for name in numbers if plain_name(name) == _EPOCH), math.inf)
        if step < last and last_epoch < epoch < math.inf:
            offset += last + gap - step
            remarks = ["its steps began anew in every epoch, and are counted on"]
        elif step > last >= 0:
            gap = step - last
        last, last_epoch = step, epoch
        found.append((step + offset, numbers))
    return found, remarks


def _nothing(record: Record) -> str:
    remarks = "".join(f" ({remark})" for remark in record.remarks)
    return f"no {'line' if record.format == 'text' else 'entry'} has any numbers of a step{remarks}"


def _read(path: Path) -> Record:
    where, files = str(path), log_files(path)
    if not files:
        raise UserError(f"{where}: no such file or folder; name a log, or a run's folder")
    sizes = [regular(file).stat().st_size for file in files]
    if not any(sizes):
        raise UserError(f"{where}: is empty; name a log that holds something")
    if max(sizes) > _MOST_MB * 10**6:
        raise UserError(f"{where}: has more than {_MOST_MB:,} MB; give a log of the losses alone")
    if _head(files[0])[:2] in _UTF16:
        raise UserError(f"{where}: text in UTF-16; convert it with iconv -f UTF-16 -t UTF-8")
    if _head(files[0]).startswith(_COMPRESSED):
        raise UserError(f"{where}: is compressed; unpack it, and name what it holds")
    if databases.is_database(_head(files[0])):
        return databases.read_database(files[0], path)
    reader = _reader(files[0])
    if reader is not None:
        return reader(files)
    if path.suffix == ".swanlab":
        raise _not_read(path, "SwanLab")
    if b"\0" in _head(files[0]):
        kinds = (
            "trainer_state.json, TensorBoard's event files, a .wandb file, a store of MLflow or trackio, CSV, or lines"
        )
        raise UserError(f"{where}: no log that can be read; give {kinds}")
    return text_lines.read_text_lines(files[0])


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD)


def _is_database(path: Path) -> bool:
    try:
        return path.is_file() and databases.is_database(_head(path))  # a pipe would be waited for
    except OSError:  # which reading it tells
        return False


def _reader(path: Path) -> Callable[[list[Path]], Record] | None:
    """Return the reader of a file's format by its content; None where nothing tells it, as of plain text."""
    head = _head(path)
    if event_files.is_event_file(head):
        return event_files.read_event_files
    if mlflow_folder.is_metric_file(path):
        return mlflow_folder.read_metric_files
    known: tuple[tuple[bool, Callable[[Path], Record]], ...] = (
        (wandb_file.is_wandb_file(head), wandb_file.read_wandb_file),
        (trainer_state.is_trainer_state(head) or path.name == _STATE, trainer_state.read_trainer_state),
        (metric_entries.is_entries(head), metric_entries.read_entries),
        (csv_file.is_csv(head), csv_file.read_csv),
    )
    return next((lambda files, read=read: read(files[0]) for matches, read in known if matches), None)
