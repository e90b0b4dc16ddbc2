"""What a claim about isolated attention is judged by, computed on this machine's CPU."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from flashpoint.analysis.claims import Deviates
from flashpoint.deviation.formats import format_named
from flashpoint.deviation.pairs import GOLDEN
from flashpoint.deviation.sweep import HEAD_SIZE, Sweep, drawn_inputs, measure
from flashpoint.errors import UserError


def distances_over_baseline(asked: Deviates) -> NDArray[np.float64]:
    """Return, for each of the inputs, flash's largest deviation from FP64 over baseline attention's: [seeds].

    Raises:
        UserError: the precision is none, there is not memory enough, or baseline attention does not deviate.
    """
    sweep = Sweep(precisions=(format_named(asked.precision),), sums=(asked.sums,), quantities=(asked.quantity,))
    given = drawn_inputs("normal", [asked.length], [HEAD_SIZE], asked.seeds, causal=True)
    largest = {
        one.engine: one.distances[0]
        for one in measure(sweep, given, torch.device("cpu"))
        if one.other == GOLDEN and one.distances
    }
    if not largest["baseline"].all():
        raise UserError(f"baseline attention deviates by 0 at T {asked.length}; give a longer one, or less precision")
    return largest["flash"] / largest["baseline"]
