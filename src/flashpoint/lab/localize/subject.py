"""What a localisation asks of a run, and answers: which attentions its branches may have, and to train one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from flashpoint.numerics.choices import Heads
from flashpoint.runs.outcome import Verdict
from flashpoint.runs.run import Run

A = TypeVar("A")
"""How a subject describes an attention: a value that can be pickled."""
Cells = NDArray[np.bool_]
"""Some heads of some layers, [n_layer, n_head]."""


@dataclass(frozen=True)
class Trained:
    """The end of a branch.

    Attributes:
        outcome: ``stable``, ``exploded`` or ``nonfinite``.
        onset: step of the explosion, counted as the run counts; None without one.
        norms: spectral norms of W_Q, [n_layer][n_head].
    """

    outcome: Verdict
    onset: int | None
    norms: list[list[float]]


class Subject(Protocol[A]):
    """A run, and how branches of it are trained. It can be pickled, for processes of other GPUs."""

    @property
    def run(self) -> Run: ...

    @property
    def checkpoints(self) -> list[int]:
        """Steps from which a branch can start, in order."""

    @property
    def whole(self) -> A:
        """The run's attention."""

    @property
    def twin(self) -> A:
        """The same with every row of dS summing to zero."""

    @property
    def second_twin(self) -> A:
        """The twin with a forward pass that rounds otherwise. Nothing but chance tells its W_Q from the twin's."""

    @property
    def divisible(self) -> bool:
        """Whether it can be restricted to layers and heads."""

    def only_in(self, cells: Cells) -> A:
        """Return the run's attention in some heads of some layers, of one at least, and the twin elsewhere."""

    def changes(self) -> Iterator[tuple[str, A]]:
        """Return attentions that differ from the run's in a choice, each with what was changed."""

    def describe(self, attention: A) -> str:
        """Return an attention's name."""

    def identity(self, attention: A, start: int) -> str:
        """Return what makes two branches from one step the same: their attention. Where it is not the run's folder that
        tells it, also how they are trained and from which weights."""

    def train(self, attention: A, start: int, steps: int, folder: Path) -> Trained:
        """Train so many steps on the run's batches from a checkpoint, in a folder that does not exist.

        Raises:
            UserError: the branch cannot be trained.
        """


def selection(cells: Cells) -> tuple[tuple[int, ...], Heads | None]:
    """Return layers and heads, from 1, as :class:`~flashpoint.numerics.variant.AttentionVariant` takes them.

    The heads are None where they are all; a tuple where they are the same in each layer; else a tuple for each layer.
    """
    layers = tuple(int(layer) + 1 for layer in np.flatnonzero(cells.any(1)))
    heads = [tuple(int(head) + 1 for head in np.flatnonzero(cells[layer - 1])) for layer in layers]
    if all(len(some) == cells.shape[1] for some in heads):
        return layers, None
    return layers, heads[0] if len(set(heads)) == 1 else tuple(heads)


def as_options(layers: tuple[int, ...], heads: Heads | None) -> str:
    """Return a selection as the command line takes it: ``layers=[2] heads=[1,3]``."""
    where = f"layers={json.dumps(layers)}" + (f" heads={json.dumps(heads)}" if heads is not None else "")
    return where.replace(", ", ",")


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
