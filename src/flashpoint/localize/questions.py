"""Which layers, heads and choices of an attention make W_Q grow, and from when on nothing helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flashpoint.localize.branches import Branches, Effect, OutOfTimeError
from flashpoint.localize.search import smallest_failing
from flashpoint.localize.subject import A


@dataclass(frozen=True)
class Answer:
    """One verdict.

    Attributes:
        question: what was asked, e.g. ``layers``.
        verdict: the answer in words.
        evidence: the growth of the branches that decide it.
    """

    question: str
    verdict: str
    evidence: str


def answers(branches: Branches[A]) -> Iterator[Answer]:
    """Ask all questions, each once the ones before it are answered. The last answer says so if time ran out.

    Raises:
        UserError: the run does not outgrow its twin, or a branch cannot be trained.
    """
    try:
        yield from _asked(branches)
    except OutOfTimeError:
        yield Answer("time", "over: what follows is undecided; the same command goes on from here", "")


def _asked(branches: Branches[A]) -> Iterator[Answer]:
    subject = branches.subject
    model = subject.run.config["model"]
    branches.choose_starts()
    whole = branches.effect(subject.whole)
    starts = ", ".join(f"{start:,}" for start in branches.starts)
    yield Answer("criterion", f"W_Q against the twin's after {branches.steps:,} steps from {starts}", whole.told)
    found, without = subject.whole, subject.twin
    if subject.divisible:
        every = list(range(1, model["n_layer"] + 1))
        layers = _smallest(every, branches, subject.only_in)
        yield from _told("layers", layers, every, branches, subject.only_in)
        heads = list(range(1, model["n_head"] + 1))

        def of_heads(some: Sequence[int]) -> A:
            return subject.only_in(layers, None if list(some) == heads else some)

        chosen = _smallest(heads, branches, of_heads)
        yield from _told("heads", chosen, heads, branches, of_heads, of=layers)
        found = of_heads(chosen)
        others = [layer for layer in every if layer not in layers]
        without = subject.only_in(others) if others else subject.twin
    changes = list(subject.changes())
    if branches.side_by_side:
        branches.prepare([changed for _, changed in changes])
    for name, changed in changes:
        effect = branches.effect(changed)
        verdict = "does not stop the growth" if effect.grows else "stops the growth"
        yield Answer("choice", f"{name}: {_sure(effect, verdict, 'whether it stops the growth')}", effect.told)
    if branches.failed_at is not None:
        last, answer = _point_of_no_return(branches, branches.failed_at)
        yield answer
        start = branches.starts[0] if last is None else min(last, branches.starts[-1])
        yield from _confirmed(branches, branches.failed_at, start, found, without)


def _smallest(every: list[int], branches: Branches[A], only: Callable[[Sequence[int]], A]) -> list[int]:
    """Return the smallest set that grows; where one alone does, all that do alone."""
    if branches.side_by_side:
        branches.prepare([only([one]) for one in every])
    found = list(smallest_failing(every, lambda some: branches.effect(only(some)).grows))
    return found if len(found) > 1 else [one for one in every if one == found[0] or branches.effect(only([one])).grows]


def _told(
    what: str,
    found: list[int],
    every: list[int],
    branches: Branches[A],
    only: Callable[[Sequence[int]], A],
    of: list[int] | None = None,
) -> Iterator[Answer]:
    """Return that the found ones are sufficient, and whether the others alone grow: then they are not necessary."""
    where = f" of {_words('layer', of)}" if of else ""
    alone: list[Effect] = [branches.effect(only([one])) for one in found]
    if not all(effect.grows for effect in alone):
        together: Effect = branches.effect(only(found))
        verdict = _sure(together, "sufficient", "whether sufficient")
        yield Answer(what, f"{_words(what[:-1], found)}{where} together: {verdict}", together.told)
    for one, effect in zip(found, alone, strict=True):
        verdict = _sure(effect, "sufficient" if effect.grows else "not sufficient", "whether sufficient")
        yield Answer(what, f"{_words(what[:-1], [one])}{where} alone: {verdict}", effect.told)
    if others := [one for one in every if one not in found]:
        without: Effect = branches.effect(only(others))
        verdict = "not necessary: the others grow without" if without.grows else "necessary: the others do not grow"
        verdict = _sure(without, verdict, "whether necessary")
        yield Answer(what, f"{_words(what[:-1], found)}{where}: {verdict}", without.told)


def _sure(effect: Effect, verdict: str, question: str) -> str:
    """Return a verdict, or that the starts leave it open."""
    return verdict if effect.decided else f"undecided {question}"


def _words(noun: str, numbers: list[int]) -> str:
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _confirmed(branches: Branches[A], failed_at: int, start: int, found: A, without: A) -> Iterator[Answer]:
    """Train what was found, and the attention without it, up to the failure and on."""
    end = _horizon(branches, failed_at)
    for name, attention in (("what was found alone", found), ("the attention without it", without)):
        onset = branches.onset(attention, start, end - start)
        verdict = "does not explode" if onset is None else f"explodes at {onset:,}"
        yield Answer("onset", f"{name}: {verdict}", f"from step {start:,} to {end:,}; the run failed at {failed_at:,}")


def _horizon(branches: Branches[A], failed_at: int) -> int:
    """The step up to which a branch is trained to see whether it explodes."""
    return failed_at + int(branches.subject.run.config["detector"]["hold_steps"]) + branches.steps


def _point_of_no_return(branches: Branches[A], failed_at: int) -> tuple[int | None, Answer]:
    """Bisect over the checkpoints: the last one from which the twin does not explode, None if it does from all."""
    checkpoints = [step for step in branches.subject.checkpoints if step < failed_at]
    horizon = _horizon(branches, failed_at)

    def saved(at: int) -> bool:
        return branches.onset(branches.subject.twin, checkpoints[at], horizon - checkpoints[at]) is None

    low, high = -1, len(checkpoints)  # saved up to low, lost from high on
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if saved(middle) else (low, middle)
    until = f"the twin holds from step {checkpoints[low]:,}" if low >= 0 else "the twin holds from no checkpoint"
    lost = f", and no longer from {checkpoints[high]:,}" if high < len(checkpoints) else ", the last checkpoint"
    last = checkpoints[low] if low >= 0 else None
    return last, Answer("no return", until + lost, f"to step {horizon:,}; one branch a checkpoint")
