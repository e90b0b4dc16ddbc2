"""The onset, or W_Q, against that of the same seed in another experiment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flashpoint.errors import UserError
from flashpoint.lab.analysis.lifetimes import grouped, pairing, refuse_late_entry
from flashpoint.runs.run import Run


@dataclass(frozen=True)
class OnsetRatio:
    """One run against its control."""

    ratio: float | None
    """How many times the control's onset the run's is; of the one that held, its length. None where both held."""
    exploded: bool
    control_exploded: bool

    @property
    def later(self) -> bool | None:
        """True where the run explodes after its control, or holds beyond the control's onset; False the other way
        round. None where the two cannot say: both held, both exploded at one step, or the one that held is the shorter
        one."""
        if self.ratio is None or self.ratio == 1:
            return None
        if self.ratio > 1:
            return True if self.control_exploded else None
        return False if self.exploded else None


Pairs = dict[tuple[str, str], dict[int, tuple[Run, Run]]]
"""Each run and its control by seed, of each setting and attention."""


def onset_ratios(found: Pairs) -> dict[tuple[str, str], dict[int, OnsetRatio]]:
    """Return the ratio of each pair."""
    return {group: {seed: _ratio(*pair) for seed, pair in members.items()} for group, members in found.items()}


def pairs(runs: Sequence[Run], controls: Sequence[Run]) -> Pairs:
    """Find the control of each run.

    It has the run's seed, and where any seed has several controls, the run's data and settings, too.

    Raises:
        UserError: a run or control is a branch, a control lasted for no step, or a run has no control. Or two controls
            have one seed and setting, or two runs of a group one seed.
    """
    for run in (*runs, *controls):
        refuse_late_entry(run)
    for control in controls:
        if not _lasted(control):
            raise UserError(f"{control.where}: {control.verdict}, no time to compare with; leave it out")
    one_a_seed = len({_seed(control) for control in controls}) == len(controls)
    which = "" if one_a_seed else " with its settings and text, and one seed has several controls"
    key: Callable[[Run], object] = _seed if one_a_seed else pairing
    by_key: dict[object, Run] = {}
    for control in controls:
        if by_key.setdefault(key(control), control) is not control:
            raise UserError(f"{control.where}: a second control of seed {_seed(control)} in its setting; name one")
    found: Pairs = {}
    for group, members in grouped(runs).items():
        by_seed = found.setdefault(group, {})
        for run in members:
            seed = _seed(run)
            if seed in by_seed:
                raise UserError(f"{run.where}: a second run of seed {seed} in its row; leave one of them out")
            if key(run) not in by_key:
                raise UserError(f"{run.where}: no control of seed {seed}{which}; add one, or leave the run out")
            by_seed[seed] = run, by_key[key(run)]
    return found


def w_q_ratio(run: Run, control: Run, layer: int) -> float | None:
    """Return the largest W_Q norm of a head of the layer (from 1), of the run over the control, at the last step at
    which both measured it. None where they never did."""
    if run.w_q_norms is None or control.w_q_norms is None:
        return None
    common = np.intersect1d(run.w_q_norms[0], control.w_q_norms[0])
    if not len(common):
        return None
    of_run, of_control = (
        norms[layer - 1][:, steps == common[-1]].max() for steps, norms in (run.w_q_norms, control.w_q_norms)
    )
    return float(of_run / of_control)


def _seed(run: Run) -> int:
    return run.seed


def _ratio(run: Run, control: Run) -> OnsetRatio:
    exploded, control_exploded = run.failed_at is not None, control.failed_at is not None
    ratio = _lasted(run) / _lasted(control) if exploded or control_exploded else None
    return OnsetRatio(ratio, exploded, control_exploded)


def _lasted(run: Run) -> int:
    return int(run.outcome.step if run.failed_at is None else run.failed_at)
