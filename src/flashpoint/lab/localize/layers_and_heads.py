"""Layers, and heads of some layers: which of them make W_Q grow."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Generic, TypeVar

import numpy as np

from flashpoint.lab.localize.growth import Effect, Measure
from flashpoint.lab.localize.subject import A, Answer, Cells, Subject

T = TypeVar("T")
Part = tuple[int, ...]
"""A layer, ``(layer,)``, or a head of a layer, ``(layer, head)``; both count from 1."""


@dataclass(frozen=True)
class Parts(Generic[A]):
    """The layers of a model, or the heads of some layers, each head of each layer a part of its own.

    Attributes:
        layers: whose heads are the parts; None where the layers are.
    """

    subject: Subject[A]
    layers: tuple[int, ...] | None = None

    @property
    def question(self) -> str:
        return "layers" if self.layers is None else "heads"

    @property
    def every(self) -> list[Part]:
        layers, heads = self._shape
        if self.layers is None:
            return [(layer,) for layer in range(1, layers + 1)]
        return [(layer, head) for layer in self.layers for head in range(1, heads + 1)]

    def only(self, some: Sequence[Part]) -> A:
        """Return the run's attention in some parts, and the twin elsewhere."""
        return self.subject.only_in(self.cells(some))

    def cells(self, some: Sequence[Part]) -> Cells:
        """Return the heads of some parts, [n_layer, n_head]."""
        cells = np.zeros(self._shape, np.bool_)
        for part in some:
            cells[tuple(number - 1 for number in part)] = True
        return cells

    def named(self, some: Sequence[Part]) -> str:
        """Return their names: ``heads 2, 3 of layer 2 and head 1 of layer 3``."""
        if self.layers is None:
            return _words("layer", [layer for (layer,) in some])
        by_layer = itertools.groupby(some, itemgetter(0))
        return " and ".join(f"{_words('head', [head for _, head in own])} of layer {layer}" for layer, own in by_layer)

    @property
    def _shape(self) -> tuple[int, int]:
        model = self.subject.run.shape
        return model.n_layer, model.n_head


def _words(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def growing_alone(parts: Parts[A], measure: Measure[A]) -> dict[Part, Effect]:
    """Return, of each part that grows in the run, how much it grows where it alone has the run's attention.

    It is measured in its own heads, and from the starts from which they grow. From different starts different heads
    grow, and one that does not grow in the run says nothing of its attention.
    """
    growing = [one for one in parts.every if measure.growing(parts.cells([one]))]
    measure.prepare([parts.only([one]) for one in growing])
    return {one: measure.effect(parts.only([one]), parts.cells([one])) for one in growing}


def smallest(parts: Parts[A], measure: Measure[A], alone: dict[Part, Effect]) -> list[Part]:
    """Return the parts that make W_Q grow.

    They are those that grow alone, if together they have more than half of the run's growth. Otherwise parts act on
    one another, and delta debugging over all of them finds a smallest set with more than half.
    """

    def grows(some: Sequence[Part]) -> bool:
        return measure.effect(parts.only(some)).grows

    found = [one for one, effect in alone.items() if effect.grows]
    if found and grows(found):
        return found
    if measure.branches.gpus > 1:
        measure.prepare([parts.only([one]) for one in parts.every])
    return list(smallest_failing(parts.every, grows))


def sufficient_and_necessary(
    parts: Parts[A], found: list[Part], alone: dict[Part, Effect], measure: Measure[A]
) -> Iterator[Answer]:
    """Say whether the parts are sufficient, each and together, and necessary: whether nothing grows without them."""
    if list(alone) != found or len(found) > 1:
        for one, effect in alone.items():
            verdict = sure(effect, "grows" if effect.grows else "does not grow", "whether it grows")
            yield Answer(parts.question, f"{parts.named([one])} alone: {verdict}", effect.evidence)
    effect = measure.effect(parts.only(found))
    together = "together" if len(found) > 1 else "alone"
    verdict = sure(effect, "sufficient" if effect.grows else "not sufficient", "whether sufficient")
    yield Answer(parts.question, f"{parts.named(found)} {together}: {verdict}", effect.evidence)
    if others := [one for one in parts.every if one not in found]:
        without = measure.effect(parts.only(others))
        verdict = "not necessary: the others grow without" if without.grows else "necessary: the others do not grow"
        verdict = sure(without, verdict, "whether necessary")
        yield Answer(parts.question, f"{parts.named(found)}: {verdict}", without.evidence)


def sure(effect: Effect, verdict: str, question: str) -> str:
    """Return a verdict, or that the starts leave it open; of one start, which has no interval, that it is one."""
    if effect.starts == 1:
        return f"{verdict}, from one start"
    return verdict if effect.decided else f"undecided {question}"


def smallest_failing(parts: Sequence[T], fails: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Return parts that fail together, of which none can be left out: delta debugging (ddmin).

    Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input (2002).

    Args:
        parts: that fail together.
        fails: whether some of them, in their order, fail. It is asked once for each choice.
    """
    answers: dict[tuple[T, ...], bool] = {}

    def asked(some: tuple[T, ...]) -> bool:
        if some not in answers:
            answers[some] = fails(some)
        return answers[some]

    failing, pieces = tuple(parts), 2
    while len(failing) > 1:
        subsets = _split(failing, pieces)
        complements = [tuple(part for part in failing if part not in subset) for subset in subsets]
        if smaller := next((subset for subset in subsets if asked(subset)), None):
            failing, pieces = smaller, 2
        elif pieces > 2 and (smaller := next((one for one in complements if asked(one)), None)):
            failing, pieces = smaller, max(2, pieces - 1)
        elif pieces == len(failing):
            break
        else:
            pieces = min(len(failing), 2 * pieces)
    return failing


def _split(parts: tuple[T, ...], pieces: int) -> list[tuple[T, ...]]:
    bounds = [round(at * len(parts) / pieces) for at in range(pieces + 1)]
    return [parts[start:end] for start, end in itertools.pairwise(bounds)]
