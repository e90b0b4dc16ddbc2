"""Q, K, V and dO of independent inputs, drawn by seed."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.lab.deviation.emulated import Inputs

_SINK_NATS = 8.0
"""The mean score of the first key with ``sink``."""


def _sink(q: NDArray[np.float64], k: NDArray[np.float64]) -> None:
    """Give every query and the first key a part along one direction. Scores of other keys keep mean 0."""
    d = q.shape[-1]
    queries = 4.0
    q += queries / math.sqrt(d)
    k[0] = _SINK_NATS / queries  # along the same direction, √d·8/4 long


def _tied(_q: NDArray[np.float64], k: NDArray[np.float64]) -> None:
    """Make each second key equal to the one before: a row whose maximum is at such a pair has it twice."""
    k[1::2] = k[: len(k) - 1 : 2]


DRAWN: dict[str, Callable[[NDArray[np.float64], NDArray[np.float64]], None]] = {
    "normal": lambda _q, _k: None,
    "sink": _sink,
    "tied": _tied,
}
"""Kinds of inputs, and what each makes of Q and K [T, d] that are standard normal."""


def drawn(kind: str, seeds: int, length: int, head_size: int) -> Inputs:
    """Draw one input of one head for each seed from 0 on.

    Args:
        kind: of :data:`DRAWN`.

    Returns:
        float64 [seeds, 1, length, head_size] each, the same on every machine.

    Raises:
        UserError: they do not fit into memory.
    """
    try:
        tensors = np.empty((4, seeds, length, head_size))  # before any is drawn, which takes long if they are many
        for seed in range(seeds):
            tensors[:, seed] = np.random.default_rng(seed).standard_normal((4, length, head_size))
            DRAWN[kind](tensors[0, seed], tensors[1, seed])
    except (MemoryError, ValueError) as error:  # the second where NumPy has no such shape
        told = f"--seeds {seeds}, --length {length} and --head-size {head_size}"
        raise UserError(f"{told}: not enough memory for so many numbers; give less of these") from error
    return Inputs(*torch.from_numpy(tensors)[:, :, None])
