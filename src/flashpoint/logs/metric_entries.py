"""Offline records of Comet, ClearML and Neptune: a line of JSON for each number, with its name and step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flashpoint.errors import UserError
from flashpoint.logs.record import Record, number_of, record_of

_Entry = tuple[str, object, object]
"""Name, step and value, as they were written."""


def is_entries(head: bytes) -> bool:
    """Whether a file that begins so is one."""
    return _tool(head) is not None


def read_entries(path: Path) -> Record:
    """Return the numbers of a file. A last line without its end is left out.

    Raises:
        UserError: a line is no JSON, or is not the tool's.
    """
    content = path.read_bytes()
    tool = _tool(content)
    assert tool is not None, path
    name, entries = tool
    *lines, unfinished = content.split(b"\n")
    remarks = ["its last line has no end, and is left out"] if unfinished else []
    metrics = list[tuple[str, object, float]]()
    for number, line in enumerate(lines, 1):
        try:
            found = list(entries(json.loads(line))) if line.strip() else []
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{path}:{number}: no line of {name}'s ({error}); restore the file") from error
        metrics += [(one, step, read) for one, step, value in found if (read := number_of(value)) is not None]
    zeros = sum(value == 0 for _, _, value in metrics)
    if name == "ClearML" and zeros:
        remarks.append(f"{zeros:,} values are 0, as which it writes NaN and infinity: its console's log says if it did")
    if name == "Neptune":
        remarks.append("it leaves NaN and infinity out")
    return record_of(name, metrics, remarks)


def _comet(message: Mapping[str, Any]) -> Iterator[_Entry]:
    if message["type"] == "metric_msg":
        payload = message["payload"]
        metric, context = payload["metric"], payload.get("context")
        name = f"{context}/{metric['metricName']}" if context else metric["metricName"]
        yield name, metric["step"], metric["metricValue"]


def _clearml(events: list[Mapping[str, Any]]) -> Iterator[_Entry]:
    for event in events:
        if event["type"] == "training_stats_scalar":
            metric, variant = event["metric"], event["variant"]
            yield metric if metric == variant else f"{metric}/{variant}", event["iter"], event["value"]


def _neptune(operation: Mapping[str, Any]) -> Iterator[_Entry]:
    assigned = operation["obj"]
    if assigned["type"] == "LogFloats":
        for one in assigned["values"]:
            yield "/".join(assigned["path"]), one["step"], one["value"]


_TOOLS: dict[bytes, tuple[str, Callable[[Any], Iterator[_Entry]]]] = {
    b'{"payload":{': ("Comet", _comet),
    b'[{"timestamp": ': ("ClearML", _clearml),
    b'{"obj": {"type": ': ("Neptune", _neptune),
}
"""By what a file begins with."""


def _tool(head: bytes) -> tuple[str, Callable[[Any], Iterator[_Entry]]] | None:
    return next((tool for mark, tool in _TOOLS.items() if head.startswith(mark)), None)
