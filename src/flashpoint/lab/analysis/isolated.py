"""What a claim about isolated attention is judged by, computed on this machine's CPU."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from flashpoint.lab.analysis.claims_file import Deviates, Differs, EmulatedSetting
from flashpoint.lab.deviation.arithmetic import arithmetic
from flashpoint.lab.deviation.defaults import HEAD_SIZE, SEEDS
from flashpoint.lab.deviation.drawn_inputs import drawn
from flashpoint.lab.deviation.emulated import Block
from flashpoint.lab.deviation.engines import engines_named
from flashpoint.lab.deviation.formats import format_named
from flashpoint.lab.deviation.pairs import GOLDEN, pairs


def distances_over_baseline(asked: Deviates) -> NDArray[np.float64]:
    """Return, for each of the inputs, flash's largest deviation of O from FP64 over baseline attention's: [seeds]."""
    largest = _largest(EmulatedSetting(), asked.sums, asked.causal)
    return largest["flash", GOLDEN] / largest["baseline", GOLDEN]


def differences_over_others(asked: Differs) -> NDArray[np.float64]:
    """Return, for each seed, the largest difference of O between flash and baseline attention in one setting over that
    in the other: [seeds]."""
    of, over = (_largest(setting, asked.sums, asked.causal) for setting in (asked.of, asked.over))
    return of["flash", "baseline"] / over["flash", "baseline"]


@lru_cache
def _largest(setting: EmulatedSetting, sums: str, causal: bool) -> dict[tuple[str, str], NDArray[np.float64]]:
    """Return the largest difference of O on each of the inputs [seeds], by engine and what it is compared with."""
    precision = format_named(setting.precision)
    compared = pairs(
        engines_named(("flash", "baseline"), (precision,), torch.device("cpu")),
        drawn("normal", SEEDS, setting.length, HEAD_SIZE),
        arithmetic(precision, sums),
        [Block(setting.rows, setting.keys)],
        causal=causal,
        quantities=("O",),
    )
    return {(pair.engine, pair.other): pair.difference.abs().flatten(1).amax(1).numpy() for pair in compared}
