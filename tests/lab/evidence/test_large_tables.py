"""Tables of few bytes that would fill the memory, and tables with a column twice."""

import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flashpoint.errors import UserError
from flashpoint.lab.evidence import tables
from flashpoint.lab.evidence.tables import Evidence

_CELL = {"experiment": "mine", "name": "a", "digits": 6, "chain": True, "config": "{}", "manifest": "", "outcome": ""}


def write(path: Path, rows: int = 1, **cells: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([{**_CELL, **cells}] * rows), path)


def test_a_column_that_comes_twice_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "runs.parquet")
    table = pq.read_table(tmp_path / "runs.parquet")
    pq.write_table(table.append_column("name", table["name"]), tmp_path / "runs.parquet")
    with pytest.raises(UserError, match=r"runs\.parquet: name: 2 columns of that name"):
        _ = Evidence(tmp_path).rows


def test_runs_that_hold_more_than_anyone_has_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that all rows share lies once in the file, and once for each row in memory."""
    write(tmp_path / "runs.parquet", rows=1000, config="x" * 100_000)
    assert (tmp_path / "runs.parquet").stat().st_size < 50_000
    monkeypatch.setattr(tables, "_LARGEST_BYTES", 10**7)
    with pytest.raises(UserError, match=r"runs\.parquet: holds more than"):
        _ = Evidence(tmp_path).rows


@pytest.mark.parametrize(("name", "rows", "told"), [("y" * 2000, 10, "a name of more than 1000"), ("a", 10**6, "GB")])
def test_metrics_that_hold_more_than_anyone_has_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rows: int, told: str
) -> None:
    write(tmp_path / "runs.parquet")
    (tmp_path / "metrics").mkdir()
    table = pa.table({"run": [name] * rows, "step": [1] * rows, "loss": [1.0] * rows})
    pq.write_table(table, tmp_path / "metrics/mine.parquet", row_group_size=rows)
    monkeypatch.setattr(tables, "_LARGEST_BYTES", 10**7)
    with pytest.raises(UserError, match=told):
        _ = Evidence(tmp_path).kept[0].columns


def test_a_million_rows_of_nothing_end_with_the_first(tmp_path: Path) -> None:
    """The file has few bytes; all its rows took more than a gigabyte."""
    nothing = pa.table({name: pa.nulls(1_000_000, pa.string()) for name in _CELL})
    pq.write_table(nothing, tmp_path / "runs.parquet", compression="zstd")
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"runs\.parquet: row 1: "):
            _ = Evidence(tmp_path).rows
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()
