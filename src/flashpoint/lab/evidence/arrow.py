"""Metrics and digest chains as rows of Arrow tables, and Parquet files whose bytes follow from their rows.

Evidence has few significant decimal digits: six of a run's metrics, three of metrics of heads, four if asked for. Such
a value is stored with the fewest significant bits that tell decimals of so many digits apart: 21 (2²⁰ > 10⁶),
15 (2¹⁴ > 10⁴) and 11 (2¹⁰ > 10³). The rest of its bits are 0 and cost nothing once compressed. Reading gives back the
decimal.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashpoint.files import atomic_write
from flashpoint.runs.chain import Chain
from flashpoint.runs.metrics import Columns, Series

RUN_DIGITS = 6
"""Significant decimal digits of a run's metrics, as its loss, at least."""
HEAD_DIGITS = 3
"""Significant decimal digits of metrics of heads, by default: most are sampled from a few sequences."""
EXACT_DIGITS = 17
"""Significant decimal digits that tell any two float64 apart."""
_BITS = {HEAD_DIGITS: 11, 4: 15, RUN_DIGITS: 21}
"""Significant bits by decimal digits; the first of a mantissa is implied."""
_POWERS = np.array([float(10**power) for power in range(23)])  # each without a rounding error
KEYS = frozenset(("run", "step"))
"""Columns of a row that are no metrics."""
_RUNS_A_GROUP = 16
"""Runs in a row group: more compress better, fewer are read sooner."""
_COMPRESSION, _LEVEL = "brotli", 11
"""Slow to write and quick to read; five percent smaller than Zstandard at its best."""


def to_few_bits(values: NDArray[np.float64], digits: int) -> NDArray[np.float64]:
    """Return the values rounded to nearest at the significant bits from which :func:`to_few_digits` has their first 3,
    4 or 6 digits."""
    dropped = 53 - _BITS[digits]
    half, kept = np.uint64(1 << (dropped - 1)), np.uint64(2**64 - (1 << dropped))
    bits = np.ascontiguousarray(values).view(np.uint64)
    return np.where(np.isfinite(values), ((bits + half) & kept).view(np.float64), values)


def to_few_digits(values: NDArray[np.float64], digits: int) -> NDArray[np.float64]:
    """Return the values rounded to the nearest decimals of that many significant digits, each the float64 nearest to
    its decimal."""
    size = np.abs(values)
    plain = (size > 1e-16) & (size < 1e22)
    size = np.where(plain, size, 1.0)
    exponent = np.floor(np.log10(size)).astype(int) - (digits - 1)
    power = _POWERS[np.abs(exponent)]
    # A quotient or product of two such numbers is rounded once: the float64 nearest to the decimal.
    integers = np.rint(np.where(exponent < 0, size * power, size / power))
    decimals = np.copysign(np.where(exponent < 0, integers / power, integers * power), values)
    for at in zip(*np.nonzero(~plain), strict=True):
        decimals[at] = float(f"{values[at]:.{digits}g}")
    return decimals


def digits_of(columns: Columns) -> int:
    """Return the fewest of 3, 4, 6 and 17 significant digits that say every value of heads exactly, and six or 17 every
    value of the run."""
    return next((few for few in sorted(_BITS) if _said_in(columns, few)), EXACT_DIGITS)


def _said_in(columns: Columns, digits: int) -> bool:
    """Whether values that are stored with so many digits are read as they were."""
    return all(
        _same(to_few_digits(to_few_bits(values, few), few), values)
        for _, values in columns.values()
        for few in [digits_stored(digits, values.ndim)]
    )


def digits_stored(digits: int, dimensions: int) -> int:
    """Return a metric's significant digits in a run that has ``digits`` of metrics of heads."""
    return digits if dimensions == 3 else max(digits, RUN_DIGITS)


