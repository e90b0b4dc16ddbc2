"""Launches of a kernel again and again, and what its copy engine can read."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

_READY: dict[tuple[object, ...], tuple[Callable[..., None], tuple[Any, ...]]] = {}
"""Triton's launcher in C and what it is given, by all that this follows from. A step asks PyTorch's allocator for what
the step before it did, and gets the same addresses. No tensor is kept: what lies there may be freed."""
_READY_AT_MOST = 2048
"""Some 3 KB each."""


class KeptLaunch:
    """Launches of a kernel on one device, whose choices stay. What Triton made of the first is kept for all like it,
    and what its launcher in C was given is kept for those at the same addresses: to find both again takes Triton longer
    than all else that the host does for a call.

    Args:
        programs: of the grid.
        blocks: what the copy engine moves at a time of each of the first tensors.
        choices: the compile-time arguments, and Triton's options.
        described: makes a descriptor of a tensor, its shape, its strides and a block.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        blocks: Sequence[Sequence[int]],
        choices: dict[str, Any],
        described: Callable[[Tensor, list[int], list[int], list[int]], Any] = TensorDescriptor,
    ) -> None:
        self._kernel, self._grid, self._blocks, self._choices = kernel, (programs, 1, 1), blocks, choices
        self._described = described
        self._kept: dict[tuple[object, ...], _Kept] = {}
        self._stream: Callable[[], int] = int  # the interpreter has none

    def __call__(self, copied: Sequence[Tensor], pointed_at: Sequence[Tensor], *numbers: int) -> None:
        """Launch with tensors that the copy engine reads or writes, those that the kernel has pointers to, and always
        the same numbers but for those that Triton does not specialise for. Where tensors lie anew as others did, by
        address and strides, they have the shapes and dtypes of those.

        A tensor to read is itself copied first if need be (:func:`readable`); one to write lies as ``by_token`` has it.
        """
        at, pointers = (*map(_address, copied),), (*map(_address, pointed_at),)
        strides, stream = (*map(_strides, copied),), self._stream()
        exact_key = self, stream, *numbers, *at, *pointers, *strides
        hooked = _has_hooks()
        if (ready := _READY.get(exact_key)) and not hooked:
            launch, arguments = ready
            launch(*arguments)
            return
        # What Triton, and who makes a descriptor, tells apart.
        forms = *map(_form, copied), *strides, *map(_dtype, pointed_at)
        form_key = *forms, *(address % 16 for address in at), *(address % 16 == 0 for address in pointers)
        if not (kept := self._kept.get(form_key)):
            self._kept_first(form_key, copied, pointed_at, numbers)
        elif hooked or kept.in_c is None:
            kept.launch(*map(_descriptor, copied, kept.forms), *pointers, *numbers, *kept.constants)
        else:
            launch, arguments_of = kept.in_c
            descriptors = map(_descriptor, map(_Address, at), kept.forms)
            arguments = arguments_of(*self._grid, stream, *descriptors, *pointers, *numbers, *kept.constants)
            if len(_READY) >= _READY_AT_MOST:
                _READY.clear()
            _READY[exact_key] = launch, arguments
            launch(*arguments)

    def _kept_first(
        self,
        form_key: tuple[object, ...],
        copied: Sequence[Tensor],
        pointed_at: Sequence[Tensor],
        numbers: Sequence[int],
    ) -> None:
        read = [*map(readable, copied)]
        first = [
            self._described(x, list(x.shape), list(strides), list(block))
            for (x, strides), block in zip(read, self._blocks, strict=True)
        ]
        compiled = self._kernel[self._grid](*first, *pointed_at, *numbers, **self._choices)
        if isinstance(compiled, CompiledKernel):  # the interpreter compiles nothing
            names = self._kernel.arg_names[len(first) + len(pointed_at) + len(numbers) :]
            forms = [
                (x is not given, type(one), {name: value for name, value in vars(one).items() if name != "base"})
                for given, (x, _), one in zip(copied, read, first, strict=True)
            ]
            constants = [self._choices[name] for name in names]
            in_c = None if any(had_to_be_copied for had_to_be_copied, _, _ in forms) else _in_c(compiled)
            self._kept[form_key] = _Kept(compiled[self._grid], in_c, forms, constants)
            if in_c is not None:
                self._stream = partial(driver.active.get_current_stream, driver.active.get_current_device())


_address, _strides, _form, _dtype = Tensor.data_ptr, Tensor.stride, attrgetter("dtype", "shape"), attrgetter("dtype")

_Form = tuple[bool, type[Any], dict[str, Any]]
"""Of a descriptor that Triton checked: whether its tensor had to be copied, its type, and all but the tensor."""


class _Kept(NamedTuple):
    launch: Callable[..., None]
    """Triton's, of this grid."""
    in_c: tuple[Callable[..., None], Callable[..., tuple[Any, ...]]] | None
    """:func:`_in_c`; None where a tensor has to be copied, too."""
    forms: list[_Form]
    constants: list[Any]


class _Address(int):
    """Stands for a tensor in a descriptor, which keeps no memory by it."""

    def data_ptr(self) -> int:
        return int(self)


def _descriptor(x: Any, form: _Form) -> Any:
    """Return the descriptor of a tensor, or of what stands for it, that lies in memory as one whose descriptor was
    checked."""
    had_to_be_copied, kind, fields = form
    descriptor = object.__new__(kind)
    vars(descriptor).update(fields, base=readable(x)[0] if had_to_be_copied else x)
    return descriptor


def _has_hooks() -> bool:
    """Whether somebody, such as a profiler, has asked Triton to be told of launches."""
    entered, left = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(entered, "calls", entered) or getattr(left, "calls", left))


def _in_c(compiled: CompiledKernel) -> tuple[Callable[..., None], Callable[..., tuple[Any, ...]]] | None:
    """Return the function in C that a launch of Triton ends in, and what leads from a grid, a stream and a kernel's
    arguments to those of that function, by Triton's own way.

    Returns:
        None where Triton has more to do for each launch, such as to allocate memory, and where it launches in another
        way than the releases 3.6 to 3.9.
    """
    launcher: Any = getattr(compiled, "run", None)
    if type(launcher) is not nvidia.CudaLauncher or not hasattr(nvidia, "wrap_handle_tensordesc"):
        return None
    for_each = "global_scratch_size", "profile_scratch_size"
    if any(getattr(launcher, size, True) for size in for_each) or getattr(launcher, "gsan_enabled", False):
        return None
    launch = launcher.launch
    # Of a kernel without descriptors there is nothing around it.
    found = inspect.getclosurevars(launch).nonlocals.get("launcher") if inspect.isfunction(launch) else launch
    if not callable(found):
        return None
    seen = threading.local()

    def see(*arguments: Any) -> None:
        seen.arguments = arguments

    shows = copy.copy(launcher)
    shows.launch = nvidia.wrap_handle_tensordesc(see, compiled.src.signature, compiled.metadata.tensordesc_meta)

    def arguments_of(x: int, y: int, z: int, stream: int, *given: Any) -> tuple[Any, ...]:
        shows(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *given)
        arguments: tuple[Any, ...] = seen.arguments
        return arguments

    return found, arguments_of


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
