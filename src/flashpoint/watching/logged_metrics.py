"""Numbers that a watched loop logs beside its losses: measures and largest scores of its attention, and those that it
hands over."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.form import CLOSED, Form
from flashpoint.diagnosis.measure_table import MEASURES
from flashpoint.diagnosis.measures import (
    Measures,
    Results,
    by_sequence,
    finite_part,
    of_scores,
    over_sequences,
    without_empty_rows,
)
from flashpoint.diagnosis.result_measures import of_grad_q, of_out
from flashpoint.diagnosis.sink import with_sink
from flashpoint.errors import layer_told
from flashpoint.runs.metric_table import GRAD_NORM, LOSS, MAX_LOGIT, W_K_NORM, W_Q_NORM
from flashpoint.watching.arrivals import Arrivals, Number, one_number
from flashpoint.watching.events import AttentionCalled, Handler, NumbersSeen, StepEnded, StepObserved, StepStarted
from flashpoint.watching.notices import Notices
from flashpoint.watching.watched_run import WatchedRun

if TYPE_CHECKING:
    from flashpoint.diagnosis.measures import Probed

_LOGGED_MEASURES = {measure.name: measure.logged_as.name for measure in MEASURES.values() if measure.logged_as}
"""Measures of a diagnosis that are logged, and the metrics that they are."""
LOGGED = frozenset(
    ("step", *(one.name for one in (LOSS, GRAD_NORM, W_Q_NORM, W_K_NORM, MAX_LOGIT)), *_LOGGED_MEASURES.values())
)
"""What a watch writes itself: a number of the loop by such a name would make the metrics file unreadable."""


def measures_of(calls: Sequence[AttentionCall]) -> dict[str, NDArray[np.float64]]:
    """Return the logged measures of the layers' calls, which have as many heads, [n_layer, H] each: of all sequences
    together, as the probes of this package's own runs give them."""
    known = [without_empty_rows(call, Results.kept(call))[:2] for call in calls]
    by_layer = [
        over_sequences(by_sequence(with_sink(call, results.out), results, None, _of_heads)) for call, results in known
    ]
    return {
        _LOGGED_MEASURES[name]: torch.stack([one[name] for one in by_layer]).numpy()
        for name in by_layer[0]
        if name in _LOGGED_MEASURES
    }


def _of_heads(call: AttentionCall, results: Results, _: Probed | None, n: int) -> Measures:
    """Those of a diagnosis that need no second attention to compare with: a training waits for them."""
    true = exact(call, n)
    found = of_scores(true)
    if results.out is not None:
        found |= of_out(finite_part(results.out[n]), true, call.grad_out[n].double(), results.out.dtype)
    if results.grad_q is not None:
        of_dq = of_grad_q(finite_part(results.grad_q[n]), true)
        # What came through another output than O is not to be told from an error of δ.
        judged = 1.0 if call.is_of_out_alone else torch.nan
        found |= {name: values * judged for name, values in of_dq.items()}
    return found


class AttentionMetrics:
    """Logs measures of each observed step, and describes the model by the first."""

    def __init__(self, run: WatchedRun, notices: Notices) -> None:
        self._run, self._notices = run, notices
        self._layers: list[tuple[str, int]] | None = None  # their modules and heads

    @property
    def handlers(self) -> Sequence[Handler]:
        """What it does, by event."""
        return (
            Handler(StepObserved, "noting what is not recorded", self._note),
            Handler(StepObserved, "measuring the attention", self._take),
        )

    def _note(self, event: StepObserved) -> None:
        self._run.note_not_recorded(event.not_recorded)

    def _take(self, event: StepObserved) -> None:
        calls = event.calls
        if event.partial or not calls:
            return
        layers = [(call.module, call.q.shape[1]) for call in calls]
        if self._layers is None:
            self._run.describe(calls)
            self._layers = layers
        if layers == self._layers and len({heads for _, heads in layers}) == 1:
            self._run.log(event.step, measures_of(calls))
        else:
            self._notices.warn("layers have different numbers of heads, or not every step has the same ones: "
                       "bias of δ and the like are not logged there; captures have them")  # fmt: skip


