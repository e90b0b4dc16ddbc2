"""Branches of a recorded run with another attention, and how much of the run's growth of W_Q each has.

A branch starts at a checkpoint and trains on the tape's batches for some hundreds of steps. Two branches are the
measure: one with the run's own attention, one with its twin, the same with every row of dS summing to zero. What
another branch has of the growth between these two is its effect: 0 is the twin's, 1 the run's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from flashpoint.config import Config, build_config
from flashpoint.errors import UserError
from flashpoint.files import CONFIGS
from flashpoint.numerics.choices import DeltaError
from flashpoint.numerics.variant import AttentionVariant
from flashpoint.runs.folder import RunFolder, by_step
from flashpoint.runs.outcome import Verdict
from flashpoint.runs.recorded import Run
from flashpoint.schema import Kind, parsed
from flashpoint.training.run import run as train

LEAST_GROWTH = 1.25
"""W_Q of some head of the run must grow beyond the twin's by this factor, or a branch says nothing."""


_ANEW = "delete it, and branches are trained anew"


class _Branch(Kind):
    """A line of ``localize.jsonl``."""

    key: str
    """Digest of attention, start and steps."""
    outcome: Verdict
    norms: Annotated[list[list[Annotated[float, Field(gt=0)]]], Field(min_length=1)]
    """Spectral norms of W_Q at the end, by layer and head."""


class OutOfTimeError(Exception):
    """No branch may be begun any more."""


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
    def told(self) -> str:
        """``0.93 of the growth, 3 of 3 starts``."""
        return f"{np.mean(list(self.shares.values())):.2f} of the growth, {self.votes} of {len(self.shares)} starts"


class Branches:
    """The branches of one run; each is trained once, and its norms are kept in the run's folder.

    Args:
        folder: of a run that exploded, with checkpoints before the onset.
        steps: of a branch.
        starts: so many starting steps, the newest checkpoints from which a branch ends before the onset, or 0.
        minutes: after so many no further branch is begun; None is no limit.

    Raises:
        UserError: the run did not explode, or too early.
    """

    def __init__(self, folder: RunFolder, steps: int, starts: int, minutes: float | None) -> None:
        self.run = Run.of_folder(folder)
        onset = self.run.onset
        if onset is None:
            raise UserError(f"{folder.path}: {self.run.verdict}; a run that exploded is localised")
        self.onset, self.steps, self._folder = onset, steps, folder
        self.checkpoints = checkpoints = [
            0,
            *by_step(folder.checkpoints, ".json"),
        ]  # a run can be repeated from its beginning, too
        self.starts = [step for step in checkpoints if step + steps <= onset][-starts:]
        if not self.starts:
            raise UserError(
                f"{folder.path}: exploded at {onset:,}, before {steps:,} steps are done; give fewer --steps"
            )
        self._until = None if minutes is None else time.monotonic() + 60 * minutes
        self._log = folder.path / "localize.jsonl"
        self._known = dict(self._read())
        self.trained = 0

    @property
    def known(self) -> int:
        """Branches that are trained, now or before."""
        return len(self._known)

    @property
    def variant(self) -> AttentionVariant:
        """The run's attention."""
        return self.run.attention

    @property
    def twin(self) -> AttentionVariant:
        """The run's attention with exact row sums, and no injected error."""
        return exact(self.variant)

    def effect(self, variant: AttentionVariant) -> Effect:
        """Return what a variant has of the growth.

        Raises:
            OutOfTimeError: a branch is missing, and the time is over.
            UserError: the run itself does not outgrow its twin from a start.
        """
        shares = {}
        for start in self.starts:
            twin = self.norms(self.twin, start)
            whole = _growth(self.norms(self.variant, start), twin)
            if whole < np.log(LEAST_GROWTH):
                raise UserError(
                    f"{self._folder.path}: from step {start:,} on W_Q outgrows its twin's by ×{np.exp(whole):.2f} in "
                    f"{self.steps:,} steps, too little to tell branches apart; give more --steps"
                )
            shares[start] = _growth(self.norms(variant, start), twin) / whole
        return Effect(shares)

    def norms(self, variant: AttentionVariant, start: int) -> NDArray[np.float64]:
        """Return the spectral norms of W_Q [n_layer, n_head] at the end of a branch."""
        norms: NDArray[np.float64] = np.array(self._branch(variant, start, self.steps)["norms"])
        return norms

    def explodes(self, variant: AttentionVariant, start: int, steps: int) -> bool:
        """Whether a branch of another length explodes."""
        return bool(self._branch(variant, start, steps)["outcome"] != "stable")

    def _branch(self, variant: AttentionVariant, start: int, steps: int) -> dict[str, Any]:
        choices = json.dumps({**variant.to_dict(), "name": ""}, sort_keys=True)
        key = hashlib.sha256(f"{choices} {start} {steps}".encode()).hexdigest()[:16]
        if key not in self._known:
            if self._until is not None and time.monotonic() > self._until:
                raise OutOfTimeError
            self._known[key] = {"key": key, "attention": variant.name, "start": start, "steps": steps,
                                **self._train(variant, start, steps, key)}  # fmt: skip
            with self._log.open("a") as file:
                file.write(json.dumps(self._known[key]) + "\n")
            self.trained += 1
        return self._known[key]

    def _train(self, variant: AttentionVariant, start: int, steps: int, key: str) -> dict[str, Any]:
        """Train a branch in a folder that is gone afterwards."""
        parent = self._folder.path / "branches"
        shutil.rmtree(parent / key, ignore_errors=True)
        parent.mkdir(exist_ok=True)
        with (parent / f"{key}.log").open("w") as log, contextlib.redirect_stderr(log):
            outcome = train(_branching(self._folder, variant, start, steps, parent, key))
        branch = Run.of_folder(RunFolder(Path(outcome.run)))
        norms = branch.measured_by_head("w_q_spectral_norm")[1][..., -1].tolist()
        shutil.rmtree(parent)
        return {"outcome": outcome.outcome, "onset": outcome.onset_step, "norms": norms}

    def _read(self) -> list[tuple[str, dict[str, Any]]]:
        if not self._log.exists():
            return []
        *lines, _unfinished = self._log.read_bytes().split(b"\n")
        found = [parsed(line, _Branch, f"{self._log}:{number}", _ANEW) for number, line in enumerate(lines, 1)]
        return [(one["key"], one) for one in found]


