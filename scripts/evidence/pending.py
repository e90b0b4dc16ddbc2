"""Run what is still to be measured, as far as the time goes: the jobs of ``pending.yaml``, in their order.

    python scripts/evidence/pending.py --list             # what there is, with GPUs and minutes
    python scripts/evidence/pending.py --minutes 30       # all of it; the same command goes on where it stopped
    python scripts/evidence/pending.py watching kernels   # these, in this order
    python scripts/evidence/pending.py --pack results.tar.xz    # runs nothing: what they have written, without weights

Each job has GPUs of its own. A command that has ended well is not run again, unless it or one before it has changed
since; one that failed is, by the next call. When the minutes are over the jobs under way are told to end, and trainings
write a checkpoint. A second call beside the first one, or beside jobs that outlived it, is refused.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from flashpoint.cli.table import Table, show
from flashpoint.errors import UserError, command_errors
from flashpoint.files import write_json
from flashpoint.hardware import cuda_devices, visible_gpus
from flashpoint.lab.training.interrupt import StopRequests

LIST = Path(__file__).with_suffix(".yaml")
STATE = Path("runs/.pending")
_POLL_SECONDS = 0.2
_TO_END = 60.0
"""Seconds that a job has to end after it was told to."""
_LARGE_FOLDERS, _LARGE_FILES = {"checkpoints", "captures", "branches"}, {".pt", ".safetensors"}
"""Names of folders and endings of files that hold weights or tensors."""
_NOTHING = signal.Signals.SIGCONT
"""A signal that changes nothing for a process that runs."""


@dataclass(frozen=True)
class Job:
    """One measurement; ``pending.yaml`` says what its fields are."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]*$")]
    shows: str
    gpus: Annotated[int, Field(ge=0)]
    minutes: Annotated[float, Field(gt=0)]
    commands: Annotated[list[str], Field(min_length=1)]
    resumes: bool = False

    def done(self) -> int:
        """Return how many of the commands have ended well, as they stand now."""
        try:
            ended = list(json.loads(self._progress.read_text())["ended well"])
        except FileNotFoundError:
            return 0
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self._progress}: damaged; delete it, and {self.name} begins anew") from error
        both = zip(self.commands, ended, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))

    def count(self, done: int) -> None:
        write_json(self._progress, {"ended well": self.commands[:done]})

    @property
    def _progress(self) -> Path:
        return STATE / f"{self.name}.json"


class Running:
    """A job under way: its commands, one after the other, each a process group of its own.

    Args:
        gpus: what CUDA_VISIBLE_DEVICES is for each of its GPUs.
        lock: a file that the commands keep open.
    """

    def __init__(self, job: Job, gpus: tuple[str, ...], lock: int) -> None:
        self.job, self.gpus, self._lock = job, gpus, lock
        self._log = (STATE / f"{job.name}.log").open("ab")
        self._process = self._start()

    def failed(self) -> bool | None:
        """Begin the next command if one has ended well; return None until the job has ended, then whether it failed."""
        status = self._process.poll()
        if status is None:
            return None
        self.send(signal.SIGKILL)  # what the command left behind would stay on its GPUs
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
        environment = {
            **os.environ,
            "NAME": self.job.name,
            "CUDA_VISIBLE_DEVICES": ",".join(self.gpus),
            # python and flashpoint are this installation's, also where it is not activated
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        }
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            process_group=0,
            pass_fds=[self._lock],
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
    free, running, failed, until = visible_gpus(gpus), list[Running](), list[str](), time.monotonic() + seconds
    with _alone() as lock, StopRequests() as stop:
        waiting = [job for job in jobs if job.done() < len(job.commands)]
        try:
            while time.monotonic() < until and not stop.received:
                while job := startable(waiting, len(free), [one.job for one in running], until - time.monotonic()):
                    waiting.remove(job)
                    taken, free = tuple(free[: job.gpus]), free[job.gpus :]
                    running.append(Running(job, taken, lock))
                    print(f"begun: {job.name}", flush=True)
                if not running:
                    break
                time.sleep(_POLL_SECONDS)
                for one in tuple(running):
                    if (fails := one.failed()) is not None:
                        running.remove(one)
                        free += one.gpus
                        failed += [one.job.name] if fails else []
                        print(f"{'failed' if fails else 'done'}: {one.job.name}", flush=True)
        finally:  # of an error, too: of a full disk, or of a reader of what is printed who has gone
            _end(running)
    for one in running:
        print(f"stopped: {one.job.name}", flush=True)
    for job in waiting:
        print(f"no time for: {job.name}", flush=True)
    if stop.received:
        sys.exit(128 + stop.received[0])
    return failed


