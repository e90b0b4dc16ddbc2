"""The metrics file of a run: the only place that knows its format.

One JSON object a line, each with its ``step`` (from 0). A metric of the run is a number, a metric of heads a list of
layers, each a list of heads. NaN and infinities are strings, which ``float`` reads. Files of older runs name each head:
``"layer/2/head/3/NAME": 0.5`` (from 1); they read the same.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from flashpoint.errors import UserError
from flashpoint.files import atomic_write, regular, whole_blocks
from flashpoint.runs.metric_table import LOSS, OF_THE_RUN
from flashpoint.schema import NONFINITE

Series = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Steps [n] and values: [n] of a metric of the run, [n_layer, n_head, n] of a metric of heads."""
Columns = dict[str, Series]
"""Every metric of a run, by name."""


class MetricsFile:
    """Appends one line a step, flushed to the operating system by the end of each call.

    Args:
        path: of a new file, or of one to go on with.
        first_step: lines of this step and of later ones are dropped from an existing file.

    Raises:
        OSError: the file cannot be written, here and from every method.
    """

    def __init__(self, path: Path, first_step: int = 0) -> None:
        if path.exists():
            _drop_steps_from(path, first_step)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float | NDArray[np.floating]]) -> None:
        """Record metrics of a step (from 0); those of heads are arrays [n_layer, n_head].

        The steps of one metric never go back; those of different ones may.
        """
        self.log_all([(step, metrics)])

    def log_all(self, of_steps: Iterable[tuple[int, Mapping[str, float | NDArray[np.floating]]]]) -> None:
        """Record the metrics of several steps at once."""
        lines = (
            {"step": step, **{name: _to_json(value) for name, value in metrics.items()}} for step, metrics in of_steps
        )
        self._file.write("".join(json.dumps(line) + "\n" for line in lines))

    def sync(self) -> None:
        """Wait until the metrics are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def steps_logged(path: Path, until: int) -> int:
    """Return of how many steps before ``until`` the file has the loss; damaged lines are passed over."""
    if not path.exists():
        return 0
    has_loss = f'"{LOSS.name}": '.encode()
    with regular(path).open("rb") as lines:
        return sum(has_loss in line and _is_before(line, until) for line in lines)


def read_metrics(path: Path) -> Columns:
    """Return the columns of a metrics file, compressed or not, without a last line that a kill cut short.

    Raises:
        UserError: the file is missing or its compression damaged, or a line is, with its number.
    """
    columns: dict[str, _Column] = {}
    number = 1
    for block in whole_blocks(path, "give a run that has metrics"):
        lines = block.count(b"\n") + 1
        try:
            _add_block(columns, block, lines)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            _add_lines(columns, block, f"{path}:{{}}", number)
        number += lines
    joined: dict[tuple[int, ...], NDArray[np.int64]] = {}  # metrics that are always logged together share their steps
    return {name: column.joined(joined) for name, column in columns.items()}


class _Column:
    """One metric, as far as the file is read."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.last_step = shape, -1
        self._steps: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.float64]] = []

    def add(self, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Add the steps [n] of a block of lines and the values of each, [n, *shape]."""
        self._steps.append(steps)
        self._values.append(values)
        self.last_step = int(steps[-1])

    def joined(self, known: dict[tuple[int, ...], NDArray[np.int64]]) -> Series:
        """Return the whole series, once: the blocks are given up, so that memory holds few values twice."""
        blocks = tuple(map(id, self._steps))
        if blocks not in known:
            known[blocks] = np.concatenate(self._steps)
        values = np.concatenate(self._values)
        self._values.clear()
        return known[blocks], np.ascontiguousarray(np.moveaxis(values, 0, -1))


def _add_block(columns: dict[str, _Column], block: bytes, lines: int) -> None:
    """Add lines that are as :class:`MetricsFile` writes them, many times sooner than line by line.

    Raises:
        ValueError: one is not, or is damaged; then nothing is added. So of a TypeError, KeyError, OverflowError and
            RecursionError.
    """
    # One object a line, without another one in it: JSON's text cannot hold the end of a line, so that no brace is one
    # of a text, and what stands between the braces is of one line. The whole is then read as one list.
    listed = block.replace(b"}\n{", b"},\n{")
    ends = len(listed) - len(block) + 1
    if not (block[:1] == b"{" and block[-1:] == b"}" and ends == lines == block.count(b"{") == block.count(b"}")):
        raise ValueError("no objects of metrics in a line each")
    rows = from_json(b"[%b]" % listed, allow_inf_nan=False)
    found = [row.pop("step") for row in rows]
    steps = np.array(found, np.int64)
    if set(map(type, found)) != {int} or steps.min() < 0:
        raise ValueError("no steps")
    added = []
    for name in dict.fromkeys(itertools.chain.from_iterable(rows)):
        if name.startswith("layer/"):
            raise ValueError("an older file's metric of a head")
        try:
            at, of_name = steps, [row[name] for row in rows]
        except KeyError:
            at, of_name = steps[[name in row for row in rows]], [row[name] for row in rows if name in row]
        values = _block_of(of_name)
        before = columns.get(name) or _Column(values.shape[1:])
        if values.shape[1:] != before.shape or at[0] < before.last_step or (np.diff(at) < 0).any():
            raise ValueError("other heads than before, or an earlier step")
        if values.ndim > 1 and name in OF_THE_RUN:
            raise ValueError("a list")
        added.append((name, before, at, values))
    for name, column, at, values in added:
        columns.setdefault(name, column).add(at, values)


def _block_of(values: list[Any]) -> NDArray[np.float64]:
    """Return values of JSON, all numbers or all lists by layer and head, as [n] or [n, n_layer, n_head]."""
    kinds = set(map(type, values))
    if kinds <= {float, int}:
        return np.array(values, np.float64)
    if kinds != {list}:
        return np.array([_number(value) for value in values])
    layers = list(itertools.chain.from_iterable(values))
    heads = list(itertools.chain.from_iterable(layers))
    if set(map(type, layers)) != {list} or len({*map(len, values)}) > 1 or len({*map(len, layers)}) > 1 or not heads:
        raise ValueError("no layers of heads")
    flat = heads if set(map(type, heads)) <= {float, int} else [_number(head) for head in heads]
    return np.array(flat, np.float64).reshape(len(values), len(values[0]), len(layers[0]))


def _add_lines(columns: dict[str, _Column], block: bytes, where: str, first: int) -> None:
    """Add lines one by one: those of older files, and those up to a damaged one, which is named.

    Args:
        where: what messages begin with, for the number of the line.
        first: the number of the first line.

    Raises:
        UserError: a line is damaged.
    """
    added: dict[str, tuple[list[int], list[NDArray[np.float64]]]] = {}
    for number, line in enumerate(block.split(b"\n"), first):
        try:
            for name, step, values in _metrics_of(line):
                if name not in columns:
                    if values.ndim and name in OF_THE_RUN:
                        raise ValueError(f"{name}: found a list, expected a number")
                    columns[name] = _Column(values.shape)
                if values.shape != columns[name].shape or step < columns[name].last_step:
                    raise ValueError(f"{name}: other heads than before, or an earlier step")
                columns[name].last_step = step
                of_steps, of_values = added.setdefault(name, ([], []))
                of_steps.append(step)
                of_values.append(values)
        except (ValueError, RecursionError) as error:
            reason = str(error) if str(error).isprintable() else ascii(str(error))
            raise UserError(f"{where.format(number)}: damaged line ({reason}); restore the file") from error
    for name, (of_steps, of_values) in added.items():
        columns[name].add(np.array(of_steps), np.array(of_values))


def _metrics_of(line: bytes) -> Iterator[tuple[str, int, NDArray[np.float64]]]:
    """Yield the name, step and values of each metric. Raises ValueError with the key, what was found and what is
    expected."""
    metrics = json.loads(line)
    if type(metrics) is not dict:
        raise ValueError("expected an object")
    step = metrics.pop("step", None)
    if type(step) is not int or not 0 <= step < 2**63:
        raise ValueError(f"step: found {step}, expected a whole number of 0 or more")
    for name, value in _by_name(metrics).items():
        try:
            numbers = _from_json(value)
        except (ValueError, TypeError, OverflowError):
            raise ValueError(f"{name}: expected a number, or lists of them by layer and head") from None
        yield name, step, numbers


def _by_name(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return a line's metrics, those that an older file has under a name for each head as lists under one name."""
    by_name, heads = {}, dict[str, dict[tuple[int, int], Any]]()
    for name, value in metrics.items():
        match name.split("/"):
            case ["layer", layer, "head", head, own]:
                heads.setdefault(own, {})[int(layer), int(head)] = value
            case _:
                by_name[name] = value
    for name, values in heads.items():
        n_layer, n_head = (max(numbers) for numbers in zip(*values, strict=True))
        if len(values) != n_layer * n_head or min(map(min, values)) < 1:
            raise ValueError(f"{name}: expected every head of {n_layer} layers of {n_head}")
        by_name[name] = [[values[layer, head] for head in range(1, n_head + 1)] for layer in range(1, n_layer + 1)]
    return by_name


def _from_json(value: Any) -> NDArray[np.float64]:
    """Return a metric of a JSON line as an array [] or [n_layer, n_head]."""
    if not isinstance(value, list):
        return np.array(_number(value))
    heads = np.array([[_number(number) for number in layer] for layer in value])
    if heads.ndim != 2 or not heads.size:
        raise ValueError("no layers of heads")
    return heads


def _number(value: Any) -> float:
    if type(value) is float or type(value) is int or value in NONFINITE:
        return float(value)
    raise ValueError("no number")


def _to_json(value: float | NDArray[np.floating]) -> Any:
    """Return a value that JSON can hold: NaN and the infinities become strings."""
    if isinstance(value, np.ndarray):
        assert value.ndim == 2, f"{value.shape}, a metric of heads is [n_layer, n_head]"
        return [[_to_json(number) for number in layer] for layer in value.tolist()]
    return value if math.isfinite(value) else str(value)


def _drop_steps_from(path: Path, step: int) -> None:
    """Keep only the lines of steps before ``step``: what a run that goes on from there counts on."""
    with regular(path).open("rb") as lines, atomic_write(path) as partial, partial.open("wb") as kept:
        kept.writelines(line for line in lines if line.endswith(b"\n") and _is_before(line, step))


def _is_before(line: bytes, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] < step)
    except (
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
    ):  # garbled by a power loss: later than anything that a checkpoint counts on
        return False
