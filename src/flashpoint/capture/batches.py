"""Batches of somebody's loop: the latest ones, their fingerprints, and how they are kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

_FACTORS_KEPT = 1 << 18
"""Numbers of a tensor whose factors are kept: 2 MiB, of up to four sizes."""


class LatestBatches:
    """The batches of the latest steps, with the sums of their tensors when they came.

    Args:
        most: batches that are held.
    """

    def __init__(self, most: int) -> None:
        self._held: deque[tuple[int, Any, Any]] = deque(maxlen=most)

    def add(self, step: int, batch: Any) -> bool:
        """Hold a batch; return False where it shows no tensors, which is not held."""
        summed = sums(batch)
        if holds_none(summed):
            return False
        self._held.append((step, batch, summed))
        return True

    def fingerprints(self) -> list[tuple[int, int]]:
        """Return the step and the fingerprint of each."""
        return [(step, fingerprint(summed)) for step, _, summed in self._held]

    def of(self, step: int) -> tuple[Any, bool]:
        """Return the batch of a step, None if it is not held, and whether its tensors are still what they were."""
        batch, summed = next(((one, summed) for number, one, summed in self._held if number == step), (None, []))
        return batch, fingerprint(sums(batch)) == fingerprint(summed)

    def clear(self) -> None:
        self._held.clear()


def sums(batch: Any) -> Any:
    """Return a number for each of a batch's tensors, where the tensor is; :func:`fingerprint` combines them."""
    if isinstance(batch, np.ndarray) and batch.dtype.kind in "biuf":
        batch = torch.from_numpy(batch)
    if isinstance(batch, Tensor):
        flat = batch.detach().reshape(-1)
        words = (flat.float().view(torch.int32) if flat.is_floating_point() else flat).long()
        factors = _factors if words.numel() <= _FACTORS_KEPT else _factors.__wrapped__
        return ((words + 0x9E3779B9) * factors(words.numel(), words.device)).sum()
    return [sums(part) for part in _parts(batch)]


@lru_cache(maxsize=4)
def _factors(count: int, device: torch.device) -> Tensor:
    """Return an odd factor for each place of a tensor, int64. A training asks for the same ones at every step."""
    places = torch.arange(1, count + 1, device=device, dtype=torch.int64)
    return (2 * places + 1) * 0x5851F42D4C957F2D


def holds_none(summed: Any) -> bool:
    """Return whether the :func:`sums` are those of a batch without tensors."""
    return not isinstance(summed, Tensor) and all(holds_none(part) for part in summed)


def fingerprint(summed: Any) -> int:
    """Return 64 bits of the tensors of a batch, in their order, from their :func:`sums`; 0 without any."""
    if isinstance(summed, Tensor):
        return int(summed)
    total = 0
    for part in summed:
        total = (total * 0x100000001B3 + fingerprint(part)) & ((1 << 64) - 1)
    return total


def on_cpu(batch: Any) -> Any:
    """Return a batch as plain containers of tensors on the CPU."""
    if isinstance(batch, Tensor):
        return batch.detach().cpu()
    if isinstance(batch, np.ndarray):
        return torch.from_numpy(batch) if batch.dtype.kind in "biuf" else str(batch)
    if isinstance(batch, Mapping):
        return {name: on_cpu(part) for name, part in batch.items()}
    if isinstance(batch, list | tuple):
        return [on_cpu(part) for part in batch]
    return batch if isinstance(batch, int | float | str | bool | type(None)) else str(batch)


def _parts(batch: Any) -> Iterable[Any]:
    """Return what a dict, list or tuple holds; a batch of Transformers' tokenizers is a mapping, but no dict."""
    return batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
