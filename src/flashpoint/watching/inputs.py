"""What a watched model was given in a forward pass, by which a sequence that comes again is known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashpoint.diagnosis.repeats import digests
from flashpoint.watching.batches import tensors_in
from flashpoint.watching.left_out import is_transformed


class ModelInputs:
    """Copies of the first sequences that forward passes of one step were given.

    Args:
        sequences: of a batch that are copied.
    """

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._given: dict[int, list[tuple[int, Tensor]]] = {}

    def keep_at_least(self, sequences: int) -> None:
        """Copy so many sequences from now on."""
        self._sequences = max(self._sequences, sequences)

    def take(self, forward: int, *given: Any) -> None:
        """Copy what a forward pass of this number is given: a loop may refill its tensors.

        What has a gradient moves with the weights, and tells no repetition.
        """
        tensors = (x for x in tensors_in(given) if x.dim() > 1 and not x.requires_grad and not is_transformed(x))
        self._given[forward] = [
            (len(x), x[: self._sequences].detach().to(torch.device("cpu"), copy=True)) for x in tensors
        ]

    def identities(self, forward: int, rows: int, first: int) -> tuple[str, ...]:
        """Return the identities of the first sequences of a forward pass, of so many rows; empty where no tensor that
        it was given shows them. A sequence keeps its identity when weights move."""
        return digests([x[:first] for count, x in self._given.get(forward, ()) if count == rows and len(x) >= first])
