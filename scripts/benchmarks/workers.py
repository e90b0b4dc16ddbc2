"""Loops in processes of their own, which take turns.

Each has its own compiled code, memory and determinism: what one of them sets, the others do not see. One that waits
for its turn does nothing.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from benchmarks.kernel_groups import profiled
from benchmarks.loops import Step
from benchmarks.rounds import block, synchronize
from flashpoint.errors import UserError, notify, one_line

_CONTEXT = multiprocessing.get_context("forkserver")
"""Loops are forks of a process that has made the slow imports, and nothing else: CUDA does not survive a fork. Their
environment is that of the first loop's start."""
_CONTEXT.set_forkserver_preload(["torch._inductor.config", "flashpoint.lab.model", "flashpoint.lab.training.step"])
WARM_UP_STEPS = 6
"""More than the trainer does before it records its step."""
_PROFILE = "profile"

Builder = Callable[[], tuple[nn.Module, Step]]


@dataclass(frozen=True)
class Ready:
    """A loop that has done its first steps."""

    parameters: int
    reserved: int
    """The most bytes of the device's memory that PyTorch reserved; 0 on a CPU."""


class Worker:
    """A loop in a process of its own, which is started at once.

    Args:
        build: returns the model and a step; it can be pickled, and runs in the process.
        device: that of the step.
    """

    def __init__(self, name: str, build: Builder, device: torch.device) -> None:
        self.name = name
        self._connection, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, build, device))
        self._process.start()
        theirs.close()

    def ready(self) -> Ready:
        """Wait until the loop has done its first steps.

        Raises:
            UserError: it cannot do them.
        """
        found = self._receive()
        if isinstance(found, str):
            raise UserError(f"{self.name}: {found}")
        return found

    def seconds(self, steps: int) -> float:
        """Return the seconds of so many steps."""
        return float(self._ask(steps))

    def profile(self) -> dict[str, float]:
        """Return the milliseconds of one step by group of kernels."""
        return dict(self._ask(_PROFILE))

    def _ask(self, request: int | str) -> Any:
        self._connection.send(request)
        return self._receive()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            raise UserError(f"{self.name}: its process has ended; what it said stands above") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.close()  # it ends by itself, and gives its memory back
        self._process.join(timeout=30)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()


def those_ready(workers: Sequence[Worker], failures: list[str]) -> dict[Worker, Ready]:
    """Return the workers whose loops run; of each other one a line goes to ``failures``."""
    found = {}
    for worker in workers:
        try:
            found[worker] = worker.ready()
        except UserError as error:
            failures.append(f"Not measured: {error}.")
            notify(failures[-1])
    return found


def _serve(connection: Connection, build: Builder, device: torch.device) -> None:
    try:
        model, step = build()
        for _ in range(WARM_UP_STEPS):
            step()
        synchronize(device)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {one_line(error)}")
        return
    connection.send(Ready(sum(parameter.numel() for parameter in model.parameters()), _reserved(device)))
    while True:
        try:
            request = connection.recv()
        except EOFError:  # nobody asks any more
            return
        connection.send(profiled(step, device) if request == _PROFILE else block(step, request, device))


def _reserved(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    reserved = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()  # what is not in use is for the other processes
    return reserved
