"""PyTorch's compile workers are asked for by a name of PyTorch's own, which it may change."""

import sys
import threading
from types import ModuleType

import pytest

from flashpoint.training.compilation import start_compile_workers

MODULE = "torch._inductor.async_compile"


def test_waiting_ends_when_the_workers_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, started, module = threading.Event(), list[str](), ModuleType(MODULE)

    def starts() -> None:
        begun.wait()
        started.append("workers")

    module.maybe_warm_pool = starts  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    wait = start_compile_workers()
    assert started == []
    begun.set()
    wait()
    assert started == ["workers"]


def test_without_that_name_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, ModuleType(MODULE))
    start_compile_workers()()


def test_pytorch_has_that_name() -> None:
    from torch._inductor.async_compile import maybe_warm_pool

    assert callable(maybe_warm_pool)
