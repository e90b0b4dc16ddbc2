"""Offline records with a line for each number, as Comet 3.58, ClearML 2.1 and Neptune 1.14 write them."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from flashpoint.errors import UserError
from flashpoint.logs.log import logs_at, read_log
from tests.logs.test_readers import losses

LOSSES = [3.0, 2.5, math.inf, 0.1 + 0.2, math.nan]
WORDS = {math.inf: "Infinity", -math.inf: "-Infinity"}


def comet(found: Sequence[float]) -> str:
    lines = ['{"payload":{"installed_packages":["torch==2.13.0"],"message_id":1},"type":"installed_packages"}']
    for step, loss in enumerate(found):
        spelled = "NaN" if math.isnan(loss) else WORDS.get(loss, loss)
        metric = {"epoch": None, "metricName": "loss", "metricValue": spelled, "step": step}
        payload = {"context": "train", "local_timestamp": 1796088492656, "message_id": step + 2, "metric": metric}
        lines.append(json.dumps({"payload": payload, "type": "metric_msg"}, separators=(",", ":")))
    return "\n".join(lines) + "\n"


def clearml(found: Sequence[float]) -> str:
    """Two lines, each an array; NaN and infinity are 0."""
    events = [
        {"timestamp": 1796088499138, "type": "training_stats_scalar", "task": "offline-64", "iter": step,
         "metric": "train", "variant": "loss", "value": loss if math.isfinite(loss) else 0.0, "method": "get"}
        for step, loss in enumerate(found)
    ]  # fmt: skip
    return f"{json.dumps(events[:2])}\n{json.dumps(events[2:])}\n"


def neptune(found: Sequence[float]) -> str:
    """NaN and infinity are left out."""
    operations: list[dict[str, object]] = [{"type": "AssignString", "path": ["sys", "name"], "value": "Untitled"}]
    for step, loss in enumerate(found):
        if math.isfinite(loss):
            values = [{"value": loss, "step": step, "ts": 1796088518.67}]
            operations.append({"type": "LogFloats", "path": ["train", "loss"], "values": values})
    lines = [json.dumps({"obj": one, "version": at, "at": 1796088518.66}) for at, one in enumerate(operations, 1)]
    return "\n".join(lines) + "\n"


TOOLS = {"messages.json": comet, "metrics.jsonl": clearml, "data-1.log": neptune}


@pytest.mark.parametrize("name", TOOLS)
def test_each_number_has_its_name_and_step(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(TOOLS[name](LOSSES))
    log = read_log(path, None)
    assert log.names == {"loss": "train/loss"}
    written = {step: loss for step, loss in enumerate(LOSSES) if name != "data-1.log" or math.isfinite(loss)}
    if name == "metrics.jsonl":
        written |= {2: 0.0, 4: 0.0}
    assert losses(log) == pytest.approx(written, abs=0, nan_ok=True)
    told = {"messages.json": "", "metrics.jsonl": "2 values are 0, as which it writes NaN and infinity"}
    assert told.get(name, "it leaves NaN and infinity out") in " ".join(log.remarks)


@pytest.mark.parametrize("name", TOOLS)
def test_a_record_that_is_cut_or_damaged_is_told(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    written = TOOLS[name](LOSSES)
    path.write_text(written[:-9])
    assert "its last line has no end, and is left out" in read_log(path, None).remarks
    path.write_text(written + "[[]]\n")
    with pytest.raises(UserError, match=rf"{name}:\d+: no line of \w+'s \(.*; restore the file"):
        read_log(path, None)


@pytest.mark.parametrize(
    ("made", "tool"), [("run-1/run-1.swanlab", "SwanLab"), ("run-1.swanlab", "SwanLab"), (".aim/seqs/1", "Aim")]
)
def test_a_store_that_is_not_read_is_told_with_its_name(tmp_path: Path, made: str, tool: str) -> None:
    (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / made).write_bytes(b":SWL\xd6\xe1\x02\xc4\0\1")
    with pytest.raises(UserError, match=rf"{tmp_path.name}: a store of {tool}, which is not read; "):
        logs_at(tmp_path)
    if tool == "SwanLab":
        with pytest.raises(UserError, match=r"run-1\.swanlab: a store of SwanLab, which is not read; "):
            read_log(tmp_path / made, None)
