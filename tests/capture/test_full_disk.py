"""A disk that fills up while a loop is watched: what is written stays, and what is missing is told."""

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from flashpoint.capture.captures import read_calls
from flashpoint.capture.watched import Watch
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.errors import UserError
from tests.capture.loops import loop, plain


def test_a_capture_that_the_disk_had_no_room_for_is_told_when_it_is_diagnosed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two layers the first was written: the second was missing without a word, and without any there was "no capture
    made"."""
    write, room = AttentionCall.write, iter([True, False, False])

    def until_full(call: AttentionCall, path: Path) -> None:
        if not next(room):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(call, path)

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number in (1, 3):
            watched.capture(sequences=0)
        plain(model, number, watched)

    monkeypatch.setattr(AttentionCall, "write", until_full)
    loop(tmp_path, step=step)
    assert "watch: step 1: writing a capture failed (OSError: [Errno 28] No space left" in capsys.readouterr().err
    assert [call.layer for call in read_calls(tmp_path / "own")] == [1]
    assert "captures/step-0000001: layers 2 are missing: the disk was full" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "own/captures/step-0000001")
    with pytest.raises(UserError, match="nothing was written of the captures of steps 3; free space"):
        read_calls(tmp_path / "own")


def test_the_verdict_is_written_where_the_metrics_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of metrics may be as large as a quota lets it be; the verdict is another file."""

    def full(*_: Any) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr("flashpoint.runs.metrics.MetricsFile.close", full)
    assert loop(tmp_path).verdict == "stable to 4"
    assert "File too large" in capsys.readouterr().err
