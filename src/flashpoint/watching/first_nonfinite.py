"""Records in which step, pass and tensor of a watched loop NaN or infinity appears first.

Of a tensor one number is taken, its largest magnitude: it is NaN or infinite where the tensor holds either. Weights and
gradients give theirs at every step. So the step and the pass are known, also of a model that is compiled or whose
attention is not found. Tensors of attentions give theirs in observed steps, of whole batches and also where the call is
left out. The numbers stay on the device until losses are read, and nothing waits for it.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

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
from flashpoint.watching.functions import output_of, queries_keys_values
from flashpoint.watching.graph import edges_of
from flashpoint.watching.latest_batches import LatestBatches, tensors_in
from flashpoint.watching.left_out import is_sharded, local
from flashpoint.watching.notices import Notices
from flashpoint.watching.projections import ProjectedGradients, Projection
from flashpoint.watching.watched_run import WatchedRun

_IN_ORDER = ("scaled_dot_product_attention", "flashpoint.attention")
"""Attentions whose tensors are [B, H, T, d], and which compute softmax(QKᵀ)V in this order."""
_MOST = 8
"""Places in which NaN or infinity comes and goes that are told of a run: a batch may bring it again and again."""

Groups = Sequence[tuple[Sequence[int], Tensor]]
"""The largest magnitudes of some tensors: places in the list of all, and as many numbers, by device and dtype."""


@dataclass(slots=True, eq=False)
class SeenCall:
    """An attention that an observed step called.

    Attributes:
        number: in its forward pass, from 1.
        layer: of the calls that are kept, from 1; None where it is left out.
        left_out: why; empty where it is kept.
    """

    number: int
    attention: str
    dtype: torch.dtype
    layer: int | None = None
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """What is not finite in a step, as far as it is known.

    Attributes:
        loss: None where it could not be read.
        weights, gradients: NaN or infinity by the name of the parameter that holds it; weights are those of the forward
            pass.
        finite_gradients: names of parameters whose gradients are finite.
        lacks_gradients: whether there were none, or zeros alone, as after ``zero_grad``.
        began: of the weights, when the forward pass began; None where that was not seen.
        moved: whether weights differed from then.
        by_head: heads in whose rows the gradient of W_Q ("dQ") or W_K ("dK") is not finite, by layer. And layers in
            which it is not in the other features of the same weight ("other"). Of layers whose matrices are known.
        calls: the attentions that the step called; none where it was not observed.
        tensors: of these the ones that are not finite, in the order of time, with their heads from 1, which may not be
            known.
        batch: whether the batch holds NaN or infinity; looked at where the loss is not finite.
    """

    step: int
    loss: float | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    gradients: Mapping[str, float] = field(default_factory=dict)
    finite_gradients: Sequence[str] = ()
    lacks_gradients: bool = False
    began: Mapping[str, float] | None = None
    moved: bool = False
    by_head: Mapping[str, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)
    heads: int = 0
    calls: Sequence[SeenCall] = ()
    tensors: Sequence[tuple[SeenCall, str, tuple[int, ...]]] = ()
    batch: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """Numbers of a step that are on their way; those of projections and calls are behind those of parameters.

    Attributes:
        began: as ``weights``, when the forward pass began; none where that was not seen.
    """

    step: int
    began: Sequence[Sequence[int]]
    weights: Sequence[Sequence[int]]
    gradients: Sequence[Sequence[int]]
    names: Sequence[str]
    projected: Sequence[str]
    seen: Sequence[tuple[SeenCall, str]]

    @property
    def count(self) -> int:
        return sum(map(len, (self.began, self.weights, self.gradients, self.projected, self.seen)))


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
        by_token: names of functions whose tensors are [B, T, H, d].
        interval: steps between looks at which parameters there are.
    """

    def __init__(
        self,
        model: nn.Module,
        projections: Callable[[], Mapping[str, list[Projection]] | None],
        by_token: Collection[str],
        interval: int,
        batches: LatestBatches,
        run: WatchedRun,
        arrivals: Arrivals,
        notices: Notices,
    ) -> None:
        self._model, self._projections, self._interval = model, projections, interval
        self._batches, self._run, self._arrivals, self._notices = batches, run, arrivals, notices
        self._calls = _CallMagnitudes(by_token)
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
            self._began = _largest([self._own(one) for one in self._parameters])

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
        weights = _largest([self._own(one) for one in self._parameters])
        gradients = [] if after else _largest([self._own(one.grad) for one in self._parameters])
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
        if self._by_head is None or self._by_head.of is not found:
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
        from flashpoint.watching.nonfinite_origin import origin

        birth = origin(before, now, self._usual)
        self._lasting = birth.lasting
        if birth.lasting or self._told < _MOST:
            self._told += 1
            self._notices.tell(f"step {birth.step:,}: {birth.text}", logging.WARNING)
            self._run.note_birth(birth)

    def _tell_gradients_alone(self, before: StepNumbers, now: StepNumbers) -> None:
        """Tell of the first step whose gradients hold NaN or infinity while its loss and the next weights do not."""
        self._gradients_alone.append(before.step)
        if len(self._gradients_alone) == 1:
            from flashpoint.watching.nonfinite_origin import origin

            birth = origin(before, now, self._usual)
            self._notices.tell(
                f"step {before.step:,}: gradients alone held NaN or infinity, as where a GradScaler skips the update "
                f"(later ones are counted at the end of the loop): {birth.text}",
                logging.WARNING,
            )

    def _tell_count(self) -> None:
        if len(steps := self._gradients_alone) > 1:
            some = ", ".join([f"{step:,}" for step in steps[:_MOST]] + ["…"] * (len(steps) > _MOST))
            self._notices.tell(
                f"gradients of {len(steps):,} steps held NaN or infinity, and losses and weights did not: {some}"
            )

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


