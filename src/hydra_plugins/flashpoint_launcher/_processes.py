"""The runs of a sweep as processes, one in each slot, the others in a queue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashpoint.errors import notify
from flashpoint.lab.training.interrupt import StopRequests

from ._slots import Slot
from ._sweep import Job, Sweep

_POLL_SECONDS = 0.1
_DIE_WITH_PARENT = str(Path(__file__).with_name("_die_with_parent.py"))


@dataclass(frozen=True)
class Ending:
    """How a run ended, in one line."""

    job: Job
    line: str
    failed: bool = False
    refused: bool = False
    """Whether it failed by its settings, before it was a run: it would fail again."""


class Process:
    """A run's process, which ends with this one.

    Args:
        lock: of the sweep; the process keeps it open.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, job: Job, slot: Slot, sweep: Sweep, lock: int) -> None:
        self.slot, self._job, self._sweep = slot, job, sweep
        sweep.run(job).discard()  # of one that was killed as it began
        self._log = sweep.log(job).open("a+b")
        self._begin = self._log.tell()
        run = [sys.executable, "-P", sys.argv[0], *sweep.arguments(job, slot.settings)]
        self._process = subprocess.Popen(
            [sys.executable, "-IS", _DIE_WITH_PARENT, str(os.getpid()), *run],
            env=slot.environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            process_group=0,  # or a terminal's Ctrl-C would reach it beside the launcher's stop: two end it at once
            pass_fds=[lock],
        )

    def stop(self) -> None:
        """Let the run end after its step; a second time, at once."""
        self._process.terminate()

    def wait(self) -> None:
        self._process.wait()

    def ending(self) -> Ending | None:
        """Return how the process ended; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        with self._log as log:
            log.seek(self._begin)
            lines = log.read().decode(errors="replace").splitlines()
        verdicts, errors = ([line for line in lines if line.startswith(begin)] for begin in ("outcome=", "error: "))
        if status == 0 and verdicts:
            return Ending(self._job, verdicts[-1])
        told = verdicts[-1] if verdicts else _told(status)  # a run that was stopped has a verdict, too
        reason = errors[-1].removeprefix("error: ") if errors else told
        refused = status == 2 and not self._sweep.run(self._job).config.is_file()
        return Ending(self._job, f"{reason} ({self._log.name})", failed=True, refused=refused)


def _told(status: int) -> str:
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _next(waiting: Sequence[Job], free: Sequence[Slot]) -> tuple[Job, Slot] | None:
    """Return the first run that one of the free slots takes, and the slot that has been free for longest."""
    return next(((job, slot) for job in waiting for slot in free if slot.takes(job)), None)


def run_all(
    jobs: Sequence[Job], slots: Sequence[Slot], sweep: Sweep, lock: int, stop: StopRequests
) -> Iterator[Ending]:
    """How each run ended, as they do. After a stop request none is begun, and those under way end cleanly; so they
    do when the caller fails.

    Args:
        lock: of the sweep.
    """
    waiting, free = list(jobs), list(slots)
    running: list[Process] = []
    told = 0
    try:
        while running or (waiting and not stop.received):
            while not stop.received and (found := _next(waiting, free)):
                job, slot = found
                waiting.remove(job)
                try:
                    running.append(Process(job, slot, sweep, lock))
                    free.remove(slot)
                except OSError as error:
                    yield Ending(job, str(error), failed=True)
            time.sleep(_POLL_SECONDS)
            if told < len(stop.received):
                told = len(stop.received)
                notify(f"{stop.received[-1].name}: ending the runs after their step; once more to quit at once")
                for process in running:
                    process.stop()
            for process in tuple(running):
                if ending := process.ending():
                    running.remove(process)
                    free.append(process.slot)
                    yield ending
    finally:
        for process in running:
            process.stop()
        for process in running:
            process.wait()