@contextlib.contextmanager
def _alone() -> Iterator[int]:
    """Give the lock of the only call at work. Jobs have it too: it is taken until the last of their processes ends.

    Raises:
        UserError: another call, or a job of one that was killed, is at work.
    """
    STATE.mkdir(parents=True, exist_ok=True)
    with (STATE / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{file.name}: another call, or a job of one that was killed, is at work; wait for it or end it"
            ) from error
        yield file.fileno()


def startable(waiting: list[Job], free: int, running: list[Job], seconds: float) -> Job | None:
    """Return the first job for which there is time, once there are GPUs for it: later ones do not overtake it, or one
    that takes several would never have them. A job that takes none runs beside no other."""
    job = next((job for job in waiting if job.resumes or job.minutes * 60 <= seconds), None)
    if job is None or any(not other.gpus for other in running):
        return None
    return job if (job.gpus <= free if job.gpus else not running) else None


def _end(running: list[Running]) -> None:
    """Tell jobs to end, and wait until they have; kill what is left after a minute."""
    left = [one for one in running if one.send(signal.SIGTERM)]
    until = time.monotonic() + _TO_END
    while left and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        left = [one for one in left if one.send(_NOTHING)]
    for one in left:
        one.send(signal.SIGKILL)


def pack(jobs: list[Job], path: Path) -> None:
    """Write an archive of what jobs have printed and of their folders, ``runs/NAME*``, without weights and tensors."""

    def small(file: tarfile.TarInfo) -> tarfile.TarInfo | None:
        name = Path(file.name)
        return None if name.name in _LARGE_FOLDERS or name.suffix in _LARGE_FILES else file

    written = {
        found
        for job in jobs
        for found in (STATE / f"{job.name}.log", *STATE.parent.glob(f"{job.name}*"))  # a name can begin another one
        if found.exists()
    }
    with tarfile.open(path, "w:xz") as packed:
        for found in sorted(written):
            packed.add(found, filter=small)


def read(path: Path) -> list[Job]:
    """Return the jobs of a list.

    Raises:
        UserError: the list is none, or two jobs have one name.
    """
    try:
        jobs = TypeAdapter(list[Job], config={"extra": "forbid"}).validate_python(yaml.safe_load(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: job {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path}: {error}") from error
    names = [job.name for job in jobs]
    if again := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{path}: {again}: {names.count(again)} jobs have this name; give each its own")
    return jobs


def _alike(jobs: list[Job]) -> Iterator[list[Job]]:
    """Yield jobs that follow one another with the same commands: they differ in what these read of the name."""
    return (list(group) for _, group in itertools.groupby(jobs, lambda job: job.commands))


def _row(first: Job, *others: Job) -> list[str | int]:
    names = f"{first.name} to {others[-1].name}" if others else first.name
    minutes = f"{len(others) + 1} × {first.minutes:g}" if others else f"{first.minutes:g}"
    return [names, first.shows, first.gpus, minutes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these jobs, in this order")
    parser.add_argument("--list", action="store_true", help="print the jobs")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which what runs is ended")
    parser.add_argument("--pack", type=Path, metavar="FILE.tar.xz", help="write what they have written so far")
    parser.add_argument("--jobs", type=Path, default=LIST, metavar="FILE", help="another list")
    with command_errors():
        arguments = parser.parse_args()
        if not arguments.minutes > 0:
            raise UserError(f"--minutes {arguments.minutes:g}: give more than 0")
        jobs = read(arguments.jobs)
        named = {job.name: job for job in jobs}
        if unknown := set(arguments.names) - named.keys():
            raise UserError(f"{', '.join(sorted(unknown))}: no such job; --list prints those of {arguments.jobs}")
        jobs = [named[name] for name in dict.fromkeys(arguments.names or named)]
        if arguments.list:
            show(Table(["jobs", "shows", "GPUs", "minutes"], [_row(*alike) for alike in _alike(jobs)]), "markdown")
            return
        if arguments.pack:
            pack(jobs, arguments.pack)
            return
        if failed := run(jobs, cuda_devices(), arguments.minutes * 60):
            raise UserError(f"failed: {', '.join(failed)}; {STATE}/NAME.log says why, and the same command tries again")


if __name__ == "__main__":
    main()