def _same(one: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    return bool(((one == other) & (np.signbit(one) == np.signbit(other)) | (np.isnan(one) & np.isnan(other))).all())


def metrics_table(run: str, columns: Columns, digits: int) -> Any:
    """Return the rows of a run: its name, a step at which something was measured, and each metric or null.

    Args:
        digits: 3, 4, 6 or 17 significant decimal digits of metrics of heads; a run's metrics have six or 17.
    """
    import pyarrow as pa

    steps = np.unique(np.concatenate([np.empty(0, np.int64), *(at for at, _ in columns.values())]))
    arrays = {"run": pa.array([run] * len(steps), pa.string()), "step": pa.array(steps)}
    for name in sorted(columns):
        at, values = columns[name]
        places = np.full(len(steps), -1)
        places[np.searchsorted(steps, at)] = np.arange(len(at))
        # [n] or [n, n_layer, n_head], as rows are ordered
        few = digits_stored(digits, values.ndim)
        stored = to_few_bits(values, few) if few in _BITS else values
        arrays[name] = _nested(np.moveaxis(stored, -1, 0)).take(pa.array(places, mask=places < 0))
    return pa.table(list(arrays.values()), schema=metrics_schema({name: columns[name][1].ndim for name in columns}))


def metrics_schema(dimensions: Mapping[str, int]) -> Any:
    """Return the schema of metrics of that many dimensions: 1 for a run's metrics, 3 for metrics of heads."""
    import pyarrow as pa

    heads = pa.list_(pa.field("element", pa.list_(pa.field("element", pa.float64()))))
    types = {name: heads if dimensions[name] == 3 else pa.float64() for name in sorted(dimensions)}
    return pa.schema({"run": pa.string(), "step": pa.int64(), **types})


def _nested(values: NDArray[np.float64]) -> Any:
    """Return values [n] or [n, n_layer, n_head] as an Arrow array of n numbers or nested lists."""
    import pyarrow as pa

    array = pa.array(np.ascontiguousarray(values).reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        offsets = np.arange(0, len(array) + 1, values.shape[axis], dtype=np.int32)
        array = pa.ListArray.from_arrays(pa.array(offsets), array, type=pa.list_(pa.field("element", array.type)))
    return array


def metrics_of(rows: Any, digits: int) -> Columns:
    """Return the inverse of :func:`metrics_table`, of the rows of one run."""
    steps = _numbers(rows["step"].combine_chunks())
    columns = ((name, _series(steps, rows[name].combine_chunks(), digits)) for name in rows.column_names[2:])
    return {name: series for name, series in columns if len(series[0])}


def _series(steps: NDArray[np.int64], array: Any, digits: int) -> Series:
    import pyarrow as pa

    at, values = steps[_valid(array)], array.drop_null()
    shape = []
    while pa.types.is_list(values.type):
        shape.append(len(values[0]) if len(values) else 0)
        values = values.flatten()
    numbers = _numbers(values).reshape(len(at), *shape)
    few = digits_stored(digits, numbers.ndim)
    if few in _BITS:
        numbers = to_few_digits(numbers, few)
    return at, np.ascontiguousarray(np.moveaxis(numbers, 0, -1))


def _valid(array: Any) -> NDArray[np.bool_]:
    """Return which elements are not null."""
    return _numbers(array.is_valid().cast("uint8")).astype(bool)


def _numbers(array: Any) -> NDArray[Any]:
    """Return an Arrow array without nulls. Its own ``to_numpy`` would import pandas."""
    return np.from_dlpack(array)


def chain_table(run: str, chain: Chain) -> Any:
    """Return the rows of a run: its name, and of each recorded step its number, loss, gradient norm, checksum, and
    digest. Null stands where no checksum was taken, and where the digest follows from the step before.
    """
    import pyarrow as pa

    loss, grad_norm = (chain.records[name].view(np.float32) for name in ("loss", "grad_norm"))
    state = chain.records["state"].astype(np.uint64)
    digests = [None if known else digest for known, digest in zip(chain.follows, chain.digests, strict=True)]
    arrays = [pa.array([run] * len(state), pa.string()), pa.array(chain.at), pa.array(loss), pa.array(grad_norm)]
    of_gaps = [pa.array(state, mask=state == 0), pa.array(digests, pa.binary(8))]
    return pa.table([*arrays, *of_gaps], schema=chain_schema())


def chain_schema() -> Any:
    """Return the schema of a table of digest chains, a ``pyarrow.Schema``."""
    import pyarrow as pa

    numbers = {"step": pa.int64(), "loss": pa.float32(), "grad_norm": pa.float32(), "state": pa.uint64()}
    return pa.schema({"run": pa.string(), **numbers, "digest": pa.binary(8)})


def wrong_chain_column(found: Any) -> str | None:
    """Return what is wrong with the columns of a table of digest chains; None where nothing is."""
    return _wrong_column(found, chain_schema())


def wrong_metrics_column(found: Any) -> str | None:
    """Return what is wrong with the columns of a table of metrics; None where nothing is."""
    import pyarrow as pa

    if wrong := _wrong_column(found, metrics_schema({})):
        return wrong
    for field in list(found)[2:]:
        if _leaf(field.type) != pa.float64() or _depth(field.type) not in (0, 2):
            return f"{field.name}: found {field.type}, expected double, or lists of lists of it"
    return None


def repeated_column(found: Any) -> str | None:
    """Return what is wrong with a table in which a column has the name of another; None where none has."""
    repeated = ((name, count) for name, count in Counter(found.names).items() if count > 1)
    return next((f"{name}: {count} columns of that name" for name, count in repeated), None)


def _wrong_column(found: Any, expected: Any) -> str | None:
    if wrong := repeated_column(found):
        return wrong
    for place, field in enumerate(expected):
        if place >= len(found.names) or found.field(place).name != field.name:
            return f"{field.name}: missing, expected column {place + 1} to be {field.type}"
        if found.field(place).type != field.type:
            return f"{field.name}: found {found.field(place).type}, expected {field.type}"
    return None


def chain_of(rows: Any) -> Chain:
    """Return the inverse of :func:`chain_table`, of the rows of one run."""
    at, loss, grad_norm, checksums = (rows[name].combine_chunks() for name in ("step", "loss", "grad_norm", "state"))
    state = np.zeros(len(checksums), np.uint64)
    state[_valid(checksums)] = _numbers(checksums.drop_null())
    return Chain.of_values(_numbers(at), _numbers(loss), _numbers(grad_norm), state, rows["digest"].to_pylist())


def runs_together(tables: Mapping[str, Any], schema: Any) -> Iterator[Any]:
    """Return the row groups of runs' tables, ordered by name; columns that a run has not are null there."""
    import pyarrow as pa

    names = sorted(tables)
    for first in range(0, len(names), _RUNS_A_GROUP):
        group = [tables[name].select(_shared(schema, tables[name])) for name in names[first : first + _RUNS_A_GROUP]]
        yield pa.concat_tables([schema.empty_table(), *group], promote_options="default").combine_chunks()


def _shared(schema: Any, table: Any) -> list[str]:
    return [name for name in schema.names if name in table.column_names]


def write_parquet(path: Path, schema: Any, groups: Iterator[Any] | Sequence[Any], dictionary: Sequence[str]) -> None:
    """Write atomically, one row group a table; the same rows give the same bytes.

    Args:
        dictionary: columns whose values repeat. Bytes of floating-point numbers are stored place by place.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    encodings = {
        field.name + ".list.element" * _depth(field.type): "BYTE_STREAM_SPLIT"
        for field in schema
        if pa.types.is_floating(_leaf(field.type))
    }
    if "step" in schema.names:
        encodings["step"] = "DELTA_BINARY_PACKED"
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        atomic_write(path) as partial,
        pq.ParquetWriter(
            partial,
            schema,
            compression=_COMPRESSION,
            compression_level=_LEVEL,
            use_dictionary=list(dictionary),
            column_encoding=encodings or None,
            write_statistics=list(dictionary),  # by which a reader finds a run's row group
            store_schema=False,
            write_page_checksum=True,
        ) as writer,
    ):
        for table in groups:
            writer.write_table(table, row_group_size=max(1, table.num_rows))


def _depth(kind: Any) -> int:
    return 0 if not hasattr(kind, "value_type") else 1 + _depth(kind.value_type)


def _leaf(kind: Any) -> Any:
    return kind if not hasattr(kind, "value_type") else _leaf(kind.value_type)


def write_data(folder: Path, name: str, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write the columns, of strings or numbers or None, as ``name.csv`` and ``name.parquet``: what a figure draws.

    Raises:
        OSError: the folder cannot be written.
    """
    import pyarrow as pa

    folder.mkdir(parents=True, exist_ok=True)
    with (
        atomic_write(folder / f"{name}.csv", durable=False) as partial,
        partial.open("w", encoding="utf-8", newline="") as file,
    ):
        csv.writer(file, lineterminator="\n").writerows([columns, *zip(*columns.values(), strict=True)])
    table = pa.table(dict(columns))
    words = [field.name for field in table.schema if pa.types.is_string(field.type)]
    write_parquet(folder / f"{name}.parquet", table.schema, [table], words)
