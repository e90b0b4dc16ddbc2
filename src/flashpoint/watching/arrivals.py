"""Numbers of a watched loop on their way from a GPU to whoever asked for them; nobody waits.

A loop launches work well ahead of the GPU. Whoever reads a number there waits until the GPU has done all of it, and the
GPU then waits until the loop has launched more. So the numbers are copied behind the work, and read when they have long
arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor

from flashpoint.watching.guard import Guard

Number = Tensor | float
_Take = Callable[[Sequence[Number]], None]


class Arrivals:
    """Hands over numbers in the order in which they were asked for: those of the host at once, unless others are before
    them; those of a GPU at the second turn after they were asked for, however fast the GPU is.

    What fails in handing over is told, and the others are handed over.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._asked: list[tuple[str, Sequence[Number], _Take]] = []
        self._hand_over: Callable[[], None] | None = None  # what is being copied

    def ask(self, what: str, numbers: Sequence[Number], take: _Take) -> None:
        """Have ``take`` called with numbers, those of a GPU as tensors of the same bits on the CPU. Tensors may not be
        overwritten before.

        Args:
            what: is told where it fails.
        """
        if self._asked or self._hand_over is not None or any(map(is_far, numbers)):
            self._asked.append((what, numbers, take))
        else:
            self._guard.do(what, partial(take, numbers))

    def turn(self) -> None:
        """Begin to copy what was asked for since the last turn, and hand over what was begun to be copied there."""
        asked, self._asked = self._asked, []
        hand_over, self._hand_over = self._hand_over, None
        if asked:
            self._guard.do("reading from the GPU", lambda: self._begin(asked))
        if hand_over is not None:
            self._guard.do("reading from the GPU", hand_over)

    def end(self) -> None:
        """Hand over everything."""
        self.turn()
        self.turn()

    def _begin(self, asked: Sequence[tuple[str, Sequence[Number], _Take]]) -> None:
        arrived = begin_copies([one for _, numbers, _ in asked for one in numbers if is_far(one)])

        def hand_over() -> None:
            here = iter(arrived())
            for what, numbers, take in asked:
                self._guard.do(what, partial(take, [next(here) if is_far(one) else one for one in numbers]))

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
