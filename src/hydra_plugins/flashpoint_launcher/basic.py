"""``hydra/launcher=basic``, the default: the runs of a sweep one after the other, in this process.

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
from typing import IO

from hydra._internal.core_plugins import basic_launcher
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus

from flashpoint.errors import UserError, notify, one_line
from flashpoint.lab.training.interrupt import STOPS
from flashpoint.runs.folder import sweep_lock

from ._sweep import own_of

_TOLD = 8  # names of runs in one line


@dataclass
class BasicLauncherConfig:
    """No settings."""

    _target_: str = "hydra_plugins.flashpoint_launcher.basic.BasicLauncher"


# In place of Hydra's own of that name: Hydra loads its plugins before those of others.
ConfigStore.instance().store(group="hydra/launcher", name="basic", node=BasicLauncherConfig, provider="flashpoint")


class BasicLauncher(basic_launcher.BasicLauncher):
    """Hydra's own, which would tell of the first failed run only, and not before the last has ended."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all.

        Raises:
            UserError: some failed, each of which was told when it did.
            KeyboardInterrupt: Ctrl-C before a run began to train, or at once after another one.
        """
        assert self.config is not None
        every_own = own_of(job_overrides)  # which refuses some sweeps: they leave nothing behind
        with _lock_file(Path(self.config.runs_dir)) as lock, _stop_requests() as request:
            return self._launch(job_overrides, every_own, initial_job_idx, lock, request)

    def _launch(
        self,
        job_overrides: Sequence[Sequence[str]],
        every_own: Sequence[Sequence[str]],
        initial_job_idx: int,
        lock: IO[str] | None,
        request: Callable[[], signal.Signals | None],
    ) -> Sequence[JobReturn]:
        returns: list[JobReturn] = []
        errors: list[Exception] = []
        for number, own in enumerate(every_own):
            if lock:
                with contextlib.suppress(OSError):  # another sweep into the folder has it, maybe not for long
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                (result,) = super().launch([job_overrides[number]], initial_job_idx + number)
            except SystemExit:  # a signal stopped the run
                _tell_of_those_not_begun(every_own[number + 1 :])
                raise
            except KeyboardInterrupt as interrupt:
                if str(interrupt):  # with how the run goes on
                    _tell_of_those_not_begun(every_own[number + 1 :])
                    raise
                _tell_of_those_not_begun(every_own[number:])
                how = "the runs that have ended stay; the same command would train them again"
                raise KeyboardInterrupt(how) from None
            returns.append(result)
            if result.status == JobStatus.FAILED:
                error = result._return_value  # the property would raise it
                errors.append(error)
                if not isinstance(error, UserError):
                    traceback.print_exception(error)
                notify(f"failed: {' '.join(own or job_overrides[number])}: {one_line(error)}")
                _let_go(error)
            if (late := request()) and number + 1 < len(every_own):
                _tell_of_those_not_begun(every_own[number + 1 :])
                sys.exit(128 + late)
        if errors:
            raise UserError(f"{len(errors)} of {len(returns)} runs failed") from errors[0]
        return returns


@contextlib.contextmanager
def _lock_file(folder: Path) -> Iterator[IO[str] | None]:
    """Open the file whose lock tells ``flashpoint watch`` that more runs are to begin; None where it cannot be made:
    the first run says what is wrong with the folder."""
    try:
        path = sweep_lock(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError:
        yield None
        return
    with file:
        yield file


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


def _tell_of_those_not_begun(every_own: Sequence[Sequence[str]]) -> None:
    if names := [" ".join(own) for own in every_own]:
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
