"""Branches of a run with another attention, and how much of the run's growth of W_Q each has.

A branch starts at a checkpoint and trains on the run's batches for some hundreds of steps. Two branches are the
measure: one with the run's own attention, one with its twin, the same with every row of dS summing to zero. What
another branch has of the growth between these two is its share: 0 is the twin's, 1 the run's.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from flashpoint.analysis.intervals import mean_interval
from flashpoint.errors import UserError
from flashpoint.localize.subject import A, Subject, Trained
from flashpoint.runs.folder import RunFolder

LEAST_GROWTH = 1.25
"""W_Q of some head of the run must grow beyond the twin's by this factor, or a branch says nothing."""
_CANDIDATES = 2
"""Times as many checkpoints as are wanted are tried: early ones show no growth yet, and after late ones the twin's W_Q
grows too."""


class OutOfTimeError(Exception):
    """No branch may be begun any more."""


class NoGrowthError(UserError):
    """W_Q of the run does not outgrow its twin's from any start: branches cannot be told apart."""


@dataclass(frozen=True)
class Effect:
    """What a branch has of the growth of W_Q, from each starting step.

    Attributes:
        shares: by starting step; 0 is the twin's growth, 1 the run's.
    """

    shares: dict[int, float]

    @property
    def grows(self) -> bool:
        """Whether at most of the starting steps the branch grows more like the run than like its twin."""
        return 2 * self.votes > len(self.shares)

    @property
    def votes(self) -> int:
        """Starting steps at which it does."""
        return sum(share > 0.5 for share in self.shares.values())

    @property
    def decided(self) -> bool:
        """Whether the 95 % interval over starts leaves out one half; of one start there is none, and it decides."""
        mean, half = mean_interval(list(self.shares.values()))
        return half is None or abs(mean - 0.5) >= half

    @property
    def told(self) -> str:
        """``0.93 ± 0.04 of the growth, 3 of 3 starts``: a 95 % interval over starts."""
        mean, half = mean_interval(list(self.shares.values()))
        spread = "" if half is None else f" ± {half:.2f}"
        return f"{mean:.2f}{spread} of the growth, {self.votes} of {len(self.shares)} starts"


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
        starts: so many starting steps are chosen.
        minutes: no branch is begun that would end later, by the slowest of those before; None is no limit.
        gpus: on which branches train side by side, a process each; 1 trains in this process.

    Attributes:
        starts: the starting steps in order. Before :meth:`choose_starts` the candidates, newest first: checkpoints
            after the warm-up of the learning rate, in which norms of every head grow, from which a branch ends before
            the run's failure.

    Raises:
        UserError: the run failed too early.
    """

    def __init__(
        self, subject: Subject[A], folder: RunFolder, steps: int, starts: int, minutes: float | None, gpus: int = 1
    ) -> None:
        self.subject, self.steps, self._folder = subject, steps, folder
        run = subject.run
        self.failed_at = run.failed_at
        end = int(run.outcome["step"]) if self.failed_at is None else self.failed_at
        warmup = int(run.config["train"].get("warmup_steps", 0))
        fit = [step for step in subject.checkpoints if step >= warmup and step + steps <= end]
        self.starts = fit[: -_CANDIDATES * starts - 1 : -1]
        self._wanted = starts
        if not self.starts:
            after = f"after the warm-up of {warmup:,} steps and " if warmup else ""
            told = f"no checkpoint lies {after}{steps:,} steps before that; give fewer --steps"
            raise UserError(f"{folder.path}: {run.verdict}; {told}")
        self._until = None if minutes is None else time.monotonic() + 60 * minutes
        self._known = {branch["key"]: branch for branch in folder.read_branches()}
        self._seconds = 0.0
        self._gpus = gpus
        self._pool = _pool(gpus) if gpus > 1 else None
        self.trained = 0

    def __enter__(self) -> Branches[A]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if kind is None:  # otherwise the log of the branch that failed stays
            shutil.rmtree(self._folder.path / "branches", ignore_errors=True)

    @property
    def known(self) -> int:
        """Branches that are trained, now or before."""
        return len(self._known)

    @property
    def side_by_side(self) -> bool:
        """Whether branches train side by side, so that asking for more than is needed costs little."""
        return self._pool is not None

    def choose_starts(self) -> None:
        """Keep the starting steps from which W_Q of the run outgrows its twin's the most.

        Raises:
            OutOfTimeError: a branch is missing, and the time is over.
            NoGrowthError: from none does it grow enough to tell branches apart.
            UserError: no branch ends with numbers.
        """
        self.prepare([self.subject.whole, self.subject.twin])
        growths = {start: self._whole_growth(start) for start in self.starts}
        told = self._folder.path
        if not any(np.isfinite(growth) for growth in growths.values()):
            raise UserError(
                f"{told}: W_Q of the run or of its twin is no number after {self.steps:,} steps; give fewer --steps"
            )
        grown = [start for start, growth in growths.items() if growth >= np.log(LEAST_GROWTH)]
        if not grown:
            start = max(growths, key=lambda start: np.nan_to_num(growths[start]))
            raise NoGrowthError(
                f"{told}: from step {start:,} on W_Q outgrows its twin's by ×{np.exp(growths[start]):.2f} in "
                f"{self.steps:,} steps, and from {len(growths) - 1} other checkpoints by no more: too little to tell "
                "branches apart; give more --steps, or flashpoint diagnose: this attention's fault, if it has one, "
                "does not drive W_Q"
            )
        newest_of_equals = sorted(grown, key=lambda start: (growths[start], start))
        self.starts = sorted(newest_of_equals[-self._wanted :])

    def effect(self, attention: A) -> Effect:
        """Return what an attention has of the growth, from the chosen starts.

        Raises:
            OutOfTimeError: a branch is missing, and the time is over.
        """
        self.prepare([attention])
        shares = {}
        for start in self.starts:
            own, twin = (self._norms(which, start) for which in (attention, self.subject.twin))
            finite = bool(np.isfinite(own).all())  # one that is not has failed as the run did
            shares[start] = _growth(own, twin) / self._whole_growth(start) if finite else 1.0
        return Effect(shares)

    def prepare(self, attentions: Sequence[A]) -> None:
        """Train the branches of attentions that are missing, from all starting steps, side by side if possible."""
        self._train([Branch(attention, start, self.steps) for attention in attentions for start in self.starts])

    def onset(self, attention: A, start: int, steps: int) -> int | None:
        """Return the step at which a branch of another length explodes, or is no longer finite; None if it holds."""
        known = self._one(Branch(attention, start, steps))
        if known["outcome"] == "stable":
            return None
        return start + steps if known["onset"] is None else int(known["onset"])

    def _whole_growth(self, start: int) -> float:
        """Return the growth of the run's own attention beyond its twin's; NaN where either is no number."""
        return _growth(*(self._norms(which, start) for which in (self.subject.whole, self.subject.twin)))

    def _norms(self, attention: A, start: int) -> NDArray[np.float64]:
        """Return the spectral norms of W_Q [n_layer, n_head] at the end of a branch."""
        norms: NDArray[np.float64] = np.array(self._one(Branch(attention, start, self.steps))["norms"])
        return norms

    def _one(self, branch: Branch[A]) -> dict[str, Any]:
        self._train([branch])
        return self._known[self._key(branch)]

    def _key(self, branch: Branch[A]) -> str:
        told = f"{self.subject.identity(branch.attention)} {branch.start} {branch.steps}"
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def _train(self, branches: Sequence[Branch[A]]) -> None:
        """Train those that are missing.

        Raises:
            OutOfTimeError: one may not be begun any more. Those under way are kept.
        """
        missing = {key: branch for branch in branches if (key := self._key(branch)) not in self._known}
        if missing:
            (self._folder.path / "branches").mkdir(exist_ok=True)
        running: dict[Future[tuple[Trained, float]], str] = {}
        waiting, late = list(missing), False
        while waiting or running:
            while waiting and len(running) < self._gpus and not late:
                late = self._late(missing[waiting[0]].steps)
                if not late:
                    key = waiting.pop(0)
                    running[self._begin(missing[key], key)] = key
            if not running:
                raise OutOfTimeError
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                key = running.pop(future)
                self._keep(key, missing[key], *future.result())

    def _late(self, steps: int) -> bool:
        return self._until is not None and time.monotonic() + steps * self._seconds > self._until

    def _begin(self, branch: Branch[A], key: str) -> Future[tuple[Trained, float]]:
        if self._pool is not None:
            return self._pool.submit(_train_one, self.subject, branch, self._folder, key)
        future: Future[tuple[Trained, float]] = Future()
        future.set_result(_train_one(self.subject, branch, self._folder, key))
        return future

    def _keep(self, key: str, branch: Branch[A], trained: Trained, seconds: float) -> None:
        told = {"key": key, "attention": self.subject.told(branch.attention), "start": branch.start}
        self._known[key] = {**told, "steps": branch.steps, "seconds": round(seconds, 1), **asdict(trained)}
        self._folder.append_branch(self._known[key])
        self._seconds = max(self._seconds, seconds / branch.steps)
        self.trained += 1


def _train_one(subject: Subject[A], branch: Branch[A], folder: RunFolder, key: str) -> tuple[Trained, float]:
    """Train a branch in a folder that is gone afterwards; return its end and its seconds."""
    place = folder.path / "branches" / key
    shutil.rmtree(place, ignore_errors=True)
    started = time.monotonic()
    trained = subject.train(branch.attention, branch.start, branch.steps, place)
    shutil.rmtree(place, ignore_errors=True)
    return trained, time.monotonic() - started


def _pool(gpus: int) -> ProcessPoolExecutor:
    """Return processes that see one GPU each."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(gpus)]
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    for name in names[:gpus]:
        queue.put(name)
    return ProcessPoolExecutor(gpus, context, _take_gpu, (queue,))


def _take_gpu(names: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = names.get()


def _growth(norms: NDArray[np.float64], twin: NDArray[np.float64]) -> float:
    """Return the logarithm of how much more some head has grown than the twin's; NaN where a norm is no number."""
    with np.errstate(invalid="ignore", divide="ignore"):
        grown = float(np.log(norms / twin).max())
    return grown if np.isfinite(grown) else np.nan
