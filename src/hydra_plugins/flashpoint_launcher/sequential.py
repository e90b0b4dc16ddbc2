"""``hydra/launcher=sequential``, the default: the runs of a sweep one after the other, in this process. They have a
folder of their own, unless the command line names one, in which they are called by what they differ in.

No postponed annotations here, as in ``gpus.py``.
"""

import contextlib
import fcntl
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, run_job
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from flashpoint.errors import UserError, notify, one_line
from flashpoint.files import refuse_unexpanded
from flashpoint.lab.cli.refusals import refusal
from flashpoint.lab.training.interrupt import STOPS
from flashpoint.runs.folder import is_run, runs_in, sweep_lock

from ._sweep import Job, differing_overrides, named

_TOLD = 8  # names of runs in one line


@dataclass
class SequentialLauncherConfig:
    """No settings."""

    _target_: str = "hydra_plugins.flashpoint_launcher.sequential.SequentialLauncher"


ConfigStore.instance().store(
    group="hydra/launcher", name="sequential", node=SequentialLauncherConfig, provider="flashpoint"
)


class SequentialLauncher(Launcher):
    """Tells of each failed run when it fails, where Hydra's own tells of the first when the last has ended."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all.

        Raises:
            UserError: some failed, each of which was told when it did.
            KeyboardInterrupt: Ctrl-C before a run began to train, or at once after another one.
        """
        from flashpoint.lab.cli.endings import tell_of_sweep

        differing = differing_overrides(job_overrides)  # which refuses some sweeps: they leave nothing behind
        jobs = named(job_overrides, [None] * len(job_overrides))
        refuse_unexpanded(self._config.runs_dir, f"runs_dir={self._config.runs_dir}")
        folder = Path(self._config.runs_dir)
        if not any(override.startswith("runs_dir=") for override in job_overrides[0]):
            folder /= os.environ.get("FLASHPOINT_SWEEP", "sweep")
        before = set(runs_in(folder))
        with _lock_file(folder) as lock, _stop_requests() as request:
            returns, errors = self._launch(jobs, differing, folder, initial_job_idx, lock, request)
            tell_of_sweep(folder, [run for run in runs_in(folder) if run not in before])
        if errors:
            raise UserError(f"{len(errors)} of {len(differing)} runs failed") from errors[0]
        return returns

    def _launch(
        self,
        jobs: Sequence[Job],
        differing: Sequence[Sequence[str]],
        folder: Path,
        initial_job_idx: int,
        lock: IO[str] | None,
        request: Callable[[], signal.Signals | None],
    ) -> tuple[list[JobReturn], list[Exception]]:
        """Return what the runs returned, and the errors of those that failed."""
        returns: list[JobReturn] = []
        errors: list[Exception] = []
        for number, (job, overrides) in enumerate(zip(jobs, differing, strict=True)):
            if lock:
                with contextlib.suppress(OSError):  # another sweep into the folder has it, maybe not for long
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            what = " ".join(overrides or job.overrides)
            notify(f"run {number + 1} of {len(differing)}: {what.replace('attn=', '')}")
            try:
                result = self._run(job.overrides, initial_job_idx + number, folder, job.name)
            except SystemExit:  # a signal stopped the run
                _tell_of_those_not_begun(differing[number + 1 :])
                raise
            except KeyboardInterrupt as interrupt:
                if str(interrupt):  # with how the run goes on
                    _tell_of_those_not_begun(differing[number + 1 :])
                    raise
                _tell_of_those_not_begun(differing[number:])
                how = "the runs that have ended stay; the same command would train them again"
                raise KeyboardInterrupt(how) from None
            if isinstance(result, Exception):
                errors.append(result)
                if not isinstance(result, UserError):
                    traceback.print_exception(result)
                notify(f"failed: {what}: {one_line(result)}")
                _let_go(result)
            else:
                returns.append(result)
            if (late := request()) and number + 1 < len(differing):
                _tell_of_those_not_begun(differing[number + 1 :])
                sys.exit(128 + late)
        return returns, errors

    def _run(self, overrides: Sequence[str], number: int, folder: Path, name: str) -> JobReturn | Exception:
        """Return what a run returned, or the error with which it failed.

        Args:
            folder: of the sweep.
            name: of the run in it, unless its settings name it.
        """
        failures: list[Exception] = []

        def task(config: DictConfig) -> Any:
            try:
                return self._task(config)
            except Exception as error:
                failures.append(error)
                raise

        try:
            config = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        except Exception as error:
            return refusal(error)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
            _put_in(folder, name, config)
        result = run_job(
            task_function=task,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
            hydra_context=self._context,
        )
        return failures[0] if failures else result


def _put_in(folder: Path, name: str, config: DictConfig) -> None:
    """Let a run be made in the sweep's folder. The runs that it names are where they were without a sweep."""
    for section, key in ((config, "replay"), (config, "resume"), (config.probes, "weights_against")):
        named_run = section[key]
        if named_run is not None and not is_run(Path(named_run)) and is_run(place := Path(config.runs_dir, named_run)):
            section[key] = str(place)
    config.runs_dir = str(folder)
    config.run_name = name if config.run_name is None else config.run_name


@contextlib.contextmanager
def _lock_file(folder: Path) -> Iterator[IO[str] | None]:
    """Open the file whose lock tells ``flashpoint watch`` that more runs are to begin; None where it cannot be made:
    the first run says what is wrong with the folder."""
    path, made = sweep_lock(folder), [place for place in (folder, folder.parent) if not place.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError:
        yield None
        return
    try:
        with file:
            yield file
    finally:
        if folder in made:
            _remove_if_empty(path, made)


def _remove_if_empty(lock: Path, folders: Sequence[Path]) -> None:
    """Remove the folders, from the sweep's outwards, if it has no run: all were refused."""
    with contextlib.suppress(OSError):
        if list(folders[0].iterdir()) == [lock.parent] and list(lock.parent.iterdir()) == [lock]:
            lock.unlink()
            lock.parent.rmdir()
            for folder in folders:
                folder.rmdir()


@contextlib.contextmanager
def _stop_requests() -> Iterator[Callable[[], signal.Signals | None]]:
    """Yield a function that returns a request to stop since its last call. One that comes while a run that has made its
    last step is drawn or uploaded is too late for that run, and is the sweep's."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def request() -> signal.Signals | None:
        try:
            numbers = os.read(read, 4096)
        except BlockingIOError:
            return None
        return next((number for number in STOPS if number in numbers), None)

    try:
        yield request
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def _tell_of_those_not_begun(runs: Sequence[Sequence[str]]) -> None:
    if names := [" ".join(overrides) for overrides in runs]:
        more = ", …" if len(names) > _TOLD else ""
        told = f"not begun: {len(names)} of the sweep's runs ({', '.join(names[:_TOLD])}{more})"
        notify(f"{told}; a sweep with hydra/launcher=gpus goes on where it was stopped")


def _let_go(error: BaseException | None) -> None:
    """Clear what the frames of an error hold: a failed run's model would stay until the sweep ends."""
    seen = set[int]()
    while error is not None and id(error) not in seen:  # an error that is raised from itself is its own cause
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
