"""A sweep in this process, one after the other."""

import functools
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from flashpoint.errors import UserError
from flashpoint.files import is_locked
from flashpoint.lab.cli import composition
from flashpoint.lab.training.interrupt import StopRequests
from flashpoint.runs.folder import sweep_lock
from hydra_plugins.flashpoint_launcher.sequential import SequentialLauncher
from tests.composed import CONFIGS
from tests.records import write_run

Task = Callable[[DictConfig], None]
SWEEP = "of_this_test"
pytestmark = pytest.mark.usefixtures("logging_as_before")


@pytest.fixture(autouse=True)
def _named_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_SWEEP", SWEEP)


class Callbacks:
    """Hydra's, which a user's configuration may name."""

    def on_job_start(self, **_: object) -> None: ...

    def on_job_end(self, **_: object) -> None: ...


@functools.cache
def composed() -> DictConfig:
    composition.store_schema()
    with initialize_config_dir(str(CONFIGS), version_base=composition.VERSION):
        return compose(composition.CONFIG, ["experiment=laptop"], return_hydra_config=True)


def launch(task: Task, runs_dir: Path, runs: int = 3, *shared: str) -> None:
    def load(config: DictConfig, overrides: list[str]) -> DictConfig:
        own: Any = OmegaConf.merge(config, OmegaConf.from_dotlist(overrides))
        return own

    launcher = SequentialLauncher()
    loader = SimpleNamespace(load_sweep_config=load)
    context: Any = SimpleNamespace(config_loader=loader, callbacks=Callbacks())
    config = composed().copy()
    config.runs_dir = str(runs_dir)
    launcher.setup(hydra_context=context, task_function=task, config=config)
    launcher.launch([["train.steps=3", *shared, f"seed={seed}"] for seed in range(runs)], 0)


def test_a_failed_run_of_a_sweep_in_this_process_is_let_go_of(tmp_path: Path) -> None:
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

    def task(_: DictConfig) -> None:
        alive.append(sum(model() is not None for model in models))
        fails()

    with pytest.raises(UserError, match="3 of 3 runs failed"):
        launch(task, tmp_path / "runs")
    assert alive == [0, 0, 0]
    assert not list(tmp_path.iterdir())  # none of them was a run


def test_the_runs_are_composed_one_after_the_other_in_their_order(tmp_path: Path) -> None:
    seen = list[tuple[int, int]]()
    launch(lambda config: seen.append((config.seed, config.train.steps)), tmp_path)
    assert seen == [(0, 3), (1, 3), (2, 3)]


def test_runs_are_called_by_what_they_differ_in_and_find_the_run_that_they_replay(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """They lay in the folder of all runs, under the time at which they began."""
    write_run(tmp_path / "original", {"name": "flash_bf16"})
    seen = list[tuple[str, str, str]]()

    def task(config: DictConfig) -> None:
        seen.append((config.runs_dir, config.run_name, config.replay))
        write_run(Path(config.runs_dir, config.run_name), {"name": "flash_bf16"}, seed=config.seed)

    launch(task, tmp_path, 2, "replay=original")
    sweep = str(tmp_path / SWEEP)
    assert seen == [(sweep, f"seed-{seed}", str(tmp_path / "original")) for seed in range(2)]
    told = capsys.readouterr().err.splitlines()
    assert told[:2] == ["run 1 of 2: seed=0", "run 2 of 2: seed=1"]
    assert any("`flash_bf16`" in line and "0 of 2" in line for line in told)
    assert told[-1] == f"next: flashpoint report {sweep}"


def test_a_stopped_sweep_names_the_runs_that_were_not_begun(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def stopped(_: object) -> None:
        raise SystemExit(130)

    with pytest.raises(SystemExit):
        launch(stopped, tmp_path)
    assert capsys.readouterr().err.removeprefix("run 1 of 3: seed=0\n") == (
        "not begun: 2 of the sweep's runs (seed=1, seed=2); a sweep with hydra/launcher=gpus goes on where it was "
        "stopped\n"
    )


@pytest.mark.parametrize(("told", "left"), [("", ["seed=1", "seed=2"]), ("resume=RUN goes on with it", ["seed=2"])])
def test_ctrl_c_between_two_runs_promises_no_going_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, told: str, left: list[str]
) -> None:
    """The same command trains every run anew. A run that trained says itself how it goes on."""
    begun = list[object]()

    def task(_: object) -> None:
        begun.append(None)
        if len(begun) == 2:
            raise KeyboardInterrupt(*filter(None, [told]))

    with pytest.raises(KeyboardInterrupt) as interrupt:
        launch(task, tmp_path)
    assert str(interrupt.value) == (told or "the runs that have ended stay; the same command would train them again")
    assert f"not begun: {len(left)} of the sweep's runs ({', '.join(left)})" in capsys.readouterr().err


def test_a_sweep_is_seen_to_go_on_until_its_last_run_has_ended(tmp_path: Path) -> None:
    """Also one that another launcher of the same folder outlived, and one whose folder takes no lock runs."""
    lock, seen = sweep_lock(tmp_path / SWEEP), list[bool | None]()

    def task(_: object) -> None:
        if not seen:
            seen.append(is_locked(lock))
            launch(task, tmp_path, 1)
        seen.append(is_locked(lock))

    launch(task, tmp_path)
    assert seen == [True] * 5
    assert not is_locked(lock)
    (tmp_path / "file").touch()
    launch(task, tmp_path / "file")
    assert len(seen) == 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_last_step_of_a_run_ends_the_sweep(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, number: signal.Signals
) -> None:
    """The run took it for its own, had its verdict already, and the next one began."""
    begun = list[object]()

    def task(_: object) -> None:
        begun.append(None)
        if len(begun) == 2:
            with StopRequests("ending after this step"):
                signal.raise_signal(number)

    with pytest.raises(SystemExit) as end:
        launch(task, tmp_path)
    assert (end.value.code, len(begun)) == (128 + number, 2)
    assert "not begun: 1 of the sweep's runs (seed=2)" in capsys.readouterr().err
    begun.clear()
    launch(task, tmp_path, 2)  # with the last run the sweep is whole
    assert len(begun) == 2
