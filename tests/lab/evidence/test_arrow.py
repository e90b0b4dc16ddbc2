"""Metrics and chains as rows of tables: what goes in comes out."""

import math
from pathlib import Path

import numpy as np
import pytest

from flashpoint.lab.evidence.arrow import (
    chain_of,
    chain_table,
    digits_of,
    metrics_of,
    metrics_table,
    to_few_bits,
    to_few_digits,
    wrong_metrics_column,
)
from flashpoint.runs.chain import Chain, ChainWriter
from flashpoint.runs.metrics import Columns


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