_BLOCK = 1 << 24
"""Scores that are held at once: 64 MiB."""
_NO_WEIGHT = 87.0
"""Nats between the biases of two keys of a row, where the weight of one is below FP32's smallest normal number."""


@torch.no_grad()
def max_logits(q: Tensor, k: Tensor, form: Form) -> Tensor:
    """Return the largest |S| of each head [H], float32, nats, over the keys that a query sees: S as the softmax takes
    it, after α, soft cap and bias. NaN where one of them is. A key that the bias alone leaves no weight is not seen, as
    a far one beside ALiBi.

    Args:
        q, k: [B, H, T_q, d] and [B, H_kv, T_k, d].
        form: of these sequences.
    """
    (count, heads, queries, _), (_, of_keys, keys, _) = q.shape, k.shape
    rows = max(1, min(queries, _BLOCK // (heads * keys)))
    sequences = max(1, _BLOCK // (heads * keys * rows))
    largest = torch.zeros(heads, device=q.device)
    with torch.autocast(q.device.type, enabled=False):
        for first in range(0, count, sequences):
            some = slice(first, min(first + sequences, count))
            held = k[some].float()
            for begin in range(0, queries, rows):
                block = slice(begin, min(begin + rows, queries))
                seen = min(block.stop, keys) if form.is_causal else keys
                of_rows = q[some, :, block].float().unflatten(1, (of_keys, -1)).flatten(2, 3)
                scores = (of_rows @ held[:, :, :seen].mT).mul_(form.scale).view(len(held), heads, -1, seen)
                largest = torch.maximum(largest, _in_block(scores, form, some, block).abs_().amax((0, 2, 3)))
    return largest


def _in_block(scores: Tensor, form: Form, sequences: slice, rows: slice) -> Tensor:
    """Return scores [N, H, R, C] of some rows and the first keys as the softmax takes them, 0 where none is seen."""
    seen = scores.shape[3]

    def part(x: Tensor) -> Tensor:
        x = x[sequences] if len(x) > 1 else x
        return (x[:, :, rows] if x.shape[2] > 1 else x)[..., :seen]

    if form.softcap:
        scores = scores.div_(form.softcap).tanh_().mul_(form.softcap)
    closed = torch.zeros(1, 1, 1, seen, dtype=torch.bool, device=scores.device)
    if form.mask is not None:
        closed = closed | ~part(form.mask)
    if form.is_causal:
        later = (
            torch.arange(seen, device=scores.device)
            > torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
        )
        closed = closed | later
    if form.bias is not None:
        bias = part(form.bias)
        scores = scores.add_(bias)
        closed = closed | (bias <= CLOSED)
        closed = closed | (bias < bias.masked_fill(closed, -torch.inf).amax(-1, keepdim=True) - _NO_WEIGHT)
    return scores.masked_fill_(closed, 0.0)


@dataclass(frozen=True, slots=True)
class _LogitsArrived:
    """The largest |S| of a step can be read, [H] of each layer.

    Attributes:
        modules: of the layers, by name.
    """

    step: int
    modules: Sequence[str]
    numbers: Sequence[Number]


class MaxLogits:
    """Logs the largest |S| of each head at an interval, of the step's first forward pass with gradients, and warns once
    where one exceeds a bound. Nothing waits for the device.

    Args:
        interval: steps between; None is never.
        most: the bound, nats.
        sequences: whose masks are known at least: where a call has a mask or a bias it is measured of them alone.
    """

    def __init__(
        self,
        interval: int | None,
        most: float,
        sequences: int,
        run: WatchedRun,
        arrivals: Arrivals,
        notices: Notices,
    ) -> None:
        self._interval, self._most, self._sequences = interval, most, sequences
        self._run, self._arrivals, self._notices = run, arrivals, notices
        self._due, self._forward = False, 0
        self._found: list[tuple[str, Tensor]] = []
        self._layers: list[tuple[str, int]] | None = None  # their modules and heads
        self._warned = False

    @property
    def handlers(self) -> Sequence[Handler]:
        """What it does, by event."""
        what = "measuring the scores"
        return (
            Handler(StepStarted, what, self._begin),
            Handler(AttentionCalled, what, self._take),
            Handler(StepEnded, what, self._ask),
            Handler(_LogitsArrived, what, self._log),
        )

    def due(self, step: int) -> bool:
        """Return whether a step is measured."""
        return self._interval is not None and (step + 1) % self._interval == 0

    def _begin(self, event: StepStarted) -> None:
        self._due, self._found = self.due(event.step), []

    def _take(self, event: AttentionCalled) -> None:
        if not self._due or (self._found and event.forward != self._forward):
            return
        self._forward = event.forward
        q, k = event.q.detach(), event.k.detach()
        if torch.is_autocast_enabled(q.device.type):  # which casts what the attention is given
            q, k = (x.to(torch.get_autocast_dtype(x.device.type)) for x in (q, k))
        if event.form.tensors.keys() & {"mask", "bias"}:
            q, k = q[: self._sequences], k[: self._sequences]
        self._found.append((event.module, max_logits(q, k, event.form)))

    def _ask(self, event: StepEnded) -> None:
        found, self._found = self._found, []
        if found:
            modules, numbers = zip(*found, strict=True)
            self._arrivals.ask(_LogitsArrived(event.step, modules, numbers))

    def _log(self, event: _LogitsArrived) -> None:
        layers = [torch.as_tensor(one).double() for one in event.numbers]
        self._warn(event, layers)
        known = list(zip(event.modules, map(len, layers), strict=True))
        self._layers = self._layers or known
        if known == self._layers and len(set(map(len, layers))) == 1:
            self._run.log(event.step, {MAX_LOGIT.name: torch.stack(layers).numpy()})
        else:
            self._notices.warn("layers have different numbers of heads, or not every step has the same ones: their "
                       "largest scores are judged there, and not logged")  # fmt: skip

    def _warn(self, event: _LogitsArrived, layers: Sequence[Tensor]) -> None:
        largest = [float(one.max()) for one in layers]
        layer = max(range(len(layers)), key=largest.__getitem__)
        if self._warned or not largest[layer] > self._most:
            return
        self._warned = True
        head = int(layers[layer].argmax())
        self._notices.tell(
            f"step {event.step:,}: the largest |score| is {largest[layer]:.4g} nats, in "
            f"{layer_told(layer + 1, event.modules[layer])}, head {head + 1}: more than max_logit={self._most:g}. "
            "Softmax then sees hardly more than one key, and a divergence may follow; QK-norm or QK-clip bounds scores",
            logging.WARNING,
        )


@dataclass(frozen=True, slots=True)
class _NumbersArrived:
    """Numbers that the loop handed over can be read."""

    step: int
    names: Sequence[str]
    numbers: Sequence[Number]


class LoopMetrics:
    """Logs numbers that the loop hands over."""

    def __init__(self, run: WatchedRun, arrivals: Arrivals) -> None:
        self._run, self._arrivals = run, arrivals

    @property
    def handlers(self) -> Sequence[Handler]:
        """What it does, by event."""
        what = "logging metrics"
        return Handler(NumbersSeen, what, self._take), Handler(_NumbersArrived, what, self._log)

    def _take(self, event: NumbersSeen) -> None:
        if taken := sorted(LOGGED & event.numbers.keys()):
            raise ValueError(f"the watch itself logs {', '.join(taken)}: give the metric another name")
        given = [one_number(value, name) for name, value in event.numbers.items()]
        self._arrivals.ask(_NumbersArrived(event.step, tuple(event.numbers), given))

    def _log(self, event: _NumbersArrived) -> None:
        self._run.log(event.step, dict(zip(event.names, map(float, event.numbers), strict=True)))
