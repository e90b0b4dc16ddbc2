"""Launches of a kernel again and again, and what its copy engine can read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor


class KeptLaunch:
    """Launches of a kernel whose choices stay. What Triton made of the first is kept for all like it: to find it again
    takes Triton's own launch longer than all else that the host does for a call.

    Args:
        programs: of the grid.
        blocks: what the copy engine moves at a time of each of the first tensors.
        choices: the compile-time arguments, and Triton's options.
    """

    def __init__(self, kernel: Any, programs: int, blocks: Sequence[Sequence[int]], choices: dict[str, Any]) -> None:
        self._kernel, self._grid, self._blocks, self._choices = kernel, (programs, 1, 1), blocks, choices
        self._kept: dict[tuple[object, ...], tuple[Callable[..., None], list[_Form], list[Any]]] = {}

    def __call__(self, copied: Sequence[Tensor], pointed_at: Sequence[Tensor], *numbers: int) -> None:
        """Launch with tensors that the copy engine reads, those that the kernel has pointers to, and always
        the same numbers but for those that Triton does not specialise for.

        A tensor to read is itself copied first if need be (:func:`readable`).
        """
        addresses = [x.data_ptr() for x in pointed_at]
        like: list[object] = []  # what Triton, and who makes a descriptor, tells apart
        for x in copied:
            like += x.dtype, x.shape, x.stride(), x.data_ptr() % 16
        for x, address in zip(pointed_at, addresses, strict=True):
            like += x.dtype, address % 16 == 0
        if kept := self._kept.get(tuple(like)):
            run, forms, constants = kept
            run(*map(_descriptor, copied, forms), *addresses, *numbers, *constants)
            return
        tensors, strides = zip(*map(readable, copied), strict=True)
        first = [
            TensorDescriptor(x, list(x.shape), list(of), list(block))
            for x, of, block in zip(tensors, strides, self._blocks, strict=True)
        ]
        compiled = self._kernel[self._grid](*first, *pointed_at, *numbers, **self._choices)
        if isinstance(compiled, CompiledKernel):  # the interpreter compiles nothing
            names = self._kernel.arg_names[len(first) + len(pointed_at) + len(numbers) :]
            forms = [
                (x is not given, {name: of for name, of in vars(one).items() if name != "base"})
                for given, x, one in zip(copied, tensors, first, strict=True)
            ]
            self._kept[tuple(like)] = compiled[self._grid], forms, [self._choices[name] for name in names]


_Form = tuple[bool, dict[str, Any]]
"""Of a descriptor that Triton checked: whether its tensor had to be copied, and all but the tensor."""


def _descriptor(x: Tensor, form: _Form) -> TensorDescriptor:
    """Return the descriptor of a tensor that lies in memory as one whose descriptor was checked."""
    had_to_be_copied, fields = form
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    vars(descriptor).update(fields, base=readable(x)[0] if had_to_be_copied else x)
    return descriptor


def readable(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return a tensor as the copy engine can read it, and the strides that it reads it by.

    It is copied if its rows are not contiguous or strides and address no multiples of 16 bytes.
    """
    strides = _strides_to_read(x.shape, x.stride())
    if strides is None or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)  # also of one that only its address keeps from being read
        strides = _strides_to_read(x.shape, x.stride())
    assert strides is not None
    return x, strides


@lru_cache(maxsize=4096)
def _strides_to_read(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides with those of dimensions of size 1 replaced, which mean nothing; None of what has to be
    copied."""
    meant = [stride for size, stride in zip(shape[:-1], strides[:-1], strict=True) if size > 1]
    if strides[-1] != 1 or any(stride <= 0 or stride % 8 for stride in meant):
        return None
    largest = max((size * stride for size, stride in zip(shape, strides, strict=True) if size > 1), default=8)
    rounded = -(-largest // 8) * 8
    last = len(shape) - 1
    return tuple(
        rounded if size == 1 and i < last else stride
        for i, (size, stride) in enumerate(zip(shape, strides, strict=True))
    )
