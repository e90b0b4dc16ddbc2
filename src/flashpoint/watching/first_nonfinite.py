"""Records in which step, pass and tensor of a watched loop NaN or infinity appears first.

Weights and gradients give their largest magnitudes at every step. So the step and the pass are known, also of a model
that is compiled or whose attention is not found. Tensors of attentions give theirs in observed steps, of whole batches
and also where the call is left out. The numbers stay on the device until losses are read, and nothing waits for it.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from flashpoint.errors import counted
from flashpoint.watching.arrivals import Arrivals, Number
from flashpoint.watching.events import (
    AttentionCalled,
    AttentionRan,
    CallLeftOut,
    ForwardStarted,
    Handler,
    LastRead,
    LoopEnded,
    LossesRead,
    ReadDue,
    StepEnded,
)
from flashpoint.watching.latest_batches import LatestBatches, tensors_in
from flashpoint.watching.left_out import is_sharded, is_transformed, local
from flashpoint.watching.nonfinite_numbers import Asked, CallMagnitudes, Groups, StepNumbers, largest_magnitudes
from flashpoint.watching.notices import Notices
from flashpoint.watching.projections import ByMetric, ProjectedGradients
from flashpoint.watching.watched_run import WatchedRun

_MOST = 8
"""Places in which NaN or infinity comes and goes that are told of a run, and steps: a batch may bring it again."""


@dataclass(frozen=True, slots=True)
class _MagnitudesArrived:
    """The largest magnitudes of some steps can be read."""

    asked: Sequence[Asked]
    numbers: Sequence[Number]


class FirstNonfinite:
    """Tells and writes where NaN or infinity came from, once a loss or the weights hold it.

    Where gradients alone hold it, that is told once, and counted: a GradScaler skips such steps.

    Args:
        projections: returns the matrices of q and k by metric, once a step has shown them.
        gradients: returns those of parameters, or what stands for them.
        by_token: names of functions whose tensors are [B, T, H, d].
        interval: steps between looks at which parameters there are.
    """

    def __init__(
        self,
        model: nn.Module,
        projections: Callable[[], ByMetric | None],
        gradients: Callable[[Sequence[nn.Parameter]], Sequence[Tensor | None]],
        by_token: Collection[str],
        interval: int,
        batches: LatestBatches,
        run: WatchedRun,
        arrivals: Arrivals,
        notices: Notices,
    ) -> None:
        self._model, self._projections, self._gradients = model, projections, gradients
        self._interval = interval
        self._batches, self._run, self._arrivals, self._notices = batches, run, arrivals, notices
        self._calls = CallMagnitudes(by_token)
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._sharded = False
        self._by_head: ProjectedGradients | None = None
        self._began: Groups = ()
        self._updated = False
        self._pending: list[tuple[Asked, list[Number]]] = []
        self._losses: dict[int, float] = {}
        self._bad_batches: set[int] = set()
        self._before: StepNumbers | None = None
        self._usual: set[tuple[int, str]] = set()  # forward tensors that are not finite where nothing fails
        self._usual_weights: frozenset[str] = frozenset()  # not finite from the start, as a mask is, while the loss is
        self._told = 0
        self._place: tuple[int, object] | None = None  # the latest one, and its step
        self._again: list[int] = []  # steps in which it came where it had come in the one before
        self._gradients_alone: list[int] = []  # steps
        self._lasting = False

    @property
    def handlers(self) -> Sequence[Handler]:
        """What it does, by event."""
        what = "looking for the first NaN"
        return (
            Handler(ForwardStarted, what, self._begin_forward),
            Handler(AttentionRan, what, self._look_at_call),
            Handler(AttentionCalled, what, self._calls.keep),
            Handler(CallLeftOut, what, self._calls.leave_out),
            Handler(StepEnded, what, lambda event: self._take(event.step)),
            Handler(LossesRead, what, self._read_losses),
            Handler(ReadDue, what, lambda _: self._ask()),
            Handler(LastRead, what, lambda _: self._take_last()),
            Handler(_MagnitudesArrived, what, self._judge),
            Handler(LoopEnded, what, lambda _: self._tell_count()),
        )

    @torch.no_grad()
    def _begin_forward(self, _: ForwardStarted) -> None:
        """Take the magnitudes of the weights of a forward pass that is observed: they tell whether the loop calls
        ``watched.step`` after the optimizer has stepped."""
        # While fully_shard has weights together they are other tensors, whose memory it gives up after the pass.
        gathered = not self._parameters and is_sharded(self._model)
        if not (self._lasting or gathered):
            self._find_parameters()
            if any(map(is_transformed, self._parameters)):  # of functional_call inside torch.vmap, and not the model's
                self._parameters = []
                return
            self._began = largest_magnitudes([self._own(one) for one in self._parameters])

    def _look_at_call(self, event: AttentionRan) -> None:
        if not self._lasting:
            self._calls.look(event)

    @torch.no_grad()
    def _take(self, step: int, *, after: bool = False) -> None:
        """Take the magnitudes of a step; ``after`` the last one of the weights alone."""
        seen = self._calls.taken()
        if self._lasting:
            return
        if (step + 1) % self._interval == 0:
            self._parameters = []
        self._find_parameters()
        began, self._began = self._began, ()
        weights = largest_magnitudes([self._own(one) for one in self._parameters])
        gradients = [] if after else largest_magnitudes([*map(self._own, self._gradients(self._parameters))])
        projected = {} if after else self._of_projections()
        of_parameters = [[largest for _, largest in groups] for groups in (began, weights, gradients)]
        asked = Asked(
            step,
            [places for places, _ in began],
            [places for places, _ in weights],
            [places for places, _ in gradients],
            self._names,
            tuple(projected),
            [(call, name) for call, name, _ in seen],
        )
        numbers = [one for part in (*of_parameters, projected.values()) for one in part]
        self._pending.append((asked, [*numbers, *(number for *_, number in seen)]))

    def _find_parameters(self) -> None:
        if not self._parameters:
            named = list(self._model.named_parameters())
            self._names, self._parameters = [name for name, _ in named], [one for _, one in named]
            self._sharded = is_sharded(self._model)

    def _own(self, tensor: Any) -> Any:
        """Return the part of a tensor that this process holds, None where its memory has been given up."""
        if not self._sharded or tensor is None:
            return tensor
        own = local(tensor)
        return own if own.untyped_storage().nbytes() else None

    def _of_projections(self) -> dict[str, Tensor]:
        found = self._projections()
        if not found or len(found) < 2:
            return {}
        if self._by_head is None or self._by_head.matrices is not found:
            self._by_head = ProjectedGradients(found)
        return self._by_head.largest()

    def _take_last(self) -> None:
        """Take the weights that the last step made, too, and have everything read."""
        if self._pending or self._before is not None:
            last = self._pending[-1][0].step if self._pending else cast(StepNumbers, self._before).step
            self._take(last + 1, after=True)
        self._ask()

    def _ask(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            numbers = [number for _, some in pending for number in some]
            self._arrivals.ask(_MagnitudesArrived([asked for asked, _ in pending], numbers))

    def _read_losses(self, event: LossesRead) -> None:
        """Keep losses until the magnitudes of their steps come, and look at batches while they are held."""
        if self._lasting:
            return
        self._losses |= event.losses
        for step, loss in event.losses.items():
            if not math.isfinite(loss) and _holds_nonfinite(self._batches.of(step)[0]):
                self._bad_batches.add(step)

    def _judge(self, event: _MagnitudesArrived) -> None:
        numbers = iter(cast(Sequence[Tensor], event.numbers))
        for asked in event.asked:
            own = [next(numbers) for _ in range(asked.count)]
            now = self._found(asked, own)
            self._updated |= now.moved or self._is_updated(now)
            if self._updated:  # its weights are those of the next step
                if self._before is None:
                    self._judge_step(dataclasses.replace(now, weights=now.began or {}))
                self._before = dataclasses.replace(now, weights={})
                made = {name: value for name, value in now.weights.items() if name not in self._usual_weights}
                now = StepNumbers(now.step + 1, weights=made)
            self._judge_step(now)
            self._before = now

    def _is_updated(self, now: StepNumbers) -> bool:
        """Whether weights that are not finite are those that the step made itself: with them its loss would not be
        finite, and nothing of the step before accounts for them."""
        before = self._before
        explained = before is None or bool(before.gradients) or not _is_finite(before.loss)
        made = bool(now.gradients) or now.lacks_gradients
        return not explained and bool(now.weights) and _is_finite(now.loss) and made

    def _judge_step(self, now: StepNumbers) -> None:
        """Tell where NaN or infinity came from, once the weights that the step before made are known."""
        if self._lasting:
            return
        before = self._before
        if before is None and now.weights and _is_finite(now.loss):
            self._usual_weights = frozenset(now.weights)
            return
        failed = before is not None and before.loss is not None and not math.isfinite(before.loss)
        if not (failed or now.weights):
            if before is not None and before.gradients:
                self._tell_gradients_alone(before, now)
            elif before is not None:
                self._usual |= {(call.number, name) for call, name, _ in before.tensors if name in ("q", "k", "v", "O")}
            return
        from flashpoint.watching.nonfinite_origin import find_origin

        origin = find_origin(before, now, self._usual)
        self._lasting = origin.lasting
        place = origin.where, origin.tensors, origin.call, origin.heads, origin.parameters, origin.lasting
        goes_on, self._place = self._place == (origin.step - 1, place), (origin.step, place)
        if goes_on:
            self._again.append(origin.step)
        elif origin.lasting or self._told < _MOST:
            self._told += 1
            self._notices.tell(f"step {origin.step:,}: {origin.text}", logging.WARNING)
            self._run.note_nonfinite(origin)

    def _tell_gradients_alone(self, before: StepNumbers, now: StepNumbers) -> None:
        """Tell of the first step whose gradients hold NaN or infinity while its loss and the next weights do not."""
        self._gradients_alone.append(before.step)
        if len(self._gradients_alone) == 1:
            from flashpoint.watching.nonfinite_origin import find_origin

            origin = find_origin(before, now, self._usual)
            self._notices.tell(
                f"step {before.step:,}: gradients alone held NaN or infinity, as where a GradScaler skips the update "
                f"(later ones are counted at the end of the loop): {origin.text}",
                logging.WARNING,
            )

    def _tell_count(self) -> None:
        if len(steps := self._gradients_alone) > 1:
            self._notices.tell(
                f"gradients of {len(steps):,} steps held NaN or infinity, and losses and weights did not: "
                f"{_first_of(steps)}"
            )
        if steps := self._again:
            again = f"in {counted('step', len(steps))}: {_first_of(steps)}"
            self._notices.tell(f"NaN or infinity came where it had come in the step before, {again}")

    def _found(self, asked: Asked, numbers: Sequence[Tensor]) -> StepNumbers:
        """Return what is not finite in a step."""
        whole = [some.double().flatten().numpy() for some in numbers]
        began, weights, gradients = _parts(whole, map(len, (asked.began, asked.weights, asked.gradients)))
        same = len(began) != len(weights) or np.array_equal(began, weights, equal_nan=True)
        now = StepNumbers(
            asked.step,
            self._losses.pop(asked.step, None),
            lacks_gradients=not gradients.any(),
            moved=not same,
            calls=list(dict.fromkeys(call for call, _ in asked.seen)),
            batch=asked.step in self._bad_batches,
        )
        if not numbers or np.isfinite(np.concatenate(whole)).all():
            return now
        from flashpoint.watching.nonfinite_origin import with_numbers  # few runs come so far

        return with_numbers(now, asked, numbers, self._usual_weights)


def _first_of(steps: Sequence[int]) -> str:
    return ", ".join([f"{step:,}" for step in steps[:_MOST]] + ["…"] * (len(steps) > _MOST))


def _parts(whole: Sequence[Any], lengths: Iterable[int]) -> list[Any]:
    """Return the first arrays joined, so many each time."""
    rest = iter(whole)
    return [np.concatenate([*itertools.islice(rest, length), np.empty(0)]) for length in lengths]


def _is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def _holds_nonfinite(batch: Any) -> bool:
    """Whether a batch holds NaN or infinity; minus infinity is what masks hold."""
    floating = (one for one in tensors_in(batch) if one.is_floating_point() and one.numel() and not one.is_meta)
    return any(bool((one.isnan() | one.isposinf()).any()) for one in floating)
