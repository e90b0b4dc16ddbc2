"""What an attention costs in loss: validation losses at equal steps, in pairs of the same seed, data and experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.lab.analysis.lifetimes import Lifetimes, control_of, grouped, lifetimes, pairing
from flashpoint.lab.analysis.ratios import pairs
from flashpoint.runs.recovery import validations
from flashpoint.runs.run import Run


@dataclass(frozen=True)
class Losses:
    """Validation losses of one attention's runs at one step."""

    label: str
    variant: str
    setting: str
    losses: NDArray[np.float64]
    """The losses of the runs that had not exploded by then."""
    exploded: int
    """Runs that had."""
    differences: NDArray[np.float64]
    """To the control's run of the same seed, where there is one that had not exploded."""

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds; None for fewer than two."""
        return float(np.std(self.losses, ddof=1)) if len(self.losses) > 1 else None


def losses_at(step: int, runs: Sequence[Run], control: str) -> list[Losses]:
    """Return the losses of each attention after ``step`` optimiser steps, in the order of the first run of each.

    Args:
        control: label or name of the attention that the others are compared with.

    Raises:
        UserError: a run that had not exploded by then was not validated there.
    """
    groups = grouped(runs)
    named = {key: lifetimes(key[1], key[0], members) for key, members in groups.items()}
    losses = {key: _by_pairing(step, members) for key, members in groups.items()}
    found = []
    for key, own in losses.items():
        against = control_of(named[key], list(named.values()), control)
        differences: list[float] = []
        if against is not None and against is not named[key]:
            others = losses[against.setting, against.label]
            differences = [loss - others[key] for key, loss in own.items() if key in others]
        exploded = sum(_had_exploded(step, run) for run in groups[key])
        found.append(_losses(named[key], list(own.values()), exploded, differences))
    return found


def losses_beside(step: int, runs: Sequence[Run], controls: Sequence[Run]) -> list[Losses]:
    """Return the losses of each attention and setting after ``step`` optimiser steps, less those of named runs.

    Args:
        controls: a run is compared with the one of its seed (:func:`flashpoint.lab.analysis.ratios.pairs`).

    Raises:
        UserError: a run that had not exploded by then was not validated there; or as ``pairs`` does.
    """
    groups = grouped(runs)
    found = []
    for key, by_seed in pairs(runs, controls).items():
        after = [(_loss_after(step, run), _loss_after(step, control)) for run, control in by_seed.values()]
        own = [loss for loss, _ in after if loss is not None]
        differences = [loss - of_control for loss, of_control in after if loss is not None and of_control is not None]
        found.append(_losses(lifetimes(key[1], key[0], groups[key]), own, len(after) - len(own), differences))
    return found


def _losses(lifetimes: Lifetimes, own: Sequence[float], exploded: int, differences: Sequence[float]) -> Losses:
    return Losses(lifetimes.label, lifetimes.variant, lifetimes.setting, np.array(own), exploded, np.array(differences))


def last_common_step(runs: Sequence[Run]) -> int:
    """Return the last step at which every run that did not explode was validated.

    Raises:
        UserError: there is none.
    """
    stable = [set(validations(run)) for run in runs if run.failed_at is None]
    if not stable:
        raise UserError("all of these runs exploded; name a step before their onsets with --at")
    common = set.intersection(*stable)
    if not common:
        raise UserError("no step at which all runs that did not explode were validated; name one with --at")
    return max(common)


def _by_pairing(step: int, runs: Sequence[Run]) -> dict[tuple[object, ...], float]:
    losses = {pairing(run): _loss_after(step, run) for run in runs}
    return {key: loss for key, loss in losses.items() if loss is not None}


def _loss_after(step: int, run: Run) -> float | None:
    """Return the run's validation loss after a step; None where it had exploded by then."""
    if _had_exploded(step, run):
        return None
    known = validations(run)
    if step not in known:
        told = ", ".join(f"{at:,}" for at in sorted(known)) or "never"
        raise UserError(f"{run.where}: not validated after step {step:,} but {told}; choose --at, or train on")
    return known[step]


def _had_exploded(step: int, run: Run) -> bool:
    return run.failed_at is not None and run.failed_at < step
