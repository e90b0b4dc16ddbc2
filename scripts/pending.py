"""Run what is still to be measured, as far as the time goes: the jobs of ``pending.yaml``, in their order.

    python scripts/pending.py --list             # what there is, with GPUs and minutes
    python scripts/pending.py --minutes 30       # all of it; the same command goes on where the last one stopped
    python scripts/pending.py tests two-gpus     # these

Each job has GPUs of its own. A command that has ended well is not run again; one that failed is, by the next call.
When the minutes are over the jobs under way are told to end, and trainings write a checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from flashpoint.cli.table import Table, show
from flashpoint.errors import UserError, exit_in_one_line
from flashpoint.hardware import cuda_devices

LIST = Path(__file__).with_suffix(".yaml")
STATE = Path("runs/.pending")
_POLL_SECONDS = 0.2
_TO_END = 60.0
"""Seconds that a job has to end after it was told to."""
_NOTHING = signal.Signals.SIGCONT
"""A signal that changes nothing for a process that runs."""


@dataclass(frozen=True)
class Job:
    """One measurement; ``pending.yaml`` says what its fields are."""

    name: Annotated[str, Field(pattern=r"^[\w-]+$")]
    shows: str
    gpus: Annotated[int, Field(ge=0)]
    minutes: Annotated[float, Field(gt=0)]
    commands: Annotated[list[str], Field(min_length=1)]
    resumes: bool = False

    def done(self) -> int:
        """Return how many of the commands have ended well."""
        record = STATE / f"{self.name}.done"
        return int(record.read_text()) if record.exists() else 0

    def count(self, done: int) -> None:
        (STATE / f"{self.name}.done").write_text(f"{done}\n")


class Running:
    """A job under way: its commands, one after the other, each a process group of its own."""

    def __init__(self, job: Job, gpus: tuple[int, ...]) -> None:
        self.job, self.gpus = job, gpus
        self._log = (STATE / f"{job.name}.log").open("ab")
        self._process = self._start()

    def failed(self) -> bool | None:
        """Begin the next command if one has ended well; return None until the job has ended, then whether it failed."""
        status = self._process.poll()
        if status is None:
            return None
        if status == 0:
            self.job.count(self.job.done() + 1)
            if self.job.done() < len(self.job.commands):
                self._process = self._start()
                return None
        self._log.close()
        return status != 0

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to all processes of the command; return whether any is left."""
        self._process.poll()  # takes leave of a process that has ended
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _start(self) -> subprocess.Popen[bytes]:
        command = self.job.commands[self.job.done()]
        self._log.write(f"$ {command}\n".encode())
        self._log.flush()
        visible = ",".join(map(str, self.gpus))
        environment = {**os.environ, "NAME": self.job.name, "CUDA_VISIBLE_DEVICES": visible}
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            process_group=0,
        )


def run(jobs: list[Job], gpus: int, seconds: float) -> list[str]:
    """Run the jobs; return the names of those that failed.

    Args:
        gpus: of this machine.
        seconds: after which what is under way is ended.

    Raises:
        UserError: a job takes more GPUs than there are.
        SystemExit: a signal asked for the end.
    """
    if large := [job for job in jobs if job.gpus > gpus]:
        raise UserError(f"{large[0].name}: takes {large[0].gpus} GPUs, and here are {gpus}; name the jobs to run")
    STATE.mkdir(parents=True, exist_ok=True)
    waiting = [job for job in jobs if job.done() < len(job.commands)]
    free, running, failed, until = list(range(gpus)), list[Running](), list[str](), time.monotonic() + seconds
    with _signals() as received:
        while time.monotonic() < until and not received:
            while job := _next(waiting, len(free), bool(running), until - time.monotonic()):
                waiting.remove(job)
                taken, free = tuple(free[: job.gpus]), free[job.gpus :]
                running.append(Running(job, taken))
                print(f"begun: {job.name}", flush=True)
            if not running:
                break
            time.sleep(_POLL_SECONDS)
            for one in tuple(running):
                if (fails := one.failed()) is not None:
                    running.remove(one)
                    free += one.gpus
                    print(f"{'failed' if fails else 'done'}: {one.job.name}", flush=True)
                    failed += [one.job.name] if fails else []
        _end(running)
    if received:
        sys.exit(128 + received[0])
    return failed


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that ask for an end, for which jobs are to be told first."""
    received: list[int] = []
    previous = {
        number: signal.signal(number, lambda got, _frame: received.append(got))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _next(waiting: list[Job], free: int, others: bool, seconds: float) -> Job | None:
    """Return the first job for which there are GPUs, and time. A job that takes none runs beside no other."""
    for job in waiting:
        fits = job.gpus <= free if job.gpus else not others
        if fits and (job.resumes or job.minutes * 60 <= seconds):
            return job
    return None


def _end(running: list[Running]) -> None:
    """Tell jobs to end, and wait until they have; kill what is left after a minute."""
    left = [one for one in running if one.send(signal.SIGTERM)]
    until = time.monotonic() + _TO_END
    while left and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        left = [one for one in left if one.send(_NOTHING)]
    for one in left:
        one.send(signal.SIGKILL)
    for one in running:
        print(f"stopped: {one.job.name}", flush=True)


def read(path: Path) -> list[Job]:
    """Return the jobs of a list.

    Raises:
        UserError: the list is none.
    """
    try:
        return TypeAdapter(list[Job], config={"extra": "forbid"}).validate_python(yaml.safe_load(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: job {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path}: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these jobs")
    parser.add_argument("--list", action="store_true", help="print the jobs")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which what runs is ended")
    parser.add_argument("--jobs", type=Path, default=LIST, metavar="FILE", help="another list")
    with exit_in_one_line():
        arguments = parser.parse_args()
        jobs = read(arguments.jobs)
        if unknown := set(arguments.names) - {job.name for job in jobs}:
            raise UserError(f"{', '.join(sorted(unknown))}: no such job; --list prints those of {arguments.jobs}")
        jobs = [job for job in jobs if not arguments.names or job.name in arguments.names]
        if arguments.list:
            show(
                Table(["job", "shows", "GPUs", "minutes"], [[j.name, j.shows, j.gpus, f"{j.minutes:g}"] for j in jobs]),
                "markdown",
            )
            return
        if failed := run(jobs, cuda_devices(), arguments.minutes * 60):
            raise UserError(f"failed: {', '.join(failed)}; {STATE}/NAME.log says why, and the same command tries again")


if __name__ == "__main__":
    main()
