"""Loops in processes of their own, which take turns.

Each has its own compiled code, memory and determinism: what one of them sets, the others do not see. One that waits
for its turn does nothing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from benchmarks.kernel_groups import profiled
from benchmarks.loops import Step
from benchmarks.rounds import Times, block, interleaved, synchronize
from flashpoint.errors import UserError, notify, one_line

_CONTEXT = multiprocessing.get_context("forkserver")
"""Loops are forks of a process that has made the slow imports, and nothing else: CUDA does not survive a fork. Their
environment is that of the first loop's start."""
_CONTEXT.set_forkserver_preload(["torch._inductor.config", "flashpoint.lab.model", "flashpoint.lab.training.step"])
WARM_UP_STEPS = 6
"""More than the trainer does before it records its step."""
_PROFILE = "profile"
_CONTEXT_BYTES = 600 * 2**20
"""What a process takes of a GPU's memory before it has a tensor."""
_MORE_THAN_PLAIN = 1.25
"""Memory of a loop at most, over the plain one's: the graph of a step, copies of the weights."""

Builder = Callable[[], tuple[nn.Module, Step]]


@dataclass(frozen=True)
class Ready:
    """A loop that has done its first steps."""

    parameters: int
    reserved: int
    """The most bytes of the device's memory that PyTorch reserved; 0 on a CPU."""


@dataclass(frozen=True)
class Measured:
    """Times of one loop, and of the plain loop in the same rounds."""

    times: Times
    plain: Times
    ready: Ready


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


def taking_turns(
    plain_name: str,
    plain_build: Builder,
    builders: Mapping[str, Builder],
    device: torch.device,
    seconds: float,
    profiles: bool = False,
) -> tuple[dict[str, Measured], dict[str, dict[str, float]], list[str]]:
    """Return what was measured of each loop, the plain one last, its profile, and a line for each loop that failed.

    As many loops as the memory holds are there at a time, and the plain one is always among them.

    Args:
        builders: of the loops beside the plain one, by name.
        seconds: of each loop.
        profiles: whether a step of each is profiled, too.

    Raises:
        UserError: the plain loop cannot run, or a process ended in its turn.
    """
    measured: dict[str, Measured] = {}
    profiles_of: dict[str, dict[str, float]] = {}
    failures: list[str] = []
    with Worker(plain_name, plain_build, device) as plain:
        plain_ready = plain.ready()
        at_a_time = _places(device, plain_ready, len(builders))
        names = list(builders)
        for first in range(0, len(names), at_a_time):
            with contextlib.ExitStack() as held:
                some = names[first : first + at_a_time]
                started = [held.enter_context(Worker(name, builders[name], device)) for name in some]
                ready = _those_ready(started, failures)  # they compile side by side
                loops = {plain_name: plain, **{worker.name: worker for worker in ready}}
                times = interleaved({name: worker.seconds for name, worker in loops.items()}, seconds)
                for worker, state in ready.items():
                    measured[worker.name] = Measured(times[worker.name], times[plain_name], state)
                    if profiles:
                        profiles_of[worker.name] = worker.profile()
        measured[plain_name] = Measured(times[plain_name], times[plain_name], plain_ready)
        if profiles:
            profiles_of[plain_name] = plain.profile()  # last: a profiler may slow what follows
    return measured, profiles_of, failures


def _places(device: torch.device, plain: Ready, wanted: int) -> int:
    """Return how many loops to hold beside the plain one."""
    if device.type != "cuda":
        return wanted
    free = torch.cuda.mem_get_info()[0] - plain.reserved  # which it gave back, and takes again for its turn
    return max(1, min(wanted, int(free / (plain.reserved * _MORE_THAN_PLAIN + _CONTEXT_BYTES))))


def _those_ready(workers: Sequence[Worker], failures: list[str]) -> dict[Worker, Ready]:
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
