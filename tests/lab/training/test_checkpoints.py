"""Checkpoints on disk: what damage is found, what is kept, and that the budget holds."""

from pathlib import Path

import pytest
import torch

from flashpoint.detector import DetectorConfig, ExplosionDetector
from flashpoint.errors import UserError
from flashpoint.lab.config import CheckpointsConfig, Config
from flashpoint.lab.probes.user_probes import ProbesState
from flashpoint.lab.training import checkpoints
from flashpoint.lab.training.checkpoints import CheckpointWriter, State, retained, verified
from flashpoint.lab.training.start import starting_point
from flashpoint.lab.training.tensor_files import Form
from flashpoint.runs.chain import ChainWriter
from flashpoint.runs.folder import RunFolder

TENSORS = {"a": torch.arange(1000, dtype=torch.float32), "b": torch.tensor(3.0)}
FORMS = {name: Form.of(tensor) for name, tensor in TENSORS.items()}


def state(step: int, chain: str = "c") -> State:
    """The loop's, before the detector has a mean loss, of a process without probes."""
    detector = ExplosionDetector(DetectorConfig()).state()
    probes = ProbesState(attention={}, sentinel=None)
    return State(step=step, loss=2.5, val_loss=None, val_step=None, chain=chain, detector=detector, probes=probes)


def record(folder: Path, steps: range, chain: Path | None = None) -> list[str]:
    """Save at every tenth step, of a digest chain if one is to be written; the lines told."""
    lines: list[str] = []
    recorder = CheckpointWriter(folder, CheckpointsConfig(interval=10), 4004, lines.append)
    writer = ChainWriter(chain) if chain else None
    for step in steps:
        if writer:
            writer.append(2.5, 1.0 / step)
        if recorder.due(step):
            recorder.save(TENSORS, state(step, writer.digest) if writer else state(step))
    recorder.wait()
    return lines


def steps_of(folder: Path) -> list[int]:
    lines: list[str] = []
    found = [checkpoint.step for checkpoint in verified(folder, lines.append)]
    assert lines == []
    return found


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    assert record(tmp_path / "c", range(1, 11)) == []
    (checkpoint,) = verified(tmp_path / "c", print)
    tensors, loaded = checkpoint.load_tensors(FORMS, None), checkpoint.load_state()
    assert loaded == state(10)
    assert loaded.detector.minimum == float("inf")
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


def test_saving_copies_before_it_returns(tmp_path: Path) -> None:
    recorder = CheckpointWriter(tmp_path / "c", CheckpointsConfig(interval=1), 400_000, print)
    changing = torch.zeros(100_000)
    recorder.save({"x": changing}, state(1))
    changing.fill_(1.0)
    recorder.wait()
    (checkpoint,) = verified(tmp_path / "c", print)
    assert not checkpoint.load_tensors({"x": Form((100_000,))}, None)["x"].any()


@pytest.mark.parametrize("file", ["step-000000020.safetensors", "step-000000020.json"])
@pytest.mark.parametrize("damage", ["cut", "empty", "missing", "flip first", "flip middle", "flip last"])
def test_every_kind_of_damage_leaves_the_one_before(tmp_path: Path, file: str, damage: str) -> None:
    record(tmp_path / "c", range(1, 21))
    path = tmp_path / "c" / file
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[: len(data) * 2 // 3])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        data[{"first": 0, "middle": len(data) // 2, "last": -3}[damage.split()[1]]] ^= 1
        path.write_bytes(data)
    lines: list[str] = []
    assert [checkpoint.step for checkpoint in verified(tmp_path / "c", lines.append)] == [10]
    without_record = file.endswith("json") and damage == "missing"  # then the file does not count, and is no news
    assert len(lines) == (0 if without_record else 1)


def test_a_checkpoint_past_the_step_that_is_wanted_is_not_read(tmp_path: Path) -> None:
    """All newer ones were read whole to find an early one, and damage in one was told."""
    run = RunFolder(tmp_path)
    record(run.checkpoints, range(1, 31))
    for step in (20, 30):
        (run.checkpoints / f"step-{step:09}.safetensors").write_bytes(b"damaged")
    lines: list[str] = []
    assert [checkpoint.step for checkpoint in verified(run.checkpoints, lines.append, up_to=15)] == [10]
    assert lines == []


def original(folder: Path, steps: range) -> RunFolder:
    """A run to branch from, with its chain."""
    run = RunFolder(folder / "run")
    run.path.mkdir()
    record(run.checkpoints, steps, run.chain)
    return run


def test_a_branch_starts_at_the_step_it_names_or_says_which_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = original(tmp_path, range(1, 31))
    (run.checkpoints / "step-000000030.safetensors").write_bytes(b"damaged")
    assert starting_point(Config(replay="run", from_step=0), FORMS, None, run).step == 0
    assert starting_point(Config(replay="run", from_step=20), FORMS, None, run).step == 20
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match=r"no checkpoint that early \(it has 10, 20, 30\)"):
        starting_point(Config(replay="run", from_step=5), FORMS, None, run)
    with pytest.raises(UserError, match="has no checkpoint; replay it from the start"):
        starting_point(Config(replay="run", from_step=5), FORMS, None, RunFolder(tmp_path / "another"))


