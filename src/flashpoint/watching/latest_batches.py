"""Batches of somebody's loop, and what the model is given of them: which are held, fingerprinted and kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import mul
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from flashpoint.diagnosis.call import digests
from flashpoint.watching.arrivals import Arrivals, Number
from flashpoint.watching.events import BatchSeen, CaptureWritten, Handler, LastRead, LossesRead, ReadDue, StepEnded
from flashpoint.watching.left_out import is_foreign, is_sharded, is_transformed, local
from flashpoint.watching.notices import Notices
from flashpoint.watching.watched_run import WatchedRun

_BITS = (1 << 64) - 1
_FACTOR = 0x5851F42D4C957F2D
_FACTORS_KEPT = 1 << 18
"""Numbers of a tensor whose factors are kept: 2 MiB, of up to four sizes."""
STEPS = 10
"""That are looked at, from the second step on."""
_UNCHANGED = 5
"""Of them, from which on it is told. With two micro-batches a step it is half."""
_PARAMETERS, _ELEMENTS = 16, 256
"""That are compared."""
_COMPRESSED = {
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices")),
}
"""Names of what says where the values of a sparse tensor are."""


class LatestBatches:
    """The batches of the latest steps, with the sums of their tensors when they came.

    Args:
        most: batches that are held.
    """

    def __init__(self, most: int) -> None:
        self._held: deque[tuple[int, Any, Sums]] = deque(maxlen=most)

    def add(self, step: int, batch: Any) -> Sums | None:
        """Hold a batch, and return its sums; None where it shows no tensors, which is not held."""
        summed = sums(batch)
        if not summed.tensors:
            return None
        self._held.append((step, batch, summed))
        return summed

    def of(self, step: int) -> tuple[Any, bool]:
        """Return the batch of a step, None if it is not held, and whether its tensors are still what they were."""
        for number, batch, summed in self._held:
            if number == step:
                return batch, sums(batch).fingerprint() == summed.fingerprint()
        return None, True

    def identities(self, step: int, rows: int, first: int) -> tuple[str, ...]:
        """Return the identities of the first sequences of a step, of so many rows; empty where its batch does not show
        them. A sequence keeps its identity when weights move."""
        batch = next((batch for number, batch, _ in self._held if number == step), None)
        return digests([x[:first] for x in tensors_in(batch) if x.dim() > 1 and len(x) == rows])

    def forget(self, step: int) -> None:
        """Hold the batches up to a step no longer."""
        while self._held and self._held[0][0] <= step:
            self._held.popleft()


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

    def lengths(self, forward: int, rows: int) -> set[int]:
        """Return the tokens of the sequences that a forward pass of so many rows was given: of tensors [B, T] and
        [B, T, C]."""
        return {x.shape[1] for count, x in self._given.get(forward, ()) if count == rows and x.dim() in (2, 3)}

    def identities(self, forward: int, rows: int, first: int) -> tuple[str, ...]:
        """Return the identities of the first sequences of a forward pass, of so many rows; empty where no tensor that
        it was given shows them. A sequence keeps its identity when weights move."""
        return digests([x[:first] for count, x in self._given.get(forward, ()) if count == rows and len(x) >= first])


@dataclass
class Sums:
    """What the fingerprint of a batch comes from.

    Attributes:
        tensors: a number for each of the batch's tensors, where that is: [] int64.
        factors: of these numbers in the fingerprint.
        constant: the rest of it.
    """

    tensors: list[Tensor] = field(default_factory=list)
    factors: list[int] = field(default_factory=list)
    constant: int = 0

    def fingerprint(self, numbers: Iterable[Tensor] | None = None) -> int:
        """Return 64 bits of the tensors of a batch, in their order, from the numbers, which may have been copied."""
        found = (int(one) for one in (self.tensors if numbers is None else numbers))
        return (self.constant + sum(map(mul, self.factors, found))) & _BITS


@dataclass(frozen=True, slots=True)
class _SumsArrived:
    """The sums of batches, by step, can be read.

    Attributes:
        numbers: those of all batches, one behind the other.
    """

    sums: Sequence[tuple[int, Sums]]
    numbers: Sequence[Number]


class BatchRecorder:
    """Records which batches steps trained on, by their fingerprints, and keeps the batch of a captured step.

    Args:
        keeps: whether it does the latter.
    """

    def __init__(
        self, run: WatchedRun, batches: LatestBatches, keeps: bool, arrivals: Arrivals, notices: Notices
    ) -> None:
        self._run, self._batches, self._arrivals, self._notices = run, batches, arrivals, notices
        self._keeps = keeps
        self._pending: list[tuple[int, Sums]] = []

    @property
    def handlers(self) -> Sequence[Handler]:
        """What it does, by event."""
        recording = "recording the batches"
        return (
            Handler(BatchSeen, "reading the batch", self._take),
            Handler(ReadDue, recording, self._ask),
            Handler(LastRead, recording, self._ask),
            Handler(_SumsArrived, recording, self._record),
            Handler(CaptureWritten, "keeping the batch", self._keep),
            Handler(LossesRead, "letting go of batches", self._forget),
        )

    def _take(self, event: BatchSeen) -> None:
        if (summed := self._batches.add(event.step, event.batch)) is not None:
            self._pending.append((event.step, summed))
        else:
            self._notices.warn(
                f"a batch that is {type(event.batch).__name__} shows no tensors: it is not kept, and branches are not "
                "checked against it; hand over tensors, or dicts and lists of them"
            )

    def _ask(self, _: ReadDue | LastRead) -> None:
        pending, self._pending = self._pending, []
        if pending:
            self._arrivals.ask(_SumsArrived(pending, [one for _, summed in pending for one in summed.tensors]))

    def _record(self, event: _SumsArrived) -> None:
        numbers = iter(cast(Sequence[Tensor], event.numbers))
        self._run.note_batches(
            [(step, summed.fingerprint(next(numbers) for _ in summed.tensors)) for step, summed in event.sums]
        )

    def _keep(self, event: CaptureWritten) -> None:
        if not self._keeps:
            return
        batch, unchanged = self._batches.of(event.step)
        if not unchanged:
            self._notices.warn(
                "a batch is not kept: its tensors have been overwritten since its step; hand over copies"
            )
        elif batch is not None:
            self._run.keep_batch(on_cpu(batch), event.step)

    def _forget(self, event: LossesRead) -> None:
        """Let go of batches whose losses are finite, until one is not: its capture may still come."""
        if event.verdict != "nonfinite":
            self._batches.forget(event.step)


def sums(batch: Any) -> Sums:
    """Return the sums of a batch, all mod 2⁶⁴. Of a tensor it is Σ (w_i + 0x9E3779B9) · f_i over its words w. Of a
    container it is those of its parts, each times a power of 0x100000001B3 by its place. Σ f_i is known, so that the
    device adds up Σ w_i · f_i alone. Of a tensor that processes share it is the part of this one."""
    summed = Sums()
    _add(summed, batch, 1)
    return summed


def _add(summed: Sums, batch: Any, factor: int) -> None:
    batch = _as_tensor(batch)
    if isinstance(batch, Tensor):
        batch = local(batch)
        flat = batch.detach().reshape(-1)
        words = (flat.float().view(torch.int32) if flat.is_floating_point() else flat).long()
        count = words.numel()
        factors = (_factors if count <= _FACTORS_KEPT else _factors.__wrapped__)(count, words.device)
        summed.tensors.append((words * factors).sum())
        summed.factors.append(factor)
        of_constants = 0x9E3779B9 * _FACTOR * count * (count + 2)  # Σ (2i + 1) = n (n + 2)
        summed.constant = (summed.constant + factor * of_constants) & _BITS
        return
    for part in reversed(_parts(batch)):
        _add(summed, part, factor)
        factor = factor * 0x100000001B3 & _BITS


@lru_cache(maxsize=4)
def _factors(count: int, device: torch.device) -> Tensor:
    """Return an odd factor for each place of a tensor, int64. A training asks for the same ones at every step."""
    places = torch.arange(1, count + 1, device=device, dtype=torch.int64)
    return (2 * places + 1) * _FACTOR


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch, of those that processes share the part of this one."""
    batch = _as_tensor(batch)
    if isinstance(batch, Tensor):
        yield local(batch)
    for part in _parts(batch):
        yield from tensors_in(part)


