"""Where the time of a step goes, by groups of kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.rounds import synchronize

OTHER = "other"
_GROUPS = {
    "attention": r"flash(?!point)|fmha|sdpa|attention|center_keys",
    "cross-entropy": r"log_?softmax|cross_entropy|nll_loss|logsumexp",
    "layer norm": r"layer_norm|layernorm|var_mean",
    "GELU": r"gelu",
    "optimiser": r"adam|multi_tensor_apply|foreach|lpnorm|linalg_vector_norm|clip_grad",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|matmul|splitk|aten::(add|b)?mm\b",
    "embedding": r"embedding|radixsort|searchsorted|index_put",
    "copies": r"memcpy|memset|copy|fill|_cat_|aten::cat\b",
}
"""What the names of a group's kernels have in common. A fused kernel has the names of all that it computes, and
belongs to the first group that knows one of them: casts are part of almost every kernel, and so come last."""
GROUPS = [*_GROUPS, OTHER]


def group_of(kernel: str) -> str:
    """Return the group of a kernel, or of an operation of PyTorch, by its name."""
    return next((group for group, names in _GROUPS.items() if re.search(names, kernel, re.IGNORECASE)), OTHER)


def grouped(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the sum of the times of each group.

    Args:
        times: names of kernels, and their times.
    """
    sums = dict.fromkeys(GROUPS, 0.0)
    for kernel, time in times:
        sums[group_of(kernel)] += time
    return sums


def profiled(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Return the milliseconds of one step by group: of kernels on a GPU, of operations on a CPU."""
    on_gpu = device.type == "cuda"
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        step()
        synchronize(device)
    kind = "CUDA" if on_gpu else "CPU"
    events = [event for event in found.key_averages() if event.device_type.name == kind]
    events = [event for event in events if not event.is_user_annotation]  # which stand for kernels that are there, too
    microseconds = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return grouped((event.key, getattr(event, microseconds) / 1000) for event in events)
