"""Whether the optimiser steps between the steps that a loop hands over: a micro-batch is no step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flashpoint.capture.arrivals import Arrivals, Number
from flashpoint.capture.guard import Guard
from flashpoint.capture.sharding import is_sharded

STEPS = 10
"""That are looked at, from the second step on."""
_UNCHANGED = 5
"""Of them, from which on it is told. With two micro-batches a step it is half; a schedule that begins at 0 makes one,
and a GradScaler that skips steps until its scale fits makes few."""
_PARAMETERS, _ELEMENTS = 16, 256
"""That are compared: some of each, as the rows of an embedding may have no gradient."""


class Updates:
    """Compares some weights at each of the first steps with those at the step before; no number is waited for."""

    def __init__(self, guard: Guard, arrivals: Arrivals) -> None:
        self._guard, self._arrivals = guard, arrivals
        self._parameters: list[nn.Parameter] | None = None
        self._before: Tensor | None = None
        self._same: Tensor | float = 0.0  # steps so far with the weights of the step before
        self._left = STEPS

    def take(self, model: nn.Module) -> None:
        """Look at the weights of a step, before or after it."""
        if not self._left:
            return
        if self._parameters is None:
            self._parameters = _some_trained(model)
        if not self._parameters:
            return
        before, self._before = self._before, torch.cat([one.detach().flatten()[:_ELEMENTS] for one in self._parameters])
        if before is None:
            return
        self._same = self._same + (self._before == before).all()
        self._left -= 1
        if not self._left:
            self._arrivals.ask("comparing weights", [self._same], self._judge)
            self._same, self._before = 0.0, None

    def _judge(self, read: Sequence[Number]) -> None:
        if (same := int(read[0])) >= _UNCHANGED:
            self._guard.tell(
                f"in {same} of {STEPS} steps the weights were those of the step before; if these are micro-batches, "
                "call watched.step once an optimiser step, with their mean loss"
            )


def _some_trained(model: nn.Module) -> list[nn.Parameter]:
    """Return parameters with gradients, spread over the model, on one device; none where processes share them."""
    if is_sharded(model):
        return []
    trained = [one for one in model.parameters() if one.grad is not None and one.numel()]
    there = [one for one in trained if one.device == trained[0].device]
    return there[:: max(1, len(there) // _PARAMETERS)][:_PARAMETERS]
