"""Event files of TensorBoard, with TensorBoard's own reader: those of a folder are one log."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashpoint.errors import UserError, pip_install
from flashpoint.logs.record import Record

PATTERN = "*tfevents*"
"""Of the names of event files."""


def is_event_file(head: bytes) -> bool:
    """Whether a file that begins so is one: its first record names the format."""
    return b"brain.Event:" in head[:64]


def read_event_files(paths: Sequence[Path]) -> Record:
    """Return the scalars of event files, in the order of their names, which begin with the time.

    Nothing is thinned, and what a run that went on wrote again is kept beside what it replaces.

    Raises:
        UserError: TensorBoard is not installed.
    """
    rows: list[tuple[int, Mapping[str, float]]] = []
    remarks, begins = [], []
    for path in sorted(paths):
        if rows:
            begins.append(len(rows))
        records, whole = _framed(path)
        loaded = 0
        for event in _events(path):
            loaded += 1
            if found := {one.tag: value for one in event.summary.value if (value := _scalar(one)) is not None}:
                rows.append((event.step, found))
        if loaded < records or not whole:
            damage = "cut short" if loaded == records else "damaged"
            remarks.append(f"{path.name} is {damage} after {loaded:,} records; what lies before is used")
    return Record("TensorBoard", rows, remarks, begins)


def _events(path: Path) -> Iterator[Any]:
    try:
        # The other loader of this module, EventFileLoader, rewrites every scalar as a tensor, and takes five times as
        # long.
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    except ImportError as error:
        raise UserError(f"{path}: needs tensorboard; {pip_install('flashpoint[logs]')}") from error
    yield from LegacyEventFileLoader(str(path)).Load()


def _scalar(value: Any) -> float | None:
    """Return the number of a summary, as either of the two APIs writes it; None of pictures and the like."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if value.HasField("tensor") and value.metadata.plugin_data.plugin_name in ("scalars", ""):
        from tensorboard.util.tensor_util import make_ndarray

        array = make_ndarray(value.tensor)
        return float(array) if array.ndim == 0 and array.dtype.kind in "fiu" else None
    return None


def _framed(path: Path) -> tuple[int, bool]:
    """Return how many records a file has by their lengths, and whether it ends with one. TensorBoard's reader ends at a
    damaged record without a word."""
    records, at, size = 0, 0, path.stat().st_size
    with path.open("rb") as file:
        while at < size:
            file.seek(at)
            head = file.read(8)
            if len(head) < 8:
                return records, False
            at += 16 + int(struct.unpack("<Q", head)[0])  # the length, its checksum, the record, and its checksum
            records += at <= size
    return records, at == size
