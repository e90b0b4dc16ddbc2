"""A disk that fills up while a loop is watched: what is written stays, and what is missing is told."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashpoint
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.errors import UserError
from flashpoint.watching.captures import read_calls
from flashpoint.watching.loop import Watch
from tests.watching.loops import loop, plain


@pytest.mark.parametrize("last", ["manifest.json", "config.json", "metrics.jsonl"])
def test_a_disk_that_is_full_at_once_leaves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """Half a run kept its name, and was listed."""
    replace, opened = Path.replace, Path.open

    def full(path: Path) -> None:
        if path.name == last:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def replace_until_full(partial: Path, target: Path) -> Path:
        full(Path(target))
        return replace(partial, target)

    def open_until_full(path: Path, *given: Any, **named: Any) -> Any:
        full(path)
        return opened(path, *given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace_until_full)
        patched.setattr(Path, "open", open_until_full)
        with pytest.raises(ValueError, match=r"^runs_dir=.*: No space left on device; free space, or choose another"):
            flashpoint.watch(nn.Linear(2, 2), runs_dir=tmp_path, name="own")
    assert not list(tmp_path.iterdir())


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
    assert "watch own: step 1: writing a capture failed (OSError: [Errno 28] No space left" in capsys.readouterr().err
    assert [call.layer for call in read_calls(tmp_path / "own")] == [1]
    assert "captures/step-0000001: layers 2 are missing: the disk was full" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "own/captures/step-0000001")
    with pytest.raises(UserError, match="the captures of steps 3 hold nothing: the disk was full"):
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


def test_a_batch_that_cannot_be_kept_does_not_cost_the_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the tensors nor the errors of δ that follow them, nor is a part of a file left."""

    def full(_: Any, path: Path) -> None:
        path.write_bytes(b"PK")
        raise OSError(errno.ENOSPC, "No space left on device")

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 1:
            watched.capture(sequences=6)
        plain(model, number, watched)

    monkeypatch.setattr("torch.save", full)
    loop(tmp_path, step=step)
    told = capsys.readouterr().err
    assert "keeping the batch failed (OSError: [Errno 28] No space left on device" in told
    assert "δ of 2 layers was measured on 6 sequences" in told
    names = sorted(path.name for path in (tmp_path / "own/captures/step-0000001").iterdir())
    assert names == ["delta.jsonl", "layer-01.safetensors", "layer-02.safetensors"]


def test_a_nan_of_a_loop_without_attention_and_batch_leaves_no_empty_capture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its diagnosis says why nothing was recorded, and nothing of a disk."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        loss = model(torch.randn(3, 32)).square().mean()
        loss.backward()
        watched.step(loss * float("nan") if number == 2 else loss)

    loop(tmp_path, nn.Linear(32, 32), step)
    assert "step 2: loss nan" in capsys.readouterr().err
    assert not (tmp_path / "own/captures").exists()
    with pytest.raises(UserError, match="its attention was not recorded"):
        read_calls(tmp_path / "own")