def on_cpu(batch: Any) -> Any:
    """Return a batch as plain containers of tensors on the CPU."""
    batch = _as_tensor(batch)
    if isinstance(batch, Tensor):
        return local(batch).detach().cpu()
    if isinstance(batch, Mapping):
        return {name: on_cpu(part) for name, part in batch.items()}
    if isinstance(batch, list | tuple):
        return [on_cpu(part) for part in batch]
    return batch if isinstance(batch, int | float | str | bool | type(None)) else str(batch)


def _as_tensor(batch: Any) -> Any:
    """Return an array of numbers as a tensor, a nested or sparse tensor as a list of those that it is made of, and
    anything else as it is."""
    if isinstance(batch, np.ndarray) and batch.dtype.kind in "biuf":
        return torch.from_numpy(batch)
    if not isinstance(batch, Tensor):
        return batch
    if batch.is_nested:
        jagged = batch.layout == torch.jagged
        return [batch.values(), batch.offsets()] if jagged else list(batch.unbind())  # type: ignore[attr-defined]
    if batch.layout == torch.sparse_coo:
        batch = batch.coalesce()
        return [batch.indices(), batch.values()]
    if batch.layout in _COMPRESSED:
        return [getattr(batch, name)() for name in (*_COMPRESSED[batch.layout], "values")]
    return torch.view_as_real(batch.resolve_conj()) if batch.is_complex() else batch


def _parts(batch: Any) -> Sequence[Any]:
    """Return what a dict, list or tuple holds; a batch of Transformers' tokenizers is a mapping, but no dict."""
    return list(batch.values()) if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()


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
    taking = (one for one in model.parameters() if one.grad is not None and one.numel())
    trained = [one for one in taking if not (one.is_meta or is_foreign(one))]
    there = [one for one in trained if one.device == trained[0].device]
    return there[:: max(1, len(there) // _PARAMETERS)][:_PARAMETERS]
