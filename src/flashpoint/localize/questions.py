"""Which layers, heads and choices of an attention make W_Q grow, and from when on nothing helps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flashpoint.localize.branches import Branches, Effect, OutOfTimeError, exact, only_in
from flashpoint.localize.search import smallest_failing
from flashpoint.numerics.choices import UNROUNDED
from flashpoint.numerics.variant import ROUNDING_POINTS, AttentionVariant


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


REMEDIES: dict[str, dict[str, Any]] = {
    **{f"{symbol} is not rounded": {point: UNROUNDED} for point, symbol in ROUNDING_POINTS.items()},
    "δ of an unrounded O": {"delta": "out_fp32", "out_residual_bits": None},
    "δ = rowsum(P∘dP)": {"delta": "p_dp", "out_residual_bits": None},
    "one block of keys": {"block_k": None},
    "m is the row maximum": {"shift": "rowmax"},
    "keys centred in dQ": {"center_grad_q": True},
}
"""Changes of one choice, by what they do. One that changes nothing in a variant is not asked."""


def answers(branches: Branches) -> Iterator[Answer]:
    """Ask all questions, each once the ones before it are answered. The last answer says so if time ran out.

    Raises:
        UserError: the run does not outgrow its twin.
    """
    try:
        yield from _asked(branches)
    except OutOfTimeError:
        yield Answer("time", "over: what follows is undecided; the same command goes on from here", "")


def _asked(branches: Branches) -> Iterator[Answer]:
    variant, twin = branches.variant, branches.twin
    model = branches.run.config["model"]
    whole = branches.effect(variant)
    starts = ", ".join(f"{start:,}" for start in branches.starts)
    yield Answer("criterion", f"W_Q against the twin's after {branches.steps:,} steps from {starts}", whole.told)
    found = list(range(1, model["n_layer"] + 1))
    if variant.elsewhere is None:
        layers = _smallest(found, lambda some: branches.effect(only_in(variant, twin, some)))
        yield from _told("layers", layers, found, branches, lambda some: only_in(variant, twin, some))
        every = list(range(1, model["n_head"] + 1))
        heads = _smallest(every, lambda some: branches.effect(_in_heads(variant, twin, layers, some, every)))
        yield from _told(
            "heads", heads, every, branches, lambda some: _in_heads(variant, twin, layers, some, every), of=layers
        )
    for name, changed in _changes(variant):
        effect = branches.effect(changed)
        verdict = "does not stop the growth" if effect.grows else "stops the growth"
        yield Answer("choice", f"{name}: {verdict}", effect.told)
    yield _point_of_no_return(branches, twin)


def _smallest(every: list[int], effect: Callable[[Sequence[int]], Effect]) -> list[int]:
    """Return the smallest set that grows; where one alone does, all that do alone."""
    found = list(smallest_failing(every, lambda some: effect(some).grows))
    return found if len(found) > 1 else [one for one in every if one == found[0] or effect([one]).grows]


def _in_heads(
    variant: AttentionVariant, twin: AttentionVariant, layers: list[int], heads: Any, every: list[int]
) -> AttentionVariant:
    return only_in(variant, twin, layers, None if list(heads) == every else heads)


def _told(
    what: str, found: list[int], every: list[int], branches: Branches, only: Any, of: list[int] | None = None
) -> Iterator[Answer]:
    """Return that the found ones are sufficient, and whether the others alone grow: then they are not necessary."""
    where = f" of {_words('layer', of)}" if of else ""
    alone: list[Effect] = [branches.effect(only([one])) for one in found]
    if all(effect.grows for effect in alone):
        for one, effect in zip(found, alone, strict=True):
            yield Answer(what, f"{_words(what[:-1], [one])}{where} alone: sufficient", effect.told)
    else:
        together: Effect = branches.effect(only(found))
        yield Answer(what, f"{_words(what[:-1], found)}{where} together: sufficient, none alone", together.told)
    if others := [one for one in every if one not in found]:
        without: Effect = branches.effect(only(others))
        verdict = "not necessary: the others grow without" if without.grows else "necessary: the others do not grow"
        yield Answer(what, f"{_words(what[:-1], found)}{where}: {verdict}", without.told)


def _words(noun: str, numbers: list[int]) -> str:
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _changes(variant: AttentionVariant) -> Iterator[tuple[str, AttentionVariant]]:
    """Return the variants that differ from one in one choice, each with what was changed."""
    for name, change in REMEDIES.items():
        try:
            changed = dataclasses.replace(variant, name=f"{variant.name}, {name}", **change)
        except ValueError:  # another choice needs this one
            continue
        if changed.effective_choices != variant.effective_choices:
            yield name, changed


def _point_of_no_return(branches: Branches, twin: AttentionVariant) -> Answer:
    """Bisect over the checkpoints: the last one from which the twin does not explode."""
    checkpoints = [step for step in branches.checkpoints if step < branches.onset]
    horizon = branches.onset + branches.run.config["detector"]["hold_steps"] + branches.steps

    def saved(at: int) -> bool:
        return not branches.explodes(exact(twin), checkpoints[at], horizon - checkpoints[at])

    low, high = -1, len(checkpoints)  # saved up to low, lost from high on
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if saved(middle) else (low, middle)
    until = f"the twin holds from step {checkpoints[low]:,}" if low >= 0 else "the twin holds from no checkpoint"
    lost = f", and no longer from {checkpoints[high]:,}" if high < len(checkpoints) else ", the last checkpoint"
    return Answer("no return", until + lost, f"to step {horizon:,}; onset {branches.onset:,}; one branch a checkpoint")
