"""Which layers, heads and choices of an attention make W_Q grow, and from when on nothing helps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Generic

from flashpoint.lab.localize.branches import Branch, Branches, OutOfTimeError
from flashpoint.lab.localize.growth import Measure, Start, find_starts
from flashpoint.lab.localize.layers_and_heads import (
    Part,
    Parts,
    growing_alone,
    smallest,
    sufficient_and_necessary,
    sure,
)
from flashpoint.lab.localize.subject import A, Answer


def answers(branches: Branches[A], starts: int) -> Iterator[list[Answer]]:
    """Ask all questions from so many starts; yield the answers as they stand, whenever there is a new one.

    Layers, heads and choices are asked in rounds, the first from one start, the next from one more. Where several
    branches train side by side, it is from as many and as many more. When the time runs out they have the answers of
    the last round that was finished: fewer starts for all of them, rather than none for the last. The last answer then
    says what is missing.

    Raises:
        UserError: the run does not outgrow its twin, or a branch cannot be trained.
    """
    asking = _Asking(branches)
    try:
        yield from asking.answers(starts)
    except OutOfTimeError:
        yield [*asking.stand, asking.missing()]


class _Asking(Generic[A]):
    """The questions to a run's branches, and how far they are answered.

    Attributes:
        stand: the answers as they stand.
    """

    def __init__(self, branches: Branches[A]) -> None:
        self._branches = branches
        self.stand: list[Answer] = []
        self._left = ["criterion", *(("layers", "heads") if branches.subject.divisible else ()), "choice"]
        self._left += ["no return", "onset"] if branches.failed_at is not None else []
        self._starts: list[Start] = []
        self._used = 0
        """Starts of the last round that was finished."""

    def missing(self) -> Answer:
        """Return what has no answer, or one from fewer starts."""
        not_asked = f"not answered: {', '.join(self._left)}" if self._left else "not asked of all starts"
        used = f"{self._used} of {len(self._starts)} starts" if 0 < self._used < len(self._starts) else ""
        return Answer("time", f"over; {not_asked}; the same command goes on from here", used)

    def answers(self, wanted: int) -> Iterator[list[Answer]]:
        """Yield :attr:`stand`, whenever it is another."""
        branches, more = self._branches, self._branches.gpus
        if branches.failed_at is not None:
            newest = _before(branches, branches.failed_at)[-1]
            branches.ahead([_to_the_horizon(branches, branches.failed_at, branches.subject.twin, newest)])
        self._starts, others = find_starts(branches, wanted)
        self.stand = about = _about(branches, self._starts, others, wanted)
        for number in range(more, len(self._starts) + more, more):
            asked = _Round(Measure(branches, self._starts[:number]))
            yield from self._one_round(about, asked)
            self._used = min(number, len(self._starts))
        if branches.failed_at is not None:
            for answer in _beyond(branches, branches.failed_at, self._starts, asked.found | asked.without):
                self.stand = [*self.stand, answer]
                self._left = ["onset"]
                yield self.stand

    def _one_round(self, about: list[Answer], asked: _Round[A]) -> Iterator[list[Answer]]:
        """Show the first round's answers one by one; those of a later one replace them together."""
        now = about
        for question, ask in asked.questions:
            for answer in ask():
                now = [*now, answer]
                if not self._used:
                    self.stand = now
                    yield now
            if not self._used:
                self._left.remove(question)
        self.stand = now
        yield now


def _about(branches: Branches[A], found: list[Start], others: list[Start], wanted: int) -> list[Answer]:
    """Say which starts do not count, and that those that do are too few for an interval."""
    rows = [Answer("starts", f"step {one.step:,}: {one.refused}", one.evidence) for one in others]
    if len(found) == 1 < wanted:
        told = (
            f"1 of {wanted} that were asked for, and no interval: keep more checkpoints of the last thousands of "
            f"steps before the failure, at least {branches.steps:,} steps apart, or give fewer --steps"
        )
        rows.append(Answer("starts", told, ""))
    return rows


