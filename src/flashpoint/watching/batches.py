"""Batches of somebody's loop: the latest ones, their fingerprints, and how they are kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import mul
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashpoint.diagnosis.repeats import digests
from flashpoint.watching.sharding import local

_BITS = (1 << 64) - 1
_FACTOR = 0x5851F42D4C957F2D
_FACTORS_KEPT = 1 << 18
"""Numbers of a tensor whose factors are kept: 2 MiB, of up to four sizes."""


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


def sums(batch: Any) -> Sums:
    """Return the sums of a batch: of a tensor Σ (w_i + 0x9E3779B9) · f_i over its words w, and of a container those of
    its parts, each times a power of 0x100000001B3 by its place, all mod 2⁶⁴. Σ f_i is known, so that the device adds up
    Σ w_i · f_i alone. Of a tensor that processes share it is the part of this one."""
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
    """Return an array of numbers as a tensor, and what is none as it is."""
    return torch.from_numpy(batch) if isinstance(batch, np.ndarray) and batch.dtype.kind in "biuf" else batch


def _parts(batch: Any) -> Sequence[Any]:
    """Return what a dict, list or tuple holds; a batch of Transformers' tokenizers is a mapping, but no dict."""
    return list(batch.values()) if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
