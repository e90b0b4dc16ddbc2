"""Numbers that a watched loop logs: measures of its attention, losses, fingerprints of batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.measured import measured
from flashpoint.diagnosis.measures import Results

METRICS = {
    "delta_bias": "row_sum_relative_bias",
    "delta_noise": "row_sum_relative_noise",
    "tied_rows": "tied_rows",
    "score_max": "score_max",
    "dead_rows": "half_norm_rows",
    "out_error": "out_deviation_rms",
    "along_mean_key": "grad_q_error_mean_key_share",
}
"""Measures of a diagnosis that are logged, and the names of the same quantities in this package's own runs."""


def measures_of(calls: Sequence[AttentionCall]) -> dict[str, NDArray[np.float64]]:
    """Return the logged measures of the layers' calls, which have one shape: means over sequences, [n_layer, H]."""
    by_layer = [measured(call, Results.kept(call)) for call in calls]
    return {
        METRICS[name]: torch.stack([one[name].mean(0) for one in by_layer]).numpy()
        for name in by_layer[0]
        if name in METRICS
    }


def floats(values: Sequence[Tensor | float]) -> list[float]:
    """Return numbers, those on a device by one copy."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    read = iter(torch.stack([one.detach().float().reshape(()) for one in tensors]).tolist() if tensors else ())
    return [next(read) if isinstance(value, Tensor) else float(value) for value in values]


def fingerprint(batch: Any) -> int:
    """Return 64 bits of a batch's tensors, in their order; 0 of a batch without any."""
    if isinstance(batch, Tensor):
        flat = batch.detach().reshape(-1)
        words = (flat.float().view(torch.int32) if flat.is_floating_point() else flat).long()
        places = torch.arange(1, words.numel() + 1, device=words.device, dtype=torch.int64)
        return int(((words + 0x9E3779B9) * (2 * places + 1) * 0x5851F42D4C957F2D).sum())
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    total = 0
    for part in parts:
        total = (total * 0x100000001B3 + fingerprint(part)) & ((1 << 64) - 1)
    return total
