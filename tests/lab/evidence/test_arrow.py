"""Metrics and chains as rows of tables: what goes in comes out."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flashpoint.lab.evidence.arrow import (
    chain_of,
    chain_table,
    digits_of,
    metrics_of,
    metrics_table,
    to_few_bits,
    to_few_digits,
    write_parquet,
    wrong_metrics_column,
)
from flashpoint.runs.chain import Chain, ChainWriter
from flashpoint.runs.metrics import Columns
from tests.conftest import REPOSITORY


def decimals(kind: str, digits: int) -> np.ndarray:
    """Decimals of so many digits, as Python's parser reads them."""
    least, end = 10 ** (digits - 1), 10**digits
    if kind == "one size":
        return np.array([float(f"{integer}e-3") for integer in range(least, end, 1 + end // 100_000)])
    if kind == "ends of a decade":
        return np.array([float(f"{i}e{exponent}") for exponent in range(-30, 30) for i in (1, least + 1, end - 1)])
    if kind == "special":
        return np.array([0.0, -0.0, math.nan, math.inf, -math.inf])
    random = np.random.default_rng(0)
    integers, exponents = random.integers(1 - end, end, 20_000), random.integers(-300, 300, 20_000)
    return np.array([float(f"{integer}e{exponent}") for integer, exponent in zip(integers, exponents, strict=True)])


@pytest.mark.parametrize("kind", ["any size", "one size", "ends of a decade", "special"])
@pytest.mark.parametrize(("digits", "kept_bits"), [(6, 21), (4, 15), (3, 11)])
def test_few_digits_survive_in_few_bits(digits: int, kept_bits: int, kind: str) -> None:
    values = decimals(kind, digits)
    stored = to_few_bits(values, digits)
    assert not np.any(stored[np.isfinite(stored)].view(np.uint64) % np.uint64(1 << (53 - kept_bits)))
    read = to_few_digits(stored, digits)
    np.testing.assert_array_equal(read, values)
    np.testing.assert_array_equal(np.signbit(read), np.signbit(values))


@pytest.mark.parametrize("digits", [3, 4, 6])
def test_rounding_to_few_digits_is_that_of_python(digits: int) -> None:
    values = np.random.default_rng(1).standard_normal(20_000) * 10.0 ** np.arange(20_000).clip(0, 20)
    assert to_few_digits(values, digits).tolist() == [float(f"{value:.{digits}g}") for value in values]


def test_a_value_with_more_digits_is_kept_with_all() -> None:
    few: Columns = {"loss": (np.array([0, 5]), np.array([0.123456, 1e-9]))}
    more: Columns = {**few, "lr": (np.array([0]), np.array([1 / 3]))}
    coarse: Columns = {**few, "norm": (np.array([5]), np.array([[[1.234]]]))}
    coarser: Columns = {**few, "norm": (np.array([5]), np.array([[[9.99]]]))}
    fine: Columns = {**few, "norm": (np.array([5]), np.array([[[1.23456]]]))}
    assert [digits_of(columns) for columns in (few, coarser, coarse, fine, more)] == [3, 3, 4, 6, 17]
    for columns in (few, coarser, coarse, fine, more):
        table = metrics_table("run", columns, digits_of(columns))
        assert {name: values.tolist() for name, (_, values) in metrics_of(table, digits_of(columns)).items()} == {
            name: values.tolist() for name, (_, values) in columns.items()
        }


def test_metrics_of_heads_keep_their_layout() -> None:
    norms = np.arange(24.0).reshape(2, 3, 4)
    norms[1, 2, 3] = math.nan
    columns: Columns = {
        "loss": (np.array([0, 1, 2]), np.array([3.0, math.inf, 1.0])),
        "norm": (np.array([1, 2, 8, 9]), norms),
    }
    read = metrics_of(metrics_table("run", columns, 6), 6)
    assert list(read) == ["loss", "norm"]
    for name, (steps, values) in columns.items():
        assert read[name][0].dtype == np.int64
        np.testing.assert_array_equal(read[name][0], steps)
        np.testing.assert_array_equal(read[name][1], values)
        assert read[name][1].flags.c_contiguous


def test_a_chain_with_missing_steps_keeps_the_digests_that_do_not_follow(tmp_path: Path) -> None:
    writer = ChainWriter(tmp_path / "chain")
    for step in range(250):
        writer.append(1 / (step + 1), step / 7, state=2**64 - 1 - step if step % 100 == 99 else 0)
    writer.close()
    chain = Chain.read(tmp_path / "chain").milestones()
    table = chain_table("run", chain)
    given = [row["step"] for row in table.to_pylist() if row["digest"]]
    assert given == [199, 249]
    read = chain_of(table)
    assert (read.at.tolist(), read.records.tobytes()) == (chain.at.tolist(), chain.records.tobytes())
    for rows, told in (
        (table.slice(1), "steps do not rise from 0"),
        (table.take([0, 2, 1]), "steps do not rise from 0"),
        (table.take([0, 2]), "no digest of step 2, nor the step before"),
    ):
        with pytest.raises(ValueError, match=told):
            chain_of(rows)


def test_a_column_that_is_there_twice_is_told() -> None:
    once = metrics_table("run", {"loss": (np.arange(3), np.ones(3))}, 3)
    assert wrong_metrics_column(once.schema) is None
    for place, name in enumerate(once.column_names):
        twice = once.append_column(name, once.column(place))
        assert wrong_metrics_column(twice.schema) == f"{name}: 2 columns of that name"


GROUPS = [[1, math.nan, 3, None], [5, 5, math.nan], [7, math.inf], [math.nan, -math.inf], [2, 3]]
"""Losses by row group. Without NaN the first lies below 5, and the second is 5."""


def found_by_pyarrow(path: Path) -> dict[str, list[int]]:
    import pyarrow.compute as pc

    loss = pc.field("loss")
    asked = {
        "NaN": pc.is_nan(loss), "not finite": ~pc.is_finite(loss), "above 5": loss > 5,
        "not 5 or below": ~(loss <= 5), "not 5": loss != 5, "not null": loss.is_valid(),
    }  # fmt: skip
    return {name: pq.read_table(path, filters=one)["step"].to_pylist() for name, one in asked.items()}


def found_by_duckdb(path: Path) -> dict[str, list[int]]:
    duckdb = pytest.importorskip("duckdb")
    asked = {
        "NaN": "isnan(loss)", "not finite": "NOT isfinite(loss)", "above 5": "loss > 5",
        "not 5 or below": "NOT loss <= 5", "not 5": "loss <> 5", "not null": "loss IS NOT NULL",
    }  # fmt: skip
    rows = {name: duckdb.sql(f"SELECT step FROM '{path}' WHERE {one} ORDER BY step") for name, one in asked.items()}
    return {name: [step for (step,) in found.fetchall()] for name, found in rows.items()}


def found_by_polars(path: Path) -> dict[str, list[int]]:
    polars = pytest.importorskip("polars")
    loss = polars.col("loss")
    asked = {
        "NaN": loss.is_nan(), "not finite": ~loss.is_finite(), "above 5": loss > 5,
        "not 5 or below": ~(loss <= 5), "not 5": loss != 5, "not null": loss.is_not_null(),
    }  # fmt: skip
    return {name: polars.scan_parquet(path).filter(one).collect()["step"].to_list() for name, one in asked.items()}


@pytest.mark.parametrize(
    ("found", "nan_is_largest"), [(found_by_pyarrow, False), (found_by_duckdb, True), (found_by_polars, True)]
)
def test_filters_of_other_readers_find_the_losses_that_are_not_finite(
    tmp_path: Path, found: Callable[[Path], dict[str, list[int]]], nan_is_largest: bool
) -> None:
    """Statistics of a row group leave NaN out, and readers pass over row groups by them. DuckDB and polars take NaN for
    the largest number."""
    losses = dict(enumerate(loss for group in GROUPS for loss in group))
    schema = pa.schema({"run": pa.string(), "step": pa.int64(), "loss": pa.float64()})
    tables, start = [], 0
    for number, group in enumerate(GROUPS):
        steps = range(start, start := start + len(group))
        tables.append(pa.table([[f"run-{number}"] * len(group), steps, pa.array(group, pa.float64())], schema=schema))
    write_parquet(tmp_path / "metrics.parquet", schema, tables, ["run"])

    def of(asked: Callable[[float], bool]) -> list[int]:
        return [step for step, loss in losses.items() if loss is not None and asked(loss)]

    assert found(tmp_path / "metrics.parquet") == {
        "NaN": of(math.isnan),
        "not finite": of(lambda loss: not math.isfinite(loss)),
        "above 5": of(lambda loss: loss > 5 or (nan_is_largest and math.isnan(loss))),
        "not 5 or below": of(lambda loss: not loss <= 5),
        "not 5": of(lambda loss: loss != 5),
        "not null": of(lambda _: True),
    }


@pytest.mark.parametrize("folder", ["runs/reference", "docs/findings"])
def test_no_number_that_can_be_nan_has_statistics_in_the_files_that_are_kept(folder: str) -> None:
    def told(column: Any) -> bool:
        return column.physical_type in ("FLOAT", "DOUBLE") and (column.is_stats_set or column.has_column_index)

    files = sorted((REPOSITORY / folder).rglob("*.parquet"))
    assert files
    for path in files:
        kept = pq.read_metadata(path)
        groups = [kept.row_group(number) for number in range(kept.num_row_groups)]
        assert not [
            column.path_in_schema
            for group in groups
            for column in map(group.column, range(group.num_columns))
            if told(column)
        ], path