def exact(variant: AttentionVariant) -> AttentionVariant:
    """Return a variant with exact row sums and no injected error, everywhere."""
    elsewhere = variant.elsewhere and exact(variant.elsewhere)
    return dataclasses.replace(
        variant, name=f"{variant.name} exact_row_sum=true", exact_row_sum=True, delta_error=DeltaError(),
        elsewhere=elsewhere,
    )  # fmt: skip


def only_in(
    variant: AttentionVariant, elsewhere: AttentionVariant, layers: Sequence[int], heads: Sequence[int] | None = None
) -> AttentionVariant:
    """Return a variant in some layers, and in some heads of them, and another one elsewhere; all count from 1."""
    where = f"layers={list(layers)}" + (f" heads={list(heads)}" if heads is not None else "")
    error = variant.delta_error
    if error.layers is not None:
        erring = tuple(layer for layer in error.layers if layer in layers)
        error = dataclasses.replace(error, layers=erring) if erring else DeltaError()
    return dataclasses.replace(
        variant, name=f"{variant.name} {where}".replace(", ", ","), layers=tuple(layers),
        heads=None if heads is None else tuple(heads), elsewhere=elsewhere, delta_error=error,
    )  # fmt: skip


def _growth(norms: NDArray[np.float64], twin: NDArray[np.float64]) -> float:
    """Return the logarithm of how much more some head has grown than the twin's."""
    return float(np.log(norms / twin).max())


def _branching(
    folder: RunFolder, variant: AttentionVariant, start: int, steps: int, runs_dir: Path, name: str
) -> Config:
    values = folder.read_config()
    values["probes"] = {**values["probes"], "attention": [], "weights_against": None, "weights_interval": steps}
    values["checkpoints"] = {**values["checkpoints"], "interval": 0, "weights_interval": 0}
    values["detector"] = {**values["detector"], "tail_steps": 0}
    values["train"] = {**values["train"], "steps": start + steps, "eval_interval": start + steps, "eval_sequences": 1}
    values |= {"attn": variant.to_dict(), "resume": None, "run_name": name, "runs_dir": str(runs_dir)}
    config = build_config({**values, "replay": None, "from_step": None}, CONFIGS / "attn")
    return dataclasses.replace(config, replay=str(folder.path), from_step=start)
