"""Several processes, the first two started by ``torchrun`` as a user would: same number of processes, same bits."""

import json
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run as distributed
from safetensors.torch import load_file

from flashpoint.lab.config import Config, DataConfig, ModelConfig, TrainConfig
from flashpoint.lab.data.tape import Tape
from flashpoint.lab.training import plan
from flashpoint.lab.training.parallel import Ranks
from flashpoint.lab.training.prepared_run import prepare_run
from tests import warm
from tests.conftest import ASCII, Command, environment, train_command, wait_until

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def torchrun(folder: Path, text_file: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """The launcher begins with its imports done, the two processes as a user's in an ASCII locale."""
    launcher = [sys.executable, distributed.__file__, "--nproc-per-node=2", f"--master-port={free_port()}"]
    command = [*launcher, *train_command(*arguments, tiny=True, text_file=text_file)[1:]]
    return warm.run(command, cwd=folder, env={**environment(), **ASCII, "OMP_NUM_THREADS": "1"}, timeout=120)


def two_begun(folder: Path, text_file: Path, *arguments: str) -> list[warm.Process]:
    """Started with the variables that ``torchrun`` sets, but with the imports done."""
    command = train_command(*arguments, tiny=False, text_file=text_file)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    return [
        warm.Process(command, cwd=folder, env={**environment(), **shared, "RANK": rank, "LOCAL_RANK": rank})
        for rank in "01"
    ]


def told_by(processes: list[warm.Process]) -> str:
    try:
        return "".join(process.communicate(timeout=120)[1] for process in processes)
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)


def two_processes(folder: Path, text_file: Path, *arguments: str) -> str:
    """What they tell."""
    processes = two_begun(folder, text_file, *arguments)
    told = told_by(processes)
    assert [process.returncode for process in processes] == [0, 0], told
    return told


def outcome(folder: Path, name: str) -> dict:
    value: dict = json.loads((folder / f"runs/{name}/outcome.json").read_text())
    return value


@pytest.fixture(scope="module")
def two(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    shift = "model.shift_keys=running"  # whose means all processes hold, of the whole batch
    result = torchrun(folder, text_file, "train.threads=1", "checkpoints.interval=5", shift, "run_name=two")
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("outcome=")]
    assert "outcome=stable step=12" in line
    return folder


def test_no_collective_waits_for_the_data(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL gives one up after ten minutes, and preparing OpenWebText takes longer."""

    def collective(*_: object) -> None:
        raise AssertionError

    for name in ("barrier", "all_reduce", "broadcast"):
        monkeypatch.setattr(dist, name, collective)
    monkeypatch.setattr(plan, "fix_numerics", lambda *_: None)  # which outlasts the test
    config = Config(
        runs_dir=str(tmp_path / "runs"),
        model=ModelConfig(n_layer=1, n_head=1, d_model=16, context=16, vocab_size=300),
        data=DataConfig(source="text", path=str(text_file), root=str(tmp_path), vocab_size=300, val_fraction=0.1),
        train=TrainConfig(batch_size=2, device="cpu"),
    )
    prepare_run(plan.settle(config, None, Ranks(rank=1, world=2), torch.device("cpu")))
    assert list(tmp_path.glob("text-*/train.bin"))


def test_two_processes_repeat_themselves_and_resume(two: Path, text_file: Path) -> None:
    """Also in another locale."""
    told = two_processes(two, text_file, "replay=two", "run_name=again")
    assert "equal to runs/two, bit for bit, over 12 steps" in told
    (two / "runs/again/outcome.json").unlink()  # as if killed after its last checkpoint
    two_processes(two, text_file, "resume=again")
    assert outcome(two, "two")["digest"] == outcome(two, "again")["digest"]


def test_a_signal_to_one_process_is_in_the_verdict_of_all(two: Path, text_file: Path) -> None:
    """Where the first process had none, a run that was stopped said that it was stable."""
    processes = two_begun(two, text_file, "replay=two", "train.steps=100000", "run_name=signalled")
    metrics = two / "runs/signalled/metrics.jsonl"
    wait_until(lambda: metrics.is_file() and metrics.stat().st_size, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    told = told_by(processes)
    assert [process.returncode for process in processes] == [128 + signal.SIGTERM] * 2, told
    assert outcome(two, "signalled")["interrupted"] == "SIGTERM"


def test_they_train_on_the_batches_of_one_process(two: Path, text_file: Path, train: Command) -> None:
    settings = "train.micro_batch_size=2", "train.threads=1", "model.shift_keys=running", "checkpoints.interval=5"
    one = train(*settings, "run_name=one", cwd=two)
    assert one.returncode == 0, one.stderr
    states = [load_file(two / f"runs/{name}/checkpoints/step-000000010.safetensors") for name in ("two", "one")]
    shifts = [{key: mean for key, mean in state.items() if key.endswith("key_mean")} for state in states]
    assert shifts[0].keys() == shifts[1].keys() != set()
    for key, mean in shifts[1].items():
        assert mean.count_nonzero()
        assert shifts[0][key].equal(mean)  # two processes or two micro-batches: two addends have one sum in any order
    losses = [
        [json.loads(line)["loss"] for line in (two / f"runs/{name}/metrics.jsonl").open() if '"loss"' in line]
        for name in ("two", "one")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)


def test_another_number_of_processes_is_one_line(two: Path, train: Command) -> None:
    result = train("replay=two", tiny=False, cwd=two)
    assert result.returncode == 2
    assert "recorded by 2 processes, here are 1; start as many (torchrun), or" in result.stderr


def test_if_allowed_another_number_keeps_the_global_batches(two: Path, text_file: Path, train: Command) -> None:
    change = "allow_world_size_change=true"
    replayed = train("replay=two", change, "run_name=on_one", tiny=False, cwd=two)
    assert replayed.returncode == 0, replayed.stderr
    assert "recorded by 2 processes, here are 1: the same global batches in the same order" in replayed.stderr
    shutil.copytree(two / "runs/two", two / "runs/resumed")
    (two / "runs/resumed/outcome.json").unlink()
    for later in (two / "runs/resumed/checkpoints").glob("step-00000001*"):
        later.unlink()
    resumed = train("resume=resumed", change, tiny=False, cwd=two)
    assert resumed.returncode == 0, resumed.stderr
    tapes = {name: Tape.read(two / f"runs/{name}/tape.bin") for name in ("two", "on_one", "resumed")}
    for name in ("on_one", "resumed"):
        assert tapes[name].header.shape == (2, 1, 2)
        assert tapes[name].records.tolist() == tapes["two"].records.reshape(-1, 2, 1, 2).tolist()
        assert outcome(two, name)["loss"] == pytest.approx(outcome(two, "two")["loss"], rel=1e-3)
    manifest = json.loads((two / "runs/resumed/manifest.json").read_text())
    assert [(entry["step"], entry["processes"]) for entry in manifest["resumed"]] == [(5, 1)]
    two_processes(two, text_file, "replay=on_one", change, "run_name=back")
    assert Tape.read(two / "runs/back/tape.bin").digest == tapes["two"].digest
