"""Branches of a run with another attention.

A branch starts at a checkpoint and trains on the run's batches for some hundreds of steps. What it tells of the run's
growth: :mod:`flashpoint.lab.localize.growth`.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError, notify
from flashpoint.lab.localize.processes import branch_processes
from flashpoint.lab.localize.subject import A, Subject, Trained
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.localized import KeptBranch
from flashpoint.runs.subfolders import log_of_branch


class OutOfTimeError(Exception):
    """No branch may be begun any more."""


@dataclass(frozen=True)
class Branch(Generic[A]):
    """What to train."""

    attention: A
    start: int
    steps: int


class Branches(Generic[A]):
    """The branches of one run; each is trained once, and its norms are kept in the run's folder. A context.

    Args:
        steps: of a branch.
        minutes: no branch is begun that would end later, by the slowest of those before; None is no limit.
        gpus: on which branches train, one at a time on each: a process of its own compiles anew what branches in one
            process share.

    Attributes:
        gpus: branches that train at a time, a process each; a single one trains in this process.
        checkpoints: the steps from which a branch can start, in order. They lie after the warm-up of the learning rate,
            in which norms of every head grow, and a branch ends before the run's failure.

    Raises:
        UserError: the run failed too early.
    """

    def __init__(
        self,
        subject: Subject[A],
        folder: RunFolder,
        steps: int,
        minutes: float | None,
        gpus: int = 1,
    ) -> None:
        self.subject, self.steps, self._folder = subject, steps, folder
        run = subject.run
        self.failed_at = run.failed_at
        end = run.outcome.step if self.failed_at is None else self.failed_at
        warmup = run.config.train.warmup_steps
        self.checkpoints = [step for step in subject.checkpoints if step >= warmup and step + steps <= end]
        if not self.checkpoints:
            after = f"after the warm-up of {warmup:,} steps and " if warmup else ""
            told = f"no checkpoint lies {after}{steps:,} steps before that; give fewer --steps"
            raise UserError(f"{folder.path}: {run.verdict}; {told}")
        self._until = None if minutes is None else time.monotonic() + 60 * minutes
        self._known = {branch.key: branch for branch in folder.read_branches()}
        self._seconds = max((one.seconds / one.steps for one in self._known.values()), default=0.0)
        self.gpus = gpus
        self._pool: ProcessPoolExecutor | None = None
        self._ahead: list[Branch[A]] = []
        self._running: dict[Future[tuple[Trained, float]], tuple[str, Branch[A]]] = {}
        self._held = contextlib.ExitStack()
        self.trained = 0

    def __enter__(self) -> Branches[A]:
        with contextlib.ExitStack() as held:
            held.enter_context(self._folder.localizing())
            held.push(self._clear)
            if self.gpus > 1:
                self._pool = held.enter_context(branch_processes(self.gpus))
            self._held = held.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.__exit__(kind, error, trace)

    def _clear(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            shutil.rmtree(self._folder.branches, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # the log of a branch that failed stays
                self._folder.branches.rmdir()

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._folder.path

    @property
    def known(self) -> int:
        """Branches that are trained, now or before."""
        return len(self._known)

    def onset(self, branch: Branch[A]) -> int | None:
        """Return the step at which a branch explodes, or is no longer finite; None if it holds."""
        known = self._one(branch)
        if known.outcome == "stable":
            return None
        return branch.start + branch.steps if known.onset is None else known.onset

    def norms(self, attention: A, start: int) -> NDArray[np.float64]:
        """Return the spectral norms of W_Q [n_layer, n_head] at the end of a branch."""
        norms: NDArray[np.float64] = np.array(self._one(Branch(attention, start, self.steps)).norms)
        return norms

    def _one(self, branch: Branch[A]) -> KeptBranch:
        self.train([branch])
        return self._known[self._key(branch)]

    def _key(self, branch: Branch[A]) -> str:
        told = f"{self.subject.identity(branch.attention, branch.start)} {branch.start} {branch.steps}"
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def ahead(self, branches: Sequence[Branch[A]]) -> None:
        """Let processes that :meth:`train` would leave idle begin with these, which are to be asked for."""
        if self._pool is not None:
            self._ahead += branches

    def train(self, branches: Sequence[Branch[A]]) -> None:
        """Train those that are missing.

        Raises:
            OutOfTimeError: one may not be begun any more. Those under way are kept.
            UserError: one cannot be trained. Those beside it are waited for, and kept.
        """
        missing = {key: branch for branch in branches if (key := self._key(branch)) not in self._known}
        if missing:
            self._folder.branches.mkdir(exist_ok=True)
        under_way = {key for key, _ in self._running.values()}
        waiting, late, failed = [key for key in missing if key not in under_way], False, list[Exception]()
        while not missing.keys() <= self._known.keys() or ((late or failed) and self._running):
            while waiting and len(self._running) < self.gpus and not late and not failed:
                late = self._late(missing[waiting[0]].steps)
                if not late:
                    key = waiting.pop(0)
                    self._begin(missing[key], key)
            if not late and not failed:
                self._begin_ahead()
            if not self._running:
                break
            for future in wait(self._running, return_when=FIRST_COMPLETED).done:
                key, branch = self._running.pop(future)
                try:
                    self._keep(key, branch, *future.result())
                except (UserError, BrokenProcessPool) as error:
                    failed.append(self._told(error, branch))
                    if self._running and len(failed) == 1:
                        notify(f"{failed[0]}; waiting for what trains beside it: {len(self._running)}")
        if failed:
            raise failed[0]
        if waiting:
            raise OutOfTimeError

    def _begin_ahead(self) -> None:
        while self._ahead and len(self._running) < self.gpus and not self._late(self._ahead[0].steps):
            branch = self._ahead.pop(0)
            key = self._key(branch)
            if key not in self._known and all(key != one for one, _ in self._running.values()):
                self._begin(branch, key)

    def _told(self, error: Exception, branch: Branch[A]) -> Exception:
        if isinstance(error, BrokenProcessPool):
            return UserError(
                f"{self._folder.path}: a process died in a branch from step {branch.start:,}, for want of memory "
                f"perhaps; give fewer --gpus; the same command goes on from here"
            )
        if self.gpus > 1 and "memory of device" in str(error):
            return UserError(f"{error}; or give fewer --gpus")
        return error

    def _late(self, steps: int) -> bool:
        return self._until is not None and time.monotonic() + steps * self._seconds > self._until

    def _begin(self, branch: Branch[A], key: str) -> None:
        if self._pool is not None:
            future = self._pool.submit(_train_one, self.subject, branch, self._folder, key)
        else:
            future = Future()
            future.set_result(_train_one(self.subject, branch, self._folder, key))
        self._running[future] = key, branch

    def _keep(self, key: str, branch: Branch[A], trained: Trained, seconds: float) -> None:
        self._known[key] = KeptBranch(
            key=key,
            attention=self.subject.describe(branch.attention),
            start=branch.start,
            steps=branch.steps,
            seconds=round(seconds, 1),
            outcome=trained.outcome,
            onset=trained.onset,
            norms=tuple(map(tuple, trained.norms)),
        )
        self._folder.append_branch(self._known[key])
        self._seconds = max(self._seconds, seconds / branch.steps)
        self.trained += 1


def _train_one(subject: Subject[A], branch: Branch[A], folder: RunFolder, key: str) -> tuple[Trained, float]:
    """Train a branch in a folder that is gone afterwards; return its end and its seconds."""
    place = folder.branches / key
    shutil.rmtree(place, ignore_errors=True)
    started = time.monotonic()
    trained = subject.train(branch.attention, branch.start, branch.steps, place)
    shutil.rmtree(place, ignore_errors=True)
    log_of_branch(place).unlink(missing_ok=True)
    return trained, time.monotonic() - started