class _Round(Generic[A]):
    """The questions of some starts, in order.

    Attributes:
        found: the attention of what was found, by its name.
        without: the attention without the layers that were found, by its name.
    """

    def __init__(self, measure: Measure[A]) -> None:
        self._measure, self._subject = measure, measure.branches.subject
        self.found, self.without = {"the attention": self._subject.whole}, {"the twin": self._subject.twin}
        self._layers: list[Part] = []
        parts = [("layers", self._of_layers), ("heads", self._of_heads)] if self._subject.divisible else []
        self.questions = [("criterion", self._criterion), *parts, ("choice", self._choices)]

    def _criterion(self) -> Iterator[Answer]:
        starts = sorted(self._measure.starts, key=lambda start: start.step)
        steps = ", ".join(f"{start.step:,}" for start in starts)
        told = f"W_Q against the twin's after {self._measure.branches.steps:,} steps from {steps}"
        yield Answer("criterion", told, "; ".join(start.evidence for start in starts))

    def _of_layers(self) -> Iterator[Answer]:
        parts = Parts(self._subject)
        alone = growing_alone(parts, self._measure)
        self._layers = smallest(parts, self._measure, alone)
        others = [layer for layer in parts.every if layer not in self._layers]
        self.without = {f"without {parts.named(self._layers)}": parts.only(others) if others else self._subject.twin}
        yield from sufficient_and_necessary(parts, self._layers, alone, self._measure)

    def _of_heads(self) -> Iterator[Answer]:
        parts = Parts(self._subject, tuple(layer for (layer,) in self._layers))
        alone = growing_alone(parts, self._measure)
        heads = smallest(parts, self._measure, alone)
        self.found = {f"{parts.named(heads)} alone": parts.only(heads)}
        yield from sufficient_and_necessary(parts, heads, alone, self._measure)

    def _choices(self) -> Iterator[Answer]:
        for name, changed in self._subject.changes():
            effect = self._measure.effect(changed)
            verdict = "does not stop the growth" if effect.grows else "stops the growth"
            yield Answer("choice", f"{name}: {sure(effect, verdict, 'whether it stops the growth')}", effect.evidence)


def _beyond(branches: Branches[A], failed_at: int, starts: Sequence[Start], named: Mapping[str, A]) -> Iterator[Answer]:
    """Find the point of no return, then which of some attentions explode."""
    last, answer = _point_of_no_return(branches, failed_at)
    yield answer
    steps = [start.step for start in starts]
    yield from _confirmed(branches, failed_at, min(steps) if last is None else min(last, max(steps)), named)


def _confirmed(branches: Branches[A], failed_at: int, start: int, named: Mapping[str, A]) -> Iterator[Answer]:
    """Train attentions up to the failure and on."""
    asked = {name: _to_the_horizon(branches, failed_at, attention, start) for name, attention in named.items()}
    branches.ahead(list(asked.values()))
    for name, branch in asked.items():
        onset = branches.onset(branch)
        verdict = "does not explode" if onset is None else f"explodes at {onset:,}"
        end = start + branch.steps
        yield Answer("onset", f"{name}: {verdict}", f"from step {start:,} to {end:,}; the run failed at {failed_at:,}")


def _to_the_horizon(branches: Branches[A], failed_at: int, attention: A, start: int) -> Branch[A]:
    """Return a branch that is long enough to see whether it explodes."""
    return Branch(attention, start, _horizon(branches, failed_at) - start)


def _horizon(branches: Branches[A], failed_at: int) -> int:
    return failed_at + branches.subject.run.config.detector.hold_steps + branches.steps


def _before(branches: Branches[A], failed_at: int) -> list[int]:
    """Return the checkpoints before the failure, in order."""
    return [step for step in branches.subject.checkpoints if step < failed_at]


def _point_of_no_return(branches: Branches[A], failed_at: int) -> tuple[int | None, Answer]:
    """Search the checkpoints: the last one from which the twin does not explode, None if it does from all.

    From the newest back, ever further, and where it holds on from there by halves: the later, the shorter a branch.
    """
    checkpoints = _before(branches, failed_at)

    def saved(at: int) -> bool:
        branch = _to_the_horizon(branches, failed_at, branches.subject.twin, checkpoints[at])
        return branches.onset(branch) is None

    low, high, back = -1, len(checkpoints), 1  # saved up to low, lost from high on
    while high - low > 1:
        middle = max(0, len(checkpoints) - back) if low < 0 else (low + high) // 2
        low, high, back = (middle, high, back) if saved(middle) else (low, middle, 2 * back)
    last = checkpoints[low] if low >= 0 else None
    lost = f"and no longer from {checkpoints[high]:,}" if high < len(checkpoints) else "the last checkpoint"
    verdict = "the twin holds from no checkpoint" if last is None else f"the twin holds from step {last:,}, {lost}"
    horizon = _horizon(branches, failed_at)
    return last, Answer("no return", verdict, f"to step {horizon:,}; one branch a checkpoint")
