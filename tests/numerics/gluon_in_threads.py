"""Gluon's kernels without a GPU: each group of warps is a thread, its tensors are PyTorch's.

What is asynchronous happens as late as it may: a product when it is waited for, a store when the stores are waited
for. So a buffer that is given back too early has other contents by then. Barriers count arrivals and bytes as the
hardware does; a wait that nothing ends raises.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_DEADLOCK_SECONDS = 5
_MINE = threading.local()


class Values(Tensor):
    """A tensor of registers."""

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else super().to(dtype)


def values(x: Any) -> Any:
    return torch.as_tensor(x).as_subclass(Values)


class Barrier:
    def init(self, count: int) -> None:
        self.count = self.pending = count
        self.phase = self.bytes = 0
        self.changed = threading.Condition()

    def change(self, arrivals: int = 0, expected: int = 0) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += expected
            assert self.pending >= 0, "more arrivals than the barrier counts"
            if self.pending == self.bytes == 0:
                self.phase ^= 1
                self.pending = self.count
                self.changed.notify_all()

    def wait(self, phase: Any) -> None:
        time.sleep(random.random() * 2e-4)  # another thread may come first
        with self.changed:
            ended = self.changed.wait_for(lambda: self.phase != int(phase), _DEADLOCK_SECONDS)
        if not ended:
            raise TimeoutError("a barrier is waited for without end")


class Shared:
    """Shared memory: a view of a tensor, or of barriers."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def index(self, i: Any) -> Any:
        return self.of[int(i)] if isinstance(self.of, list) else Shared(self.of[int(i)])

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.of.view(shape))

    def permute(self, order: list[int]) -> Shared:
        return Shared(self.of.permute(order))

    def store(self, x: Tensor) -> None:
        self.of.copy_(x)

    def load(self, _layout: Any) -> Any:
        return values(self.of.clone())


class Product:
    """a·b + acc, computed when it is waited for."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.first_read = self._read()
        _MINE.products.append(self)

    def compute(self) -> None:
        a, b = self._read()
        for one, other in zip((a, b), self.first_read, strict=True):
            assert torch.equal(one, other), "an operand has changed under a product"
        found = a @ b
        acc = self.acc.found if isinstance(self.acc, Product) else self.acc
        self.found = values(found + acc if self.use_acc else found)

    def _read(self) -> tuple[Tensor, Tensor]:
        """The operands; NaN, which equals nothing, where nothing was copied."""
        return (self.a.of if isinstance(self.a, Shared) else self.a).float(), self.b.of.float()


class Pointer:
    def __init__(self, of: Tensor, offsets: Any = 0) -> None:
        self.of, self.offsets = of.view(-1), offsets

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.of, self.offsets + more)


class Descriptor:
    layout = None

    def __init__(self, of: Tensor, block: list[int]) -> None:
        self.of, self.block = of, block

    def window(self, coordinates: list[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Of the tensor, and of the block: what of it lies in the tensor."""
        starts = [int(start) for start in coordinates]
        sizes = [max(0, min(b, n - s)) for b, n, s in zip(self.block, self.of.shape, starts, strict=True)]
        inside = tuple(slice(s, s + size) for s, size in zip(starts, sizes, strict=True))
        return inside, tuple(slice(0, size) for size in sizes)


def _copy_in(desc: Descriptor, coordinates: list[Any], barrier: Barrier, to: Shared) -> None:
    inside, part = desc.window(coordinates)
    to.of.zero_()
    to.of[part] = desc.of[inside]
    barrier.change(expected=-to.of.numel() * to.of.element_size())


def _copy_out(desc: Descriptor, coordinates: list[Any], source: Shared) -> None:
    def copy() -> None:
        inside, part = desc.window(coordinates)
        desc.of[inside] = source.of[part]

    _MINE.stores.append(copy)


def _store_wait(_pending: int) -> None:
    while _MINE.stores:
        _MINE.stores.pop(0)()


def _wait(outstanding: int, deps: list[Any]) -> Any:
    while len(_MINE.products) > outstanding:
        _MINE.products.pop(0).compute()
    found = [x.found if isinstance(x, Product) else x for x in deps]
    return found[0] if len(found) == 1 else found


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if layout == "barrier":
        return Barrier() if shape == [1] else Shared([Barrier() for _ in range(shape[0])])
    # NaN, so that what was never copied is seen.
    return Shared(torch.full(shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype))


