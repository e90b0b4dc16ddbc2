"""Delta debugging: the smallest part of a set that still fails. Zeller and Hildebrandt, Simplifying and Isolating
Failure-Inducing Input (2002)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def smallest_failing(parts: Sequence[T], fails: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Return parts that fail together, of which none can be left out: ddmin.

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
        subsets = _cut(failing, pieces)
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


def _cut(parts: tuple[T, ...], pieces: int) -> list[tuple[T, ...]]:
    bounds = [round(at * len(parts) / pieces) for at in range(pieces + 1)]
    return [parts[start:end] for start, end in itertools.pairwise(bounds)]
