"""Which of several processes watches, and tells what there is to be told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

import flashpoint
from flashpoint.errors import notify
from flashpoint.watching.loop import Watch
from tests.conftest import environment
from tests.watching.loops import Pair, loop, plain


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


def test_a_forked_process_writes_nothing_into_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It has the same open files: a second one that logs, and writes a verdict, would spoil the run."""

    def forking(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 2:
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    watched.capture()
                    watched.step(0.5)  # a forked process may not compute: it has no threads for it
                    watched.step(0.25)
                    watched.__exit__(SystemExit, SystemExit(), None)  # as at the end of the block
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
            assert not (tmp_path / "own/outcome.json").exists()
        plain(model, number, watched)

    run = loop(tmp_path, step=forking, log_interval=1)
    alone = loop(tmp_path / "alone", log_interval=1)
    assert run.columns["loss"][0].tolist() == alone.columns["loss"][0].tolist() == [0, 1, 2, 3]
    assert run.columns["row_sum_relative_bias"][0].tolist() == [0, 1, 2, 3]
    assert (tmp_path / "own/batches.csv").read_text() == (tmp_path / "alone/own/batches.csv").read_text()
    assert not (tmp_path / "own/captures").exists()
    assert (
        capfd.readouterr().err.count(f"was forked from the one that watches, {os.getpid()}: what it does is not") == 1
    )


PROGRAM = """
import sys, torch, flashpoint
from torch.utils.data import DataLoader, TensorDataset
how, context = sys.argv[1:]
model = torch.nn.Linear(4, 1)
if how != "in the function":
    watched = flashpoint.watch(model, runs_dir="runs", name="own")
def train(watched, batches):
    with watched:
        for (x,) in batches:
            loss = model(x).square().mean()
            loss.backward()
            watched.step(loss)
def train_in_a_process():
    if how == "in the function":
        train(flashpoint.watch(model, runs_dir="runs", name="own"), [(torch.ones(2, 4),)] * 3)
    else:
        train(watched, [(torch.ones(2, 4),)] * 3)
if how == "worker":
    data = TensorDataset(torch.ones(6, 4))
    loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context=context)
if __name__ == "__main__" and how == "worker":
    train(watched, loader)
elif __name__ == "__main__":
    process = torch.multiprocessing.get_context(context).Process(target=train_in_a_process)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
@pytest.mark.parametrize("how", ["worker", "in the function", "beside the function"])
def test_a_started_process_that_imports_the_program_makes_no_second_run(tmp_path: Path, how: str, context: str) -> None:
    """Workers of a DataLoader do so from Python 3.14 on; a process that trains may be a child, too, and is watched."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", how, context]
    ran = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["own"]
    recorded = (tmp_path / "runs/own/metrics.jsonl").read_text().count('"loss"')
    assert recorded == (0 if how == "beside the function" else 3)
    assert ran.stderr.count("its steps are not recorded") == (1 if how == "beside the function" else 0)
