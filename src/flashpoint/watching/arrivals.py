"""Numbers of a watched loop on their way from a GPU to whoever asked for them; nobody waits.

A loop launches work well ahead of the GPU. Whoever reads a number there waits until the GPU has done all of it, and the
GPU then waits until the loop has launched more. So the numbers are copied behind the work, and read when they have long
arrived.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from flashpoint.watching.events import Handler, LastRead, Publish, ReadDue
from flashpoint.watching.left_out import whole

Number = Tensor | float


class Arrival(Protocol):
    """An event, as a frozen dataclass, that has numbers."""

    @property
    def numbers(self) -> Sequence[Number]: ...


class Arrivals:
    """Publishes events once their numbers can be read, in the order in which they were asked for.

    Those with numbers of the host come at once, unless others are before them. Those of a GPU come at the second turn
    after they were asked for, however fast the GPU is.
    """

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._asked: list[Any] = []
        self._hand_over: Callable[[], None] | None = None  # what is being copied

    @property
    def handlers(self) -> Sequence[Handler]:
        """Turns, after those who ask at the same event."""
        what = "reading from the GPU"
        return Handler(ReadDue, what, lambda _: self.turn()), Handler(LastRead, what, lambda _: self.end())

    def ask(self, event: Arrival) -> None:
        """Have an event published with its numbers, those of a GPU as tensors of the same bits on the CPU. Tensors may
        not be overwritten before."""
        if self._asked or self._hand_over is not None or any(map(is_far, event.numbers)):
            self._asked.append(event)
        else:
            self._publish(event)

    def turn(self) -> None:
        """Begin to copy what was asked for since the last turn, and hand over what was begun to be copied there."""
        asked, self._asked = self._asked, []
        hand_over, self._hand_over = self._hand_over, None
        try:
            if asked:
                self._begin(asked)
        finally:
            if hand_over is not None:
                hand_over()

    def end(self) -> None:
        """Hand over everything."""
        try:
            self.turn()
        finally:
            self.turn()

    def _begin(self, asked: Sequence[Any]) -> None:
        arrived = begin_copies([one for event in asked for one in event.numbers if is_far(one)])

        def hand_over() -> None:
            here = iter(arrived())
            for event in asked:
                numbers = [next(here) if is_far(one) else one for one in event.numbers]
                self._publish(dataclasses.replace(event, numbers=numbers))

        self._hand_over = hand_over


def is_far(number: Number) -> TypeGuard[Tensor]:
    """Return whether to read a number is to wait for a GPU."""
    return isinstance(number, Tensor) and number.is_cuda


def begin_copies(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Begin to copy tensors to the host, those of a GPU together; what is returned returns them once they are there."""
    places: dict[torch.device, list[int]] = {}
    for place in sorted(range(len(tensors)), key=lambda place: -tensors[place].itemsize):  # so that all are aligned
        places.setdefault(tensors[place].device, []).append(place)
    copies = [
        (some, begin_copy(torch.cat([tensors[place].detach().reshape(-1).view(torch.uint8) for place in some])))
        for some in places.values()
    ]

    def arrived() -> list[Tensor]:
        found = list(tensors)
        for some, copied in copies:
            parts = copied().split([tensors[place].nbytes for place in some])
            for place, part in zip(some, parts, strict=True):
                found[place] = part.view(tensors[place].dtype).view(tensors[place].shape)
        return found

    return arrived


def begin_copy(packed: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a GPU's tensor to the host; what is returned waits until it is there, and returns it."""
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    copied = torch.cuda.current_stream(packed.device).record_event()

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return wait


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