def test_a_branch_does_not_start_from_the_checkpoint_of_another_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It trained on, from weights that its original never had."""
    run = original(tmp_path, range(1, 21))
    record(run.checkpoints, range(20, 21))
    assert starting_point(Config(replay="run", from_step=20), FORMS, None, run).step == 10
    assert "step-000000020.safetensors: not of this run's digest chain" in capsys.readouterr().err
    run.chain.unlink()
    with pytest.raises(UserError, match=r"run/chain\.bin: No such file"):  # before the branch has a folder
        starting_point(Config(replay="run", from_step=20), FORMS, None, run)


def test_a_full_disk_is_one_line_and_no_rest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flashpoint.lab.training.checkpoints.save_file", full)
    (line,) = record(tmp_path / "c", range(1, 11))
    assert "checkpoint not written" in line
    assert "No space left" in line
    assert list((tmp_path / "c").iterdir()) == []


@pytest.mark.parametrize("name", ["a copy", "what the disk takes"])
def test_memory_that_does_not_suffice_costs_the_checkpoint_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The first copy of the weights ended the run, some hundred steps after its beginning."""

    def too_much(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory.\nOf 80 GiB")

    owner, function = (torch.Tensor, "clone") if name == "a copy" else (checkpoints, "_to_host")
    with monkeypatch.context() as patched:
        patched.setattr(owner, function, too_much)
        (line,) = record(tmp_path / "c", range(1, 11))
    assert "step-000000010.safetensors: checkpoint not written (out of memory. Of 80 GiB)" in line
    assert list((tmp_path / "c").iterdir()) == []
    assert record(tmp_path / "c", range(1, 11)) == []
    assert steps_of(tmp_path / "c") == [10]


@pytest.mark.slow
def test_the_budget_holds_and_recent_steps_are_dense(tmp_path: Path) -> None:
    config = CheckpointsConfig(interval=10, budget_gib=8.5 * (4004 + 2**16) / 2**30)
    folder = tmp_path / "c"
    recorder = CheckpointWriter(folder, config, 4004, print)
    for step in range(10, 1010, 10):
        recorder.save(TENSORS, state(step))
        recorder.wait()
        assert sum(path.stat().st_size for path in folder.iterdir()) <= config.budget_gib * 2**30
        assert len(list(folder.iterdir())) <= 2 * 8
    assert steps_of(folder)[:2] == [1000, 990]


def test_what_a_kill_or_a_hand_left_takes_no_room_and_stops_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    record(folder, range(1, 51))
    (folder / "step-000000010.safetensors").unlink()  # by hand
    (folder / "step-000000020.json").unlink()  # the kill came between the two
    config = CheckpointsConfig(interval=10, budget_gib=3.5 * (4004 + 2**16) / 2**30)
    lines: list[str] = []
    recorder = CheckpointWriter(folder, config, 4004, lines.append)
    for step in range(60, 100, 10):
        recorder.save(TENSORS, state(step))
        recorder.wait()
        assert sum(path.stat().st_size for path in folder.iterdir()) <= config.budget_gib * 2**30
    assert lines == []
    assert steps_of(folder)[:2] == [90, 80]
    assert len(list(folder.iterdir())) == 2 * len(steps_of(folder))


@pytest.mark.parametrize("capacity", [2, 3, 6, 20])
def test_for_any_age_there_is_a_checkpoint_not_much_older(capacity: int) -> None:
    steps: set[int] = set()
    for newest in range(1, 400):
        steps = retained([*steps, newest], 1, capacity, set())
        assert len(steps) == min(newest, capacity)
        oldest = newest - min(steps)
        assert oldest >= min(2 ** (capacity - 2), newest // 4)
        for age in range(1, oldest + 1):
            assert any(age <= newest - step <= 4 * age for step in steps), (newest, age, steps)


def test_an_explosion_keeps_what_precedes_it(tmp_path: Path) -> None:
    config = CheckpointsConfig(interval=10, budget_gib=8.5 * (4004 + 2**16) / 2**30, precursor_steps=100)
    recorder = CheckpointWriter(tmp_path / "c", config, 4004, print)
    before: list[int] = []
    for step in range(10, 1010, 10):
        recorder.save(TENSORS, state(step))
        recorder.wait()
        if step == 500:
            before = steps_of(tmp_path / "c")
            recorder.pin(481)
    kept = steps_of(tmp_path / "c")
    assert max(step for step in before if step <= 481) in kept
    assert max(step for step in before if step <= 381) in kept
    assert 1000 in kept