def _specialize(partitions: list[tuple[Any, tuple[Any, ...]]], _warps: Any, _registers: Any) -> None:
    failures: list[BaseException] = []
    program = _MINE.program

    def run(function: Any, arguments: tuple[Any, ...]) -> None:
        _MINE.products, _MINE.stores, _MINE.program = [], [], program
        try:
            function(*arguments)
            left = _MINE.products + _MINE.stores
            assert not left, "something is still under way"
        except BaseException as failure:
            failures.append(failure)

    _together([partial(run, *partition) for partition in partitions])
    if failures:
        raise failures[0]


def _together(calls: list[Callable[[], None]]) -> None:
    # Whether gradients are tracked is a thread's own affair.
    threads = [threading.Thread(target=torch.no_grad()(call), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _load(pointer: Pointer) -> Any:
    return values(pointer.of[pointer.offsets])


def _store(pointer: Pointer, x: Tensor, mask: Tensor) -> None:
    pointer.of[pointer.offsets[mask]] = x[mask]


def _limit(of: Any) -> Any:
    return lambda a, b: of(values(a), values(b))


_LANGUAGE = SimpleNamespace(
    constexpr=lambda x: x, static_range=range, static_assert=lambda *_: None,
    program_id=lambda _: values(_MINE.program[0]), num_programs=lambda _: _MINE.program[1],
    cdiv=lambda a, b: (a + b - 1) // b, minimum=_limit(torch.minimum), maximum=_limit(torch.maximum),
    NVMMADistributedLayout=lambda *_: None,
    DotOperandLayout=lambda *_: None, SliceLayout=lambda *_: None,
    allocate_shared_memory=_allocate, convert_layout=lambda x, _: x, warp_specialize=_specialize,
    zeros=lambda shape, dtype, _: values(torch.zeros(shape, dtype=dtype)),
    zeros_like=torch.zeros_like, full_like=torch.full_like, arange=lambda a, b, _: values(torch.arange(a, b)),
    where=torch.where, max=torch.amax, sum=torch.sum, exp2=torch.exp2, log=torch.log, div_rn=torch.div,
    fma=lambda a, b, c: (a.double() * b + c).float(), load=_load, store=_store,
    float32=torch.float32, bfloat16=torch.bfloat16, int8=torch.int8, int32=torch.int32, int64=torch.int64,
)  # fmt: skip
_HOPPER = SimpleNamespace(
    fence_async_shared=lambda: None,
    mbarrier=SimpleNamespace(
        MBarrierLayout=lambda: "barrier", init=lambda barrier, count: barrier.init(count),
        wait=lambda barrier, phase: barrier.wait(phase), arrive=lambda barrier: barrier.change(arrivals=1),
        expect=lambda barrier, of: barrier.change(arrivals=1, expected=of),
    ),
    tma=SimpleNamespace(
        async_copy_global_to_shared=_copy_in, async_copy_shared_to_global=_copy_out, store_wait=_store_wait
    ),
    warpgroup_mma=lambda a, b, acc, use_acc=True, is_async=False: Product(a, b, acc, use_acc),
    warpgroup_mma_init=lambda x: x, warpgroup_mma_wait=_wait,
)  # fmt: skip


def loaded(file: Path, name: str, **others: ModuleType) -> ModuleType:
    """Return a module of Gluon's kernels as plain functions.

    Args:
        others: modules that it imports, loaded in this way before, by the last part of their name.
    """

    def jit(function: Any = None, **_: Any) -> Any:
        return function if function else lambda found: found

    package = "triton.experimental"
    fakes: dict[str, Any] = {
        package: SimpleNamespace(gluon=SimpleNamespace(jit=jit)),
        f"{package}.gluon": SimpleNamespace(language=_LANGUAGE, jit=jit),
        f"{package}.gluon.language.nvidia.hopper": _HOPPER,
        **{f"flashpoint_kernels.hopper.{last}": module for last, module in others.items()},
    }
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    real = {name: sys.modules.get(name) for name in fakes}
    sys.modules.update(fakes)  # what the module imports besides stays: Triton cannot be imported twice
    try:
        spec.loader.exec_module(module)
    finally:
        for fake, before in real.items():
            del sys.modules[fake]
            if before is not None:
                sys.modules[fake] = before
    return module


def launch(kernel: Any, programs: int, *arguments: Any, **choices: Any) -> None:
    """Run the programs of a kernel side by side."""
    failures: list[BaseException] = []

    def run(number: int) -> None:
        _MINE.program = number, programs
        try:
            kernel(*arguments, **choices)
        except BaseException as failure:
            failures.append(failure)

    _together([partial(run, number) for number in range(programs)])
    if failures:
        raise failures[0]
