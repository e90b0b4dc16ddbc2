"""A sweep in this process, by Hydra's launcher with what this package adds to it."""

import signal
import weakref
from pathlib import Path

import pytest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from flashpoint.errors import UserError
from flashpoint.files import is_locked
from flashpoint.lab.training.interrupt import StopRequests
from flashpoint.runs.folder import sweep_lock
from hydra_plugins.flashpoint_launcher.basic import BasicLauncher


def launch(runs_dir: Path, runs: int = 3) -> None:
    launcher = BasicLauncher()
    launcher.config = OmegaConf.create({"runs_dir": str(runs_dir)})
    launcher.launch([["train.steps=3", f"seed={seed}"] for seed in range(runs)], 0)


def completed() -> list[JobReturn]:
    result = JobReturn()
    result.status = JobStatus.COMPLETED
    return [result]


def test_a_failed_run_of_a_sweep_in_this_process_is_let_go_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its error held its frames, and with them the model, while the other runs trained."""

    class Model: ...

    models, alive = list[weakref.ref[Model]](), list[int]()

    def fails() -> None:
        model = Model()
        models.append(weakref.ref(model))
        try:
            raise UserError("the memory is full") from ValueError(str(model))
        except UserError as error:
            raise error from error  # as the command does with what is told in one line already

    def launch_one(*_: object) -> list[JobReturn]:
        alive.append(sum(model() is not None for model in models))
        result = JobReturn()
        result.status = JobStatus.FAILED
        try:
            fails()
        except UserError as error:
            result.return_value = error
        return [result]

    monkeypatch.setattr(BasicLauncher.__mro__[1], "launch", launch_one)
    with pytest.raises(UserError, match="3 of 3 runs failed"):
        launch(tmp_path)
    assert alive == [0, 0, 0]


def test_a_stopped_sweep_names_the_runs_that_were_not_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def stopped(*_: object) -> list[JobReturn]:
        raise SystemExit(130)

    monkeypatch.setattr(BasicLauncher.__mro__[1], "launch", stopped)
    with pytest.raises(SystemExit):
        launch(tmp_path)
    assert capsys.readouterr().err == (
        "not begun: 2 of the sweep's runs (seed=1, seed=2); a sweep with hydra/launcher=gpus goes on where it was "
        "stopped\n"
    )


@pytest.mark.parametrize(("told", "left"), [("", ["seed=1", "seed=2"]), ("resume=RUN goes on with it", ["seed=2"])])
def test_ctrl_c_between_two_runs_promises_no_going_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, told: str, left: list[str]
) -> None:
    """The same command trains every run anew. A run that trained says itself how it goes on."""
    begun = list[object]()

    def launch_one(*_: object) -> list[JobReturn]:
        begun.append(None)
        if len(begun) == 2:
            raise KeyboardInterrupt(*filter(None, [told]))
        return completed()

    monkeypatch.setattr(BasicLauncher.__mro__[1], "launch", launch_one)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        launch(tmp_path)
    assert str(interrupt.value) == (told or "the runs that have ended stay; the same command would train them again")
    assert f"not begun: {len(left)} of the sweep's runs ({', '.join(left)})" in capsys.readouterr().err


def test_a_sweep_is_seen_to_go_on_until_its_last_run_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also one that another launcher of the same folder outlived, and one whose folder takes no lock runs."""
    lock, seen = sweep_lock(tmp_path), list[bool | None]()

    def launch_one(*_: object) -> list[JobReturn]:
        if not seen:
            seen.append(is_locked(lock))
            launch(tmp_path, 1)
        seen.append(is_locked(lock))
        return completed()

    monkeypatch.setattr(BasicLauncher.__mro__[1], "launch", launch_one)
    launch(tmp_path)
    assert seen == [True] * 5
    assert is_locked(lock) is False
    (tmp_path / "file").touch()
    launch(tmp_path / "file")
    assert len(seen) == 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_last_step_of_a_run_ends_the_sweep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, number: signal.Signals
) -> None:
    """The run took it for its own, had its verdict already, and the next one began."""
    begun = list[object]()

    def launch_one(*_: object) -> list[JobReturn]:
        begun.append(None)
        if len(begun) == 2:
            with StopRequests("ending after this step"):
                signal.raise_signal(number)
        return completed()

    monkeypatch.setattr(BasicLauncher.__mro__[1], "launch", launch_one)
    with pytest.raises(SystemExit) as end:
        launch(tmp_path)
    assert (end.value.code, len(begun)) == (128 + number, 2)
    assert "not begun: 1 of the sweep's runs (seed=2)" in capsys.readouterr().err
    begun.clear()
    launch(tmp_path, 2)  # with the last run the sweep is whole
    assert len(begun) == 2
