"""From which starts W_Q of a run grows beyond chance, and how much of that growth a branch has.

The growth of a head from a start is ln(norm of W_Q in the run's branch / norm in the twin's), at their ends. Training
is chaotic: without any cause, too, the two differ. By how much, a second twin tells. Its rows of dS sum to zero, too,
and its forward pass rounds otherwise than the twin's. So nothing drives W_Q in either. From the first step on they
differ by roundings, as the run and the twin do. Chance is the largest |ln(second twin / twin)| of all heads. This
assumes that the rounding of P̄, in which the twins differ, parts two branches about as far as any other rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.lab.analysis.intervals import slope_interval
from flashpoint.lab.localize.branches import Branch, Branches
from flashpoint.lab.localize.subject import A, Cells

CLEAR = 3.0
"""A growth is clear of chance from so many times chance on. The largest of all heads is compared with a largest of all
heads, and of one pair of branches. Let independent heads of both pairs spread alike. Then one of 24 heads is clear by
chance from less than 0.01 % of starts with normal tails, from 0.4 % with those of Laplace. With Student's t of three
degrees of freedom it is from 2.5 %. Hence :data:`LEAST_GROWTH`."""
LEAST_GROWTH = 1.25
"""A start counts by itself only if W_Q of a head grows by this factor beyond the twin's. Below, the same head has to
grow clear of chance from another start. The twins share whatever has no cause in the attention; a growth beyond theirs
that is repeated on other batches is due to the attention, directly or through the loss."""
LEAST_REPEATED = 1.02
"""So much the head has to grow from both starts. Roundings of δ move W_Q of a run that stays stable, too, by some
thousandths, and where chance is small that is clear of it."""
FEW_HEADS = 8
"""Of fewer heads in all a largest one tells too little of chance: there each start needs :data:`LEAST_GROWTH`. By
chance, as above, of eight starts two agree about one of 8 heads in 0.5 % of runs at most. About one of 4 heads they do
in 2 %, about a single head in 19 to 26 %."""
NEGLIGIBLE = 0.1
"""A head that grows less than this share of the head that grows most takes no part: where one grows much, others follow
a little through the loss."""
_MOST_WEIGHT = 0.75
"""An interval over starts of which one has a larger share of the weight says so."""
_CANDIDATES = 2
"""Times as many checkpoints as are wanted are tried: early ones show no growth yet, and after late ones the twin's W_Q
grows too."""
_BEFORE_IT_BEGAN = 2
"""So many checkpoints without growth, one after the other and older than one that counts, end the search: W_Q began to
grow after them."""


class NoGrowthError(UserError):
    """W_Q of the run does not outgrow its twin's from any start: branches cannot be told apart."""


@dataclass(frozen=True)
class Start:
    """A checkpoint, and what grows from it.

    Attributes:
        step: of the checkpoint.
        twin: spectral norms of W_Q at the end of the twin's branch, [n_layer, n_head].
        growth: of each head, in nats, [n_layer, n_head]; NaN where a norm is no number.
        chance: the growth that comes by chance, in nats: the largest |ln(second twin / twin)| of all heads. NaN where
            the second twin explodes, or a norm is no number.
    """

    step: int
    twin: NDArray[np.float64]
    growth: NDArray[np.float64]
    chance: float

    @property
    def measured(self) -> bool:
        """Whether growth and chance are numbers."""
        return bool(np.isfinite(self.growth).all() and np.isfinite(self.chance))

    @property
    def growing(self) -> Cells:
        """Heads whose growth is clear of chance, and not negligible; none where one of the two is no number."""
        least = np.maximum(CLEAR * self.chance, NEGLIGIBLE * self.growth.max())  # NaN if one is
        return (self.growth > 0) & (self.growth >= least)

    @property
    def refused(self) -> str:
        """Why it does not count."""
        if np.isfinite(self.growth).all() and np.isnan(self.chance):
            return "chance cannot be measured here: the second twin explodes, or its W_Q is no number"
        return "no growth to localise here"

    @property
    def evidence(self) -> str:
        """``growth ×1.37, chance ×1.02``."""
        if not np.isfinite(self.growth).all():
            return "W_Q is no number"
        chance = f"×{np.exp(self.chance):.2f}" if np.isfinite(self.chance) else "not known"
        return f"growth ×{np.exp(self.growth.max()):.2f}, chance {chance}"


