"""Whether a loop hands over micro-batches: gradients are added to those before, and the weights are the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flashpoint.watching.arrivals import Arrivals, Number
from flashpoint.watching.guard import Guard
from flashpoint.watching.sharding import is_sharded

STEPS = 10
"""That are looked at, from the second step on."""
_UNCHANGED = 5
"""Of them, from which on it is told. With two micro-batches a step it is half."""
_PARAMETERS, _ELEMENTS = 16, 256
"""That are compared."""


class Updates:
    """Compares some weights at each of the first steps with those at the step before; no number is waited for.

    The weights alone do not tell: they stand still where a loop trains nothing, where a GradScaler skips a step, and
    where an update is too small for BF16. There ``zero_grad`` makes new gradients.
    """

    def __init__(self, guard: Guard, arrivals: Arrivals) -> None:
        self._guard, self._arrivals = guard, arrivals
        self._parameters: list[nn.Parameter] | None = None
        self._before: tuple[Tensor, int] | None = None
        self._same: Tensor | float = 0.0  # steps so far that added to the gradients of the weights of the step before
        self._left = STEPS

    def take(self, model: nn.Module) -> None:
        """Look at the weights and the gradients of a step."""
        if not self._left:
            return
        if not self._parameters:
            if self._parameters is None and is_sharded(model):  # to compare would be to wait for other processes
                self._left = 0
                return
            self._parameters = _some_trained(model)  # none at a step without gradients
        if not self._parameters:
            return
        now = torch.cat([one.detach().flatten()[:_ELEMENTS] for one in self._parameters])
        # A version counts the writes to a gradient in place; a new gradient begins at 0.
        written = sum(one.grad._version for one in self._parameters if one.grad is not None)
        before, self._before = self._before, (now, written)
        if before is None:
            return
        if written > before[1]:
            self._same = self._same + (now == before[0]).all()
        self._left -= 1
        if not self._left:
            self._arrivals.ask("comparing weights", [self._same], self._judge)
            self._same, self._before = 0.0, None

    def _judge(self, read: Sequence[Number]) -> None:
        if (same := int(read[0])) >= _UNCHANGED:
            self._guard.tell(
                f"in {same} of {STEPS} steps the weights were those of the step before, and gradients were added to "
                "its own; if these are micro-batches, call watched.step once an optimiser step, with their mean loss"
            )


def _some_trained(model: nn.Module) -> list[nn.Parameter]:
    """Return parameters with gradients, spread over the model, on one device."""
    trained = [one for one in model.parameters() if one.grad is not None and one.numel() and not one.is_meta]
    there = [one for one in trained if one.device == trained[0].device]
    return there[:: max(1, len(there) // _PARAMETERS)][:_PARAMETERS]
