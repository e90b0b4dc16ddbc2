"""Numbers that a watched loop logs: measures of its attention, losses, gradient norms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.input_measures import of_scores
from flashpoint.diagnosis.measured import by_sequence
from flashpoint.diagnosis.measures import Measures, Results, finite_part, over_sequences
from flashpoint.diagnosis.probe import Probed
from flashpoint.diagnosis.result_measures import of_grad_q, of_out
from flashpoint.diagnosis.sink import with_sink
from flashpoint.watching.sharding import is_dtensor, whole

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
LOGGED = frozenset(("step", "loss", "grad_norm", "w_q_spectral_norm", "w_k_spectral_norm", *METRICS.values()))
"""What a watch writes itself: a number of the loop by such a name would make the metrics file unreadable."""


def measures_of(calls: Sequence[AttentionCall]) -> dict[str, NDArray[np.float64]]:
    """Return the logged measures of the layers' calls, which have as many heads, [n_layer, H] each: of all sequences
    together, as the probes of this package's own runs give them."""
    known = [with_sink(call, call.out) for call in calls]
    by_layer = [over_sequences(by_sequence(call, Results.kept(call), None, _of_heads)) for call in known]
    return {
        METRICS[name]: torch.stack([one[name] for one in by_layer]).numpy() for name in by_layer[0] if name in METRICS
    }


def _of_heads(call: AttentionCall, results: Results, _: Probed | None, n: int) -> Measures:
    """Those of a diagnosis that need no second attention to compare with: a training waits for them."""
    true = exact(call, n)
    found = of_scores(true)
    if results.out is not None:
        found |= of_out(finite_part(results.out[n]), true, call.grad_out[n].double())
    if results.grad_q is not None:
        found |= of_grad_q(finite_part(results.grad_q[n]), true, call.scale)
    return found


def one_number(value: Any, name: str) -> Tensor | float:
    """Return a number; one on a device is copied, as the loop may overwrite its own, and not read from there.

    Raises:
        ValueError: it is none, or several, or this process holds a part of it.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} has {value.numel():,} numbers: give one, e.g. their mean")
        value = whole(value.detach(), name)
        if value.is_meta or value.layout != torch.strided:
            raise ValueError(f"{name} is a tensor without memory, or a sparse one: give a number")
        return value.reshape(()).clone()
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {type(value).__name__}: give a number") from None


def floats(values: Sequence[Tensor | float]) -> list[float]:
    """Return numbers, of tensors [] float32; those on a device by one copy."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    read = iter(torch.stack(tensors).float().tolist() if tensors else ())
    return [next(read) if isinstance(value, Tensor) else float(value) for value in values]


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor | None:
    """Return the norm of all gradients together; None where no parameter has one, or processes share one."""
    gradients = [grad for p in parameters if (grad := p.grad) is not None]
    if any(map(is_dtensor, gradients)):  # their norm is summed over processes, and this one alone asks for it
        return None
    dense = [one.coalesce().values() if one.is_sparse else one for one in gradients]
    return nn.utils.get_total_norm(dense) if dense else None
