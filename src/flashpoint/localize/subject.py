"""What a localisation asks of a run: which attentions its branches may have, and to train one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from flashpoint.runs.run import Run

A = TypeVar("A")
"""How a subject describes an attention: a value that can be pickled."""


@dataclass(frozen=True)
class Trained:
    """The end of a branch.

    Attributes:
        outcome: ``stable``, ``exploded`` or ``nonfinite``.
        onset: step of the explosion, counted as the run counts; None without one.
        norms: spectral norms of W_Q, [n_layer][n_head].
    """

    outcome: str
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

    def only_in(self, layers: Sequence[int], heads: Sequence[int] | None = None) -> A:
        """Return the run's attention in some layers, and in some heads of them, and the twin elsewhere; from 1."""

    def changes(self) -> Iterator[tuple[str, A]]:
        """Return attentions that differ from the run's in a choice, each with what was changed."""

    def told(self, attention: A) -> str:
        """Return an attention's name."""

    def identity(self, attention: A, start: int) -> str:
        """Return what makes two branches from one step the same: their attention, and where it is not the run's
        folder that tells it, how they are trained and from which weights."""

    def train(self, attention: A, start: int, steps: int, folder: Path) -> Trained:
        """Train so many steps on the run's batches from a checkpoint, in a folder that does not exist.

        Raises:
            UserError: the branch cannot be trained.
        """
