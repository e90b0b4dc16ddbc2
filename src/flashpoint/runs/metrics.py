"""The metrics file of a run: the only place that knows its format.

One JSON object a line, each with its ``step`` (from 0). A metric of the run is a number, a metric of heads a list of
layers, each a list of heads. NaN and infinities are strings, which ``float`` reads. Files of older runs name each head:
``"layer/2/head/3/NAME": 0.5`` (from 1); they read the same.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.files import atomic_write, regular, whole_lines
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
    lines = regular(path).read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    return sum(f'"{LOSS.name}": ' in line and _is_before(line, until) for line in lines)


def read_metrics(path: Path) -> Columns:
    """Return the columns of a metrics file, compressed or not, without a last line that a kill cut short.

    Raises:
        UserError: the file is missing or its compression damaged, or a line is, with its number.
    """
    columns: dict[str, tuple[list[int], list[NDArray[np.float64]]]] = {}
    for number, line in enumerate(whole_lines(path, "give a run that has metrics"), 1):
        try:
            _add(columns, line)
        except (ValueError, RecursionError) as error:
            reason = str(error) if str(error).isprintable() else ascii(str(error))
            raise UserError(f"{path}:{number}: damaged line ({reason}); restore the file") from error
    return {name: (np.array(steps), _last_axis_steps(values)) for name, (steps, values) in columns.items()}


def _add(columns: dict[str, tuple[list[int], list[NDArray[np.float64]]]], line: bytes) -> None:
    """Add what a line holds. Raises ValueError with the key, what was found and what is expected."""
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
        if name not in columns:
            if numbers.ndim and name in OF_THE_RUN:
                raise ValueError(f"{name}: found a list, expected a number")
            columns[name] = ([], [])
        steps, values = columns[name]
        if steps and (numbers.shape != values[0].shape or step < steps[-1]):
            raise ValueError(f"{name}: other heads than before, or an earlier step")
        steps.append(step)
        values.append(numbers)


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


def _last_axis_steps(values: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.ascontiguousarray(np.moveaxis(np.array(values), 0, -1))


def _drop_steps_from(path: Path, step: int) -> None:
    """Keep only the lines of steps before ``step``: what a run that goes on from there counts on."""
    *lines, _unfinished = regular(path).read_text(encoding="utf-8", errors="replace").split("\n")
    with atomic_write(path) as partial:
        partial.write_text("".join(f"{line}\n" for line in lines if _is_before(line, step)), encoding="utf-8")


def _is_before(line: str, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] < step)
    except (
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
    ):  # garbled by a power loss: later than anything that a checkpoint counts on
        return False