def _parts(whole: Sequence[Any], lengths: Iterable[int]) -> list[Any]:
    """Return the first arrays joined, so many each time."""
    rest = iter(whole)
    return [np.concatenate([*itertools.islice(rest, length), np.empty(0)]) for length in lengths]


def _is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


class _CallMagnitudes:
    """Takes the largest magnitudes of what attentions are given and give, and of the gradients of both, as they come.

    Args:
        by_token: names of functions whose tensors are [B, T, H, d].
    """

    def __init__(self, by_token: Collection[str]) -> None:
        self._by_token = by_token
        self._seen: list[tuple[SeenCall, str, Tensor]] = []
        self._counts: dict[int, int] = {}  # calls by forward pass
        self._kept: dict[int, int] = {}  # those that are kept
        self._call: SeenCall | None = None
        self._hooks: list[RemovableHandle] = []

    def look(self, event: AttentionRan) -> None:
        """Take in a call. Gradients come by the edges of the call alone, as another use of q has a gradient, too."""
        tensors, out = _tensors_of(event), output_of(event.result)
        number = self._counts[event.forward] = self._counts.get(event.forward, 0) + 1
        if out is None or not out.is_floating_point():
            self._call = None
            return
        self._call = call = SeenCall(number, event.attention, out.dtype)
        in_order = event.attention in _IN_ORDER
        at = 2 if event.attention in self._by_token else 1
        at_out = at if in_order or ":" in event.attention else 2  # Transformers' attentions return [B, T, H, d]
        seen = self._seen

        def see(name: str, tensor: Tensor | None, at: int) -> None:
            if tensor is not None and seen is self._seen:  # not of a step that has ended
                seen.append((call, name, _by_heads(tensor, at)))

        def seeing(name: str, place: int) -> Callable[..., None]:
            return lambda given, _: see(name, given[place], at)

        for name, tensor in tensors.items():
            see(name, tensor, at)
        see("O", out, at_out)
        if out.requires_grad:
            self._hooks.append(out.register_hook(lambda gradient: see("dO", gradient, at_out)))
            for name, edges in edges_of(tensors, out, event.since, in_order).items():
                self._hooks += [node.register_hook(seeing(f"d{name.upper()}", place)) for node, place in edges]

    def keep(self, event: AttentionCalled) -> None:
        """The call that was seen last is kept: give it its layer."""
        self._kept[event.forward] = self._kept.get(event.forward, 0) + 1
        if self._call is not None:
            self._call.layer = self._kept[event.forward]

    def leave_out(self, event: CallLeftOut) -> None:
        """The call that was seen last is left out."""
        if self._call is not None:
            self._call.left_out = event.reason

    def taken(self) -> list[tuple[SeenCall, str, Tensor]]:
        """Return what a step has shown, and begin another one."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._counts.clear()
        self._kept.clear()
        self._call = None
        seen, self._seen = self._seen, []
        return seen


def _tensors_of(event: AttentionRan) -> dict[str, Tensor]:
    """Return q, k and v of a call; none where its arguments do not tell them."""
    positional = [one for one in event.positional if isinstance(one, Tensor)]
    given = {**dict(zip(("query", "key", "value"), positional, strict=False)), **event.options}
    found = queries_keys_values(given, positional)
    return {} if found is None else dict(zip("qkv", found, strict=True))


def _largest(tensors: Sequence[Tensor | None]) -> Groups:
    """Return the largest magnitudes of tensors; of those that are None, empty or of whole numbers none."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    held: dict[int, Tensor] = {}
    for place, tensor in enumerate(tensors):
        if tensor is not None and (one := _readable(tensor)) is not None:
            held[place] = one
            groups.setdefault((one.device, one.dtype), []).append(place)
    return [
        (places, torch.stack(torch._foreach_norm([held[place] for place in places], math.inf)))
        for places in groups.values()
    ]


def _readable(tensor: Tensor) -> Tensor | None:
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    elif tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or tensor.itemsize < 2 or tensor.is_meta or not tensor.numel():
        return None
    return tensor


def _by_heads(tensor: Tensor, at: int) -> Tensor:
    """Return the largest magnitude of each head [H], or of all where no dimension is that of heads, [1].

    Args:
        at: the dimension of heads, of four; [T, H, d] has what [B, T, H, d] has.
    """
    with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
        x = tensor.detach()
        if not x.numel():
            return x.new_zeros(1)
        x = x[None] if x.dim() == 3 and at == 2 else x
        if x.dim() != 4:
            return torch.linalg.vector_norm(x, math.inf).reshape(1)
        return torch.linalg.vector_norm(x, math.inf, dim=[dim for dim in range(4) if dim != at])


def _holds_nonfinite(batch: Any) -> bool:
    """Whether a batch holds NaN or infinity; minus infinity is what masks hold."""
    floating = (one for one in tensors_in(batch) if one.is_floating_point() and one.numel() and not one.is_meta)
    return any(bool((one.isnan() | one.isposinf()).any()) for one in floating)
