"""Which of several processes watches, and tells what there is to be told."""

from pathlib import Path

import pytest
import torch.distributed as dist

import flashpoint
from flashpoint.errors import notify
from tests.capture.loops import Pair


def be_of_two(monkeypatch: pytest.MonkeyPatch, rank: int, variable: str) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setenv("RANK", variable)


@pytest.mark.parametrize("variable", ["0", "1", ""])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_process_group_tells_which_process_is_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, variable: str
) -> None:
    be_of_two(monkeypatch, rank, variable)
    if not variable:
        monkeypatch.delenv("RANK")
    run = flashpoint.watch(Pair(), runs_dir=tmp_path).run
    notify("something")
    assert (run is None) == (not list(tmp_path.iterdir())) == (rank == 1)
    assert capsys.readouterr().err == ("something\n" if rank == 0 else "")


@pytest.mark.parametrize("variable", ["0", "1"])
def test_before_they_join_the_variable_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("RANK", variable)
    assert (flashpoint.watch(Pair(), runs_dir=tmp_path).run is None) == (variable == "1")
