"""Launches the passes around an attention in FP16, in eager mode.

Tensors have any shape and strides. What they become has the layout that ``torch.empty_like`` gives it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashpoint.numerics.kept_launch import KeptLaunch
from flashpoint.numerics.layout import allocator
from flashpoint_kernels import fp16_inside
from flashpoint_kernels.codes import PROGRAMS, STATES
from flashpoint_kernels.rounding import INTERPRETED

_WARPS = 8
_WIDEST = 256
_ALIGNED = 8
"""Elements that strides count at once where they can: Triton then reads 16 bytes of FP16 at a time."""


def to_fp16(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k and v in FP16, what is beyond it as its largest number, and what was found, [STATES] float32."""
    with on_device_of(q):
        way, read, cast = _prepared((q, k, v), (torch.float16,) * 3)
        state = _state(q)
        _launch("to_fp16_kernel", way, (*read, *cast, state), *way.numbers)
    return cast[0], cast[1], cast[2], state


def from_fp16(out: Tensor, dtype: torch.dtype, state: Tensor, counted: Tensor | None) -> Tensor:
    """Return O in another dtype.

    Args:
        state: of :func:`to_fp16`.
        counted: [] int64, to which the call and what was beyond FP16 are added.
    """
    with on_device_of(out):
        way, (read,), (cast,) = _prepared((out,), (dtype,))
        pointed_at = read, cast, state, state if counted is None else counted
        _launch("from_fp16_kernel", way, pointed_at, *way.numbers, counts=counted is not None)
    return cast


def scaled(grad_out: Tensor, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return dO in another dtype, times a power of two (:func:`flashpoint.numerics.stabilizers.power_of_two`), and
    [STATES] float32, which has it at FACTOR_AT.

    Args:
        tokens: T.
    """
    with on_device_of(grad_out):
        way, (read,), (inside,) = _prepared((grad_out,), (dtype,))
        state = _state(grad_out)
        _launch("largest_kernel", way, (read, state), *way.numbers)
        _launch("scale_kernel", way, (read, inside, state), tokens, *way.numbers)
    return inside, state


def divided(
    grads: Sequence[Tensor], state: Tensor, dtypes: Sequence[torch.dtype], counted: Tensor | None
) -> list[Tensor]:
    """Return dQ, dK and dV divided by the power of two, each in its dtype.

    Args:
        state: of :func:`scaled`.
        counted: [] int64, to which the call is added, and whether dQ or dK is not finite and dV is.
    """
    with on_device_of(state):
        way, read, plain = _prepared(grads, dtypes)
        pointed_at = (*read, *plain, state, state if counted is None else counted)
        _launch("divide_kernel", way, pointed_at, *way.numbers, counts=counted is not None)
    return plain


class _Way(NamedTuple):
    """How a launch reads its tensors (:mod:`flashpoint_kernels.fp16_inside`)."""

    width: int
    step: int
    numbers: tuple[int, ...]
    """Six of each tensor."""
    results: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Shape and strides of what each tensor becomes."""
    is_large: bool
    """Whether Triton takes one of the numbers for 64 bits."""


_HERE = contextlib.nullcontext()


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which the device of ``x`` is the current one, on which Triton launches."""
    return _HERE if x.get_device() == torch._C._cuda_getDevice() else torch.cuda.device(x.device)


def _launch(kernel: str, way: _Way, tensors: Sequence[Tensor], *numbers: int, counts: bool = False) -> None:
    """Launch a kernel by its name.

    Args:
        counts: a choice that some kernels have.
    """
    # Which of large numbers take 64 bits follows from all of them.
    key = tensors[0].get_device(), *map(_dtype, tensors), *(numbers if way.is_large else ())
    _kept(kernel, way.width, way.step, counts, key)((), tensors, *numbers)


_dtype, _allocator = attrgetter("dtype"), lru_cache(allocator)


@lru_cache(maxsize=256)
def _kept(kernel: str, width: int, step: int, counts: bool, _key: tuple[object, ...]) -> KeptLaunch:
    programs = 4 if INTERPRETED else PROGRAMS
    choices = {"PROGRAMS": programs, "WIDTH": width, "STEP": step, "COUNTS": counts}
    function = getattr(fp16_inside, kernel)
    taken = {name: choice for name, choice in choices.items() if name in function.arg_names}
    return KeptLaunch(function, programs, (), {**taken, "num_warps": _WARPS})


def _prepared(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> tuple[_Way, Sequence[Tensor], list[Tensor]]:
    """Return how to read tensors, those to read, and uninitialised ones of these dtypes for what they become.

    Those to read are copies where one of them lies in no way that there is.
    """
    way = _way(*itertools.chain.from_iterable(map(_layout, tensors)))
    if way is None:
        tensors = [torch.empty_like(x).copy_(x) for x in tensors]
        way = _way(*itertools.chain.from_iterable(map(_layout, tensors)))
        assert way is not None
    allocate = _allocator(tensors[0].device)
    return way, tensors, [allocate(*layout, dtype) for layout, dtype in zip(way.results, dtypes, strict=True)]


def _layout(x: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    return x.shape, x.stride()


def _state(x: Tensor) -> Tensor:
    """Return an uninitialised state [STATES] float32 on a device."""
    return _allocator(x.device)((STATES,), (1,), torch.float32)


@lru_cache(maxsize=4096)
def _way(*layouts: Any) -> _Way | None:
    """Return how tensors are read, given the shape and the strides of each."""
    shapes = layouts[::2]
    results = tuple(
        (tuple(shape), torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride())
        for shape, strides in zip(shapes, layouts[1::2], strict=True)
    )
    runs = [
        _runs(shape, strides, out_strides) for (shape, out_strides), strides in zip(results, layouts[1::2], strict=True)
    ]
    if not all(axes and axes[-1][1] == 1 for axes in runs):
        return None
    width = min(_WIDEST, *(axes[-1][0] & -axes[-1][0] or _WIDEST for axes in runs))
    numbers: list[list[int]] = []
    for *outer, (size, _) in runs:
        levels = [*outer, *([(size // width, width)] if size != width else [])]
        if len(levels) > 3:
            return None
        (n0, s0), (n1, s1), (n2, s2) = [(1, 0)] * (3 - len(levels)) + levels
        numbers.append([n0 * n1 * n2, n1, n2, s0, s1, s2])
    step = _ALIGNED if all(stride % _ALIGNED == 0 for row in numbers for stride in row[3:]) else 1
    whole = tuple(number for row in numbers for number in (*row[:3], *(stride // step for stride in row[3:])))
    return _Way(width, step, whole, results, max(whole) >= 2**31)


def _runs(shape: tuple[int, ...], strides: tuple[int, ...], out_strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return sizes and strides of a tensor in the order in which ``out_strides`` have them, the innermost last, with
    dimensions that follow each other as one."""
    order = sorted((i for i, size in enumerate(shape) if size != 1), key=lambda i: out_strides[i], reverse=True)
    runs = [(1, 1)] if not order else []
    for size, stride in ((shape[i], strides[i]) for i in order):
        if runs and runs[-1][1] == size * stride:
            runs[-1] = runs[-1][0] * size, stride
        else:
            runs.append((size, stride))
    return runs if math.prod(shape) else [(0, 1)]
