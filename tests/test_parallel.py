"""Several processes, started by ``torchrun`` as a user would: same number of processes, same bits."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, TINY, Command, environment


def torchrun(folder: Path, text_file: Path, *arguments: str, tiny: bool = True) -> "subprocess.CompletedProcess[str]":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    preset = [*TINY, f"data.path={text_file}"] if tiny else []
    command = [*launcher, str(REPOSITORY / "train.py"), *preset, *arguments]
    return subprocess.run(
        command, cwd=folder, env={**environment(), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )


def outcome(folder: Path, name: str) -> dict:
    value: dict = json.loads((folder / f"runs/{name}/outcome.json").read_text())
    return value


@pytest.fixture(scope="module")
def two(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    result = torchrun(folder, text_file, "train.threads=1", "checkpoints.interval=5", "run_name=two")
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("outcome=")]
    assert "outcome=stable step=12" in line
    return folder


def test_two_processes_repeat_themselves_and_resume(two: Path, text_file: Path) -> None:
    again = torchrun(two, text_file, "replay=two", "run_name=again", tiny=False)
    assert again.returncode == 0, again.stderr
    assert "equal to runs/two, bit for bit, over 12 steps" in again.stderr
    (two / "runs/again/outcome.json").unlink()  # as if killed after its last checkpoint
    resumed = torchrun(two, text_file, "resume=again", tiny=False)
    assert resumed.returncode == 0, resumed.stderr
    assert outcome(two, "two")["digest"] == outcome(two, "again")["digest"]


def test_they_train_on_the_batches_of_one_process(two: Path, text_file: Path, train: Command) -> None:
    one = train("train.micro_batch_size=2", "run_name=one", "train.threads=1", cwd=two)
    assert one.returncode == 0, one.stderr
    losses = [
        [json.loads(line)["loss"] for line in (two / f"runs/{name}/metrics.jsonl").open() if '"loss"' in line]
        for name in ("two", "one")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)


def test_another_number_of_processes_is_one_line(two: Path, train: Command) -> None:
    result = train("replay=two", tiny=False, cwd=two)
    assert result.returncode == 2
    assert "recorded by 2 processes, here are 1; start as many (torchrun)" in result.stderr