def fit(starts: Sequence[Start]) -> list[Start]:
    """Return the starts that count: something grows clear of chance, by :data:`LEAST_GROWTH` or from two starts by
    :data:`LEAST_REPEATED`."""

    def repeats(one: Start, other: Start) -> bool:
        both = np.minimum(one.growth, other.growth) >= np.log(LEAST_REPEATED)
        return bool((one.growing & other.growing & both).any())

    def confirmed(start: Start) -> bool:
        if (start.growth[start.growing] >= np.log(LEAST_GROWTH)).any():
            return True
        others = [other for other in starts if other is not start and other.growth.size >= FEW_HEADS]
        return any(repeats(start, other) for other in others)

    return [start for start in starts if start.growing.any() and confirmed(start)]


def find_starts(branches: Branches[A], wanted: int) -> tuple[list[Start], list[Start]]:
    """Return the newest starts that count, and the others that were tried; newest first.

    Starts lie at least a branch's steps apart: branches from different starts share no batch.

    Args:
        wanted: so many are looked for, among twice as many, and not far back beyond the beginning of the growth.

    Raises:
        OutOfTimeError: a branch is missing, and the time is over.
        NoGrowthError: none counts.
        UserError: no branch ends with numbers.
    """
    left = _apart(branches.checkpoints, branches.steps)[: _CANDIDATES * wanted]
    tried: list[Start] = []
    while left and (missing := wanted - len(fit(tried))) > 0 and not _before_growth(tried):
        now, left = left[:missing], left[missing:]
        subject, steps = branches.subject, branches.steps
        needed = (subject.whole, subject.twin, subject.second_twin)
        branches.train([Branch(attention, step, steps) for attention in needed for step in now])
        tried += [_start(branches, step) for step in now]
        found = fit(tried)[:wanted]
        branches.ahead([Branch(changed, one.step, steps) for _, changed in subject.changes() for one in found])
    found = fit(tried)
    if not found:
        raise _refused(branches, tried)
    return found[:wanted], [start for start in tried if start not in found]


def _before_growth(tried: Sequence[Start]) -> bool:
    """Return whether the oldest that were tried, newest first, lie before the growth began."""
    counting = fit(tried)
    oldest = tried[-_BEFORE_IT_BEGAN:]
    return bool(counting) and len(oldest) == _BEFORE_IT_BEGAN and not any(start in counting for start in oldest)


def _apart(checkpoints: Sequence[int], steps: int) -> list[int]:
    """Return the newest checkpoint, the newest one that is so many steps older, and so on."""
    chosen: list[int] = []
    for step in sorted(checkpoints, reverse=True):
        if not chosen or chosen[-1] - step >= steps:
            chosen.append(step)
    return chosen


def _start(branches: Branches[A], step: int) -> Start:
    subject = branches.subject
    own, twin, second = (branches.norms(which, step) for which in (subject.whole, subject.twin, subject.second_twin))
    holds = branches.onset(Branch(subject.second_twin, step, branches.steps)) is None
    chance = float(np.abs(_growth(second, twin)).max()) if holds else np.nan
    return Start(step, twin, _growth(own, twin), chance)


