"""What a claim about isolated attention is judged by, computed on this machine's CPU."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from flashpoint.analysis.claims import Deviates
from flashpoint.deviation.defaults import HEAD_SIZE, LENGTH, SEEDS
from flashpoint.deviation.formats import BF16
from flashpoint.deviation.pairs import GOLDEN
from flashpoint.deviation.sweep import Sweep, drawn_inputs, measure


def distances_over_baseline(asked: Deviates) -> NDArray[np.float64]:
    """Return, for each of the inputs, flash's largest deviation of O from FP64 over baseline attention's: [seeds]."""
    sweep = Sweep(precisions=(BF16,), sums=(asked.sums,))
    given = drawn_inputs("normal", [LENGTH], [HEAD_SIZE], SEEDS, causal=True)
    largest = {
        one.engine: one.distances[0]
        for one in measure(sweep, given, torch.device("cpu"))
        if one.other == GOLDEN and one.distances
    }
    return largest["flash"] / largest["baseline"]
