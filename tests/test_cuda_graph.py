"""A CUDA graph that is captured and replayed, with PyTorch's replaced: which calls compute, capture and replay."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashpoint.lab.cuda_graph import Graphed


class Graph:
    """Stands in for a captured graph: a replay without a capture is what CUDA refuses or crashes of."""

    captured = False

    def replay(self) -> None:
        assert self.captured


@contextlib.contextmanager
def capture(graph: Graph, **_: Any) -> Iterator[None]:
    yield
    graph.captured = True


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_it_computes_until_the_capture_and_not_again(after: int) -> None:
    calls: list[int] = []

    def compute() -> int:
        calls.append(0)
        return len(calls)

    graphed = Graphed(compute, True, after=after)
    assert [graphed() for _ in range(6)] == [min(number, after + 1) for number in range(1, 7)]
    assert len(calls) == after + 1


def test_without_captures_it_computes_each_time() -> None:
    numbers = iter(range(5))
    graphed = Graphed(lambda: next(numbers), False)
    assert [graphed() for _ in range(5)] == list(range(5))


def test_a_capture_that_failed_is_not_replayed() -> None:
    failures = [RuntimeError("out of memory")]

    def compute() -> str:
        if failures:
            raise failures.pop()
        return "computed"

    graphed = Graphed(compute, True, after=0)
    with pytest.raises(RuntimeError, match="out of memory"):
        graphed()
    assert graphed() == "computed"
