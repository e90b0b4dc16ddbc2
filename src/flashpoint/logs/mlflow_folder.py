"""Folders of MLflow, ``mlruns/EXPERIMENT/RUN/metrics/``: a file for each metric; a line has time, value and step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from flashpoint.errors import UserError
from flashpoint.logs.record import Record, number_of, record_of

_METRICS, _META = "metrics", "meta.yaml"


def runs_in(path: Path) -> list[Path]:
    """Return the folders of the runs with metrics in the store or the experiment that a path names. Those that MLflow
    shows as deleted are left out."""
    found = [meta.parent for meta in path.glob(f"*/{_META}" if (path / _META).is_file() else f"*/*/{_META}")]
    return sorted(run for run in found if metric_files(run) and _said(run, "lifecycle_stage") != "deleted")


def metric_files(run: Path) -> list[Path]:
    """Return the files of the metrics in a run's folder; none of another folder."""
    return sorted(filter(Path.is_file, (run / _METRICS).rglob("*"))) if (run / _META).is_file() else []


def is_metric_file(path: Path) -> bool:
    """Whether a file lies where MLflow has those of metrics."""
    return _folder(path) is not None


def read_metric_files(paths: Sequence[Path]) -> Record:
    """Return the metrics of one run. A last line without its end is left out.

    Raises:
        UserError: a line has no value.
    """
    metrics, remarks = list[tuple[str, object, float]](), list[str]()
    folder = _folder(paths[0])
    assert folder is not None, paths[0]
    if name := _said(folder.parent, "run_name"):
        remarks.append(f"MLflow calls it {name}")
    for path in paths:
        name = path.relative_to(folder).as_posix()
        *lines, unfinished = path.read_text("utf-8", "replace").split("\n")
        if unfinished:
            remarks.append(f"the last line of {name} has no end, and is left out")
        for number, line in enumerate(lines, 1):
            _, value, step, *_ = *line.split(), "", "", ""
            if (read := number_of(value)) is None:
                raise UserError(f"{path}:{number}: no time, value and step, as MLflow writes them; restore the file")
            metrics.append((name, step or 0, read))
    return record_of("MLflow", metrics, remarks)


def _folder(path: Path) -> Path | None:
    """Return the folder of metrics that a file lies in; its own name may have slashes, and so folders of its own."""
    return next((one for one in path.parents if one.name == _METRICS and (one.parent / _META).is_file()), None)


def _said(run: Path, key: str) -> str | None:
    """Return what a run's description, of one plain line for each key, says of a key."""
    found = re.search(rf"^{key}: (.+)$", (run / _META).read_text("utf-8", "replace"), re.MULTILINE)
    return found[1] if found else None