def _growth(own: NDArray[np.float64], twin: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore", divide="ignore"):
        growth = np.log(own / twin)
    return np.where(np.isfinite(growth).all(), growth, np.nan)


def _refused(branches: Branches[A], tried: Sequence[Start]) -> UserError:
    measured = [start for start in tried if start.measured]
    told = branches.path
    if not measured:
        return UserError(
            f"{told}: after {branches.steps:,} steps W_Q of the run or of a twin is no number, or the second twin, by "
            "which chance is measured, has exploded; give fewer --steps"
        )
    best = max(measured, key=lambda start: float(start.growth.max()))
    seen = (
        f"{told}: from step {best.step:,} on W_Q outgrows its twin's by ×{np.exp(best.growth.max()):.2f} in "
        f"{branches.steps:,} steps, where chance makes ×{np.exp(best.chance):.2f}"
    )
    if best.growing.any() and best.growth.max() >= np.log(LEAST_REPEATED):
        several = "" if best.growth.size < FEW_HEADS else ", or the same head has to grow from two checkpoints"
        return NoGrowthError(f"{seen}; it has to grow by ×{LEAST_GROWTH}{several}: give more --steps")
    return NoGrowthError(
        f"{seen}, and no growth beyond chance is found from {len(tried) - 1} other checkpoints either: too little to "
        "tell branches apart; give more --steps, or flashpoint diagnose: this attention's fault, if it has one, does "
        "not drive W_Q"
    )


@dataclass(frozen=True)
class Effect:
    """What a branch has of the growth of W_Q: the slope of its growth over the run's, through the origin.

    Chance moves a branch's growth as much where the run grows little as where it grows much. So a share of a little
    growth says little, and a start weighs by the square of the run's growth from it.

    Attributes:
        run: growth of the run by starting step, in nats, positive.
        branch: growth of the branch, of the same heads from the same steps; 0 is the twin's.
        what: the growth that a share is of, in words.
    """

    run: dict[int, float]
    branch: dict[int, float]
    what: str = "the growth"

    @property
    def starts(self) -> int:
        return len(self.run)

    @property
    def grows(self) -> bool:
        """Whether the branch grows more like the run than like its twin."""
        return self._interval[0] > 0.5

    @property
    def votes(self) -> int:
        """Starting steps at which it does."""
        return sum(self.branch[step] > 0.5 * growth for step, growth in self.run.items())

    @property
    def decided(self) -> bool:
        """Whether the 95 % interval over starts leaves out one half; of one start there is none."""
        share, half = self._interval
        return half is None or abs(share - 0.5) >= half

    @property
    def evidence(self) -> str:
        """``0.93 ± 0.04 of the growth, 3 of 3 starts``: a 95 % interval over starts. It rests on one of them where this
        has most of the weight."""
        share, half = self._interval
        spread = "" if half is None else f" ± {half:.2f}"
        weights = [growth**2 for growth in self.run.values()]
        heaviest = max(weights) / sum(weights)
        rests = f", one with {heaviest:.0%} of the weight" if half is not None and heaviest > _MOST_WEIGHT else ""
        return f"{share:.2f}{spread} of {self.what}, {self.votes} of {self.starts} starts{rests}"

    @property
    def _interval(self) -> tuple[float, float | None]:
        return slope_interval(list(self.run.values()), [self.branch[step] for step in self.run])


@dataclass(frozen=True)
class Measure(Generic[A]):
    """Branches from some starts, measured in the heads that grow from each."""

    branches: Branches[A]
    starts: Sequence[Start]

    def growing(self, cells: Cells) -> bool:
        """Return whether one of these heads grows from any start."""
        return any((start.growing & cells).any() for start in self.starts)

    def effect(self, attention: A, own: Cells | None = None) -> Effect:
        """Return what an attention has of the run's growth: of the sum over the heads that grow in the run.

        Heads that do not grow add no noise, and one that grows much counts more than one that grows little.

        Args:
            own: only of these heads, and from starts from which one of them grows.

        Raises:
            OutOfTimeError: a branch is missing, and the time is over.
        """
        self.prepare([attention])
        run, branch = {}, {}
        for start in self.starts:
            cells = start.growing if own is None else start.growing & own
            if cells.any():
                run[start.step] = float(start.growth[cells].sum())
                branch[start.step] = self._growth(attention, start, cells)
        return Effect(run, branch, "the growth" if own is None else "its own growth")

    def prepare(self, attentions: Sequence[A]) -> None:
        """Train the branches of attentions that are missing, from all starts, side by side if possible."""
        steps = self.branches.steps
        self.branches.train([Branch(attention, start.step, steps) for attention in attentions for start in self.starts])

    def _growth(self, attention: A, start: Start, cells: Cells) -> float:
        growth = _growth(self.branches.norms(attention, start.step), start.twin)
        if np.isnan(growth).any():  # it has failed as the run did
            growth = start.growth
        return float(growth[cells].sum())
