"""Times of candidates that take turns: A B C, C A B, …, so that a drift of the machine falls on all alike.

Each round draws its order: what a candidate leaves to the next one, as clock and heat, falls on all alike, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from flashpoint.cli.table import Cell

ROUNDS = 20

Times = NDArray[np.float64]
"""Seconds of one run, by round."""
Timed = Callable[[int], float]
"""Runs a candidate so many times, and returns the seconds that all of them took."""


def interleaved(candidates: Mapping[str, Timed], seconds: float) -> dict[str, Times]:
    """Return the times of each candidate.

    Args:
        candidates: each has run before: the first run here says how many are a round.
        seconds: to spend on each candidate in all rounds together. Each round has one run at least.
    """
    runs = {name: max(1, round(seconds / ROUNDS / timed(1))) for name, timed in candidates.items()}
    found: dict[str, list[float]] = {name: [] for name in candidates}
    orders = np.random.default_rng(0)
    for _ in range(ROUNDS):
        for name in orders.permutation(list(candidates)):
            found[name].append(candidates[name](runs[name]) / runs[name])
    return {name: np.array(times) for name, times in found.items()}


def block(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """Return the seconds of so many steps; the device has finished the last of them."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def quartiles(values: Times | Sequence[float], form: str) -> Cell:
    """Return median and quartiles as a cell.

    Args:
        form: how a number is shown, as in an f-string.
    """
    low, median, high = (float(f"{value:.6g}") for value in np.percentile(values, (25, 50, 75)))
    return Cell({"median": median, "low": low, "high": high}, f"{median:{form}} ({low:{form}} to {high:{form}})")
