"""Many small GPU launches recorded and repeated as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


class Captured(Generic[Result]):
    """A computation that reads and makes tensors on one device and asks the host for nothing.

    On a GPU its second call is captured as a CUDA graph and replayed from then on: some hundreds of launches for a
    millisecond of work would otherwise cost the training more than the work. What a call returns is then overwritten by
    the next.
    """

    def __init__(self, compute: Callable[[], Result], device: torch.device) -> None:
        self._compute, self._on_gpu = compute, device.type == "cuda"
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result | None = None

    def __call__(self) -> Result:
        self._calls += 1
        if not self._on_gpu or self._calls == 1:  # the first call compiles and chooses algorithms
            return self._compute()
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # a checkpoint may be under way
                self._result = self._compute()
        self._graph.replay()
        assert self._result is not None
        return self._result
