"""A loop that changes its working directory: its run stays where it began."""

import os
from pathlib import Path

import pytest
from torch import nn

from flashpoint.runs.folder import RunFolder
from flashpoint.watching.loop import Watch
from tests.watching.loops import loop, plain


def test_the_run_of_a_loop_that_changes_its_working_directory_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Captures, verdict and what it learns of the model went to, or were missed at, another place."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def moving(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 1:
            os.chdir("elsewhere")
            watched.capture()
        plain(model, number, watched)

    def staying(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 1:
            watched.capture()
        plain(model, number, watched)

    def files(run: Path) -> list[str]:
        return sorted(str(path.relative_to(run)) for path in run.rglob("*"))

    with pytest.raises(Exception, match="no run there"):  # nor does the loop find it by its old name
        loop(Path("runs"), step=moving, log_interval=1)
    moved = capfd.readouterr().err
    monkeypatch.chdir(tmp_path)
    loop(Path("still"), step=staying, log_interval=1)
    still = capfd.readouterr().err
    assert files(Path("runs/own")) == files(Path("still/own"))
    assert RunFolder(Path("runs/own")).read_outcome().step == 4
    assert not list((tmp_path / "elsewhere").iterdir())
    assert "flashpoint diagnose still/own/captures/step-0000001" in still  # short where it is understood
    assert f"flashpoint diagnose {tmp_path}/runs/own/captures/step-0000001" in moved
