"""Many small GPU launches captured as a CUDA graph and replayed as one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


class Graphed(Generic[Result]):
    """A computation that reads and makes tensors on one device and asks the host for nothing.

    On a GPU a call after the first ones is captured as a CUDA graph and replayed from then on. Some hundreds of
    launches for a millisecond of work would otherwise cost more than the work. What a call returns is then overwritten
    by the next.

    Args:
        captures: False computes each time anew, as on a CPU.
        after: calls before the capture: they compile, allocate, and choose algorithms.
        stream: on which calls compute until the capture, and which is captured; None is the current one. A backward
            pass needs it: gradients are accumulated on the stream of the first call.
    """

    def __init__(
        self, compute: Callable[[], Result], captures: bool, *, after: int = 1, stream: torch.cuda.Stream | None = None
    ) -> None:
        self._compute, self._captures, self._after, self._stream = compute, captures, after, stream
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result | None = None

    def __call__(self) -> Result:
        self._calls += 1
        if not self._captures:
            return self._compute()
        if self._calls <= self._after:
            with self._beside():
                return self._compute()
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            # Only this thread's calls can spoil it: a checkpoint may be under way in another.
            with self._beside(), torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._result = self._compute()
            self._graph = graph
        self._graph.replay()
        return self._result  # type: ignore[return-value]

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)
