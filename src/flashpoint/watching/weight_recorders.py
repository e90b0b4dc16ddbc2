"""Recorders of a watched loop's weights: norms of W_Q and W_K with the early warning, and loops that hand over
micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from flashpoint.early_warning import LOOKBACK, Sentinel
from flashpoint.runs.metric_table import W_Q_NORM
from flashpoint.watching.arrivals import Arrivals, Number
from flashpoint.watching.events import CaptureWanted, Handler, Publish, StepEnded
from flashpoint.watching.left_out import is_sharded
from flashpoint.watching.notices import Notices
from flashpoint.watching.observer import Observer
from flashpoint.watching.projections import spectral_norms
from flashpoint.watching.watched_run import WatchedRun

STEPS = 10
"""That are looked at, from the second step on."""
_UNCHANGED = 5
"""Of them, from which on it is told. With two micro-batches a step it is half."""
_PARAMETERS, _ELEMENTS = 16, 256
"""That are compared."""


@dataclass(frozen=True, slots=True)
class _NormsArrived:
    """Norms of a step can be read: of each metric [layers, H] float32."""

    step: int
    names: Sequence[str]
    numbers: Sequence[Number]


class WeightNorms:
    """Logs the spectral norms of W_Q and W_K at an interval, and has a head captured that grows as before an explosion.

    Args:
        observer: knows the matrices, once it has found them.
        sentinel: judges the norms.
    """

    def __init__(
        self,
        observer: Observer,
        interval: int,
        run: WatchedRun,
        sentinel: Sentinel,
        arrivals: Arrivals,
        publish: Publish,
    ) -> None:
        self._observer, self._interval, self._run = observer, interval, run
        self._sentinel, self._arrivals, self._publish = sentinel, arrivals, publish

    @property
    def handlers(self) -> Sequence[Handler]:
        """What it does, by event."""
        what = "measuring W_Q and W_K"
        return Handler(StepEnded, what, self._measure), Handler(_NormsArrived, what, self._log)

    def _measure(self, event: StepEnded) -> None:
        projections = self._observer.projections
        if projections and (event.step + 1) % self._interval == 0:
            norms = [spectral_norms(some) for some in projections.values()]
            self._arrivals.ask(_NormsArrived(event.step, tuple(projections), norms))

    def _log(self, event: _NormsArrived) -> None:
        read = zip(event.names, event.numbers, strict=True)
        norms = {name: cast(Tensor, one).cpu().double().numpy() for name, one in read}
        self._run.log(event.step, norms)
        if W_Q_NORM.name in norms and (warning := self._sentinel.update(event.step, norms[W_Q_NORM.name])):
            reason = (
                f"W_Q of layer {warning.layer}, head {warning.head} has grown ×{warning.growth:.1f} in {LOOKBACK} "
                f"steps, to {warning.norm:.1f}: an explosion may follow"
            )
            self._publish(CaptureWanted(reason, warning.layer))


@dataclass(frozen=True, slots=True)
class _SameArrived:
    """The number of steps with the weights of the step before can be read."""

    numbers: Sequence[Number]


class MicroBatches:
    """Tells whether a loop hands over micro-batches: gradients are added to those before, and the weights are the same.

    Compares some weights at each of the first steps with those at the step before; no number is waited for.

    The weights alone do not tell: they stand still where a loop trains nothing, where a GradScaler skips a step, and
    where an update is too small for BF16. There ``zero_grad`` makes new gradients.
    """

    def __init__(self, model: nn.Module, arrivals: Arrivals, notices: Notices) -> None:
        self._model, self._arrivals, self._notices = model, arrivals, notices
        self._parameters: list[nn.Parameter] | None = None
        self._before: tuple[Tensor, int] | None = None
        self._same: Tensor | float = 0.0  # steps so far that added to the gradients of the weights of the step before
        self._left = STEPS

    @property
    def handlers(self) -> Sequence[Handler]:
        """What it does, by event."""
        what = "comparing weights"
        return Handler(StepEnded, what, self._take), Handler(_SameArrived, what, self._judge)

    def _take(self, _: StepEnded) -> None:
        """Look at the weights and the gradients of a step."""
        if not self._left:
            return
        if not self._parameters:
            if self._parameters is None and is_sharded(self._model):  # to compare would be to wait for other processes
                self._left = 0
                return
            self._parameters = _some_trained(self._model)  # none at a step without gradients
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
            self._arrivals.ask(_SameArrived([self._same]))
            self._same, self._before = 0.0, None

    def _judge(self, event: _SameArrived) -> None:
        if (same := int(event.numbers[0])) >= _UNCHANGED:
            self._notices.warn(
                f"in {same} of {STEPS} steps the weights were those of the step before, and gradients were added to "
                "its own; if these are micro-batches, call watched.step once an optimiser step, with their mean loss"
            )


def _some_trained(model: nn.Module) -> list[nn.Parameter]:
    """Return parameters with gradients, spread over the model, on one device."""
    trained = [one for one in model.parameters() if one.grad is not None and one.numel() and not one.is_meta]
    there = [one for one in trained if one.device == trained[0].device]
    return there[:: max(1, len(there) // _PARAMETERS)][:_PARAMETERS]
