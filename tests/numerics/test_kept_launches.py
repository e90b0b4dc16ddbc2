"""A launch that was kept has the arguments that Triton would have been given anew, and so has its launcher in C."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel, LazyDict
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from flashpoint.numerics import kept_launch, warp_groups
from flashpoint.numerics.kept_launch import KeptLaunch

CHOICES = {"D": 16, "CAUSAL": True, "num_warps": 4}
BLOCKS = [[1, 1, 16, 16], [1, 1, 32, 16]]


class Compiled:
    """What Triton makes of a kernel, and the arguments of its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *given: self.launches.append((grid, *given))


class Kernel:
    """A kernel of Triton: each launch through it is a look-up, or a compilation."""

    arg_names = ("x_desc", "y_desc", "out_ptr", "sums_ptr", "T", "layer", "D", "CAUSAL")

    def __init__(self) -> None:
        self.looked_up: list[tuple[Any, ...]] = []
        self.compiled = Compiled()

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*given: Any, **choices: Any) -> Compiled:
            assert choices == CHOICES
            self.looked_up.append((grid, *given))
            return self.compiled

        return run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(kept_launch, "CompiledKernel", Compiled)
    return Kernel()


def as_triton_takes(given: Any) -> Any:
    """Return what the driver reads of an argument."""
    if isinstance(given, TensorDescriptor | warp_groups.TensorDescriptor):
        fields = {name: value for name, value in vars(given).items() if name != "base"} | {"type": type(given)}
        return given.base.data_ptr(), given.base.flatten().tolist(), fields
    return given.data_ptr() if isinstance(given, Tensor) else given


def tensors(odd: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    x = torch.randn(1, 2, 32, 16).bfloat16()
    y = torch.randn(1, 2, 32, 17).bfloat16()[..., 1:] if odd else torch.randn(1, 32, 2, 16).bfloat16().transpose(1, 2)
    return [x, y], [torch.empty(4), torch.empty(0)]


@pytest.mark.parametrize("described", [TensorDescriptor, warp_groups._described])
@pytest.mark.parametrize("odd", [False, True])
def test_the_second_launch_has_the_arguments_of_a_first_one(kernel: Kernel, odd: bool, described: Any) -> None:
    """A tensor that the copy engine cannot read is copied each time."""
    once = KeptLaunch(kernel, 6, BLOCKS, CHOICES, described)
    once(*tensors(odd), 32, 1)
    (x, y), written = tensors(odd)
    once((x, y), written, 32, 2)
    anew = KeptLaunch(kernel, 6, BLOCKS, CHOICES, described)
    anew((x, y), written, 32, 2)
    (kept,) = kernel.compiled.launches
    _, wanted = kernel.looked_up
    found = [*map(as_triton_takes, kept)]
    expected = [*map(as_triton_takes, wanted), CHOICES["D"], CHOICES["CAUSAL"]]
    if odd:  # two copies lie at two addresses
        for given in (found, expected):
            given[2] = given[2][1:]
    assert found == expected


@pytest.mark.parametrize("other", ["dtype", "strides", "alignment", "shape"])
def test_what_triton_tells_apart_is_no_launch_that_was_kept(kernel: Kernel, other: str) -> None:
    once = KeptLaunch(kernel, 6, BLOCKS, CHOICES)
    read, written = tensors()
    once(read, written, 32, 1)
    x, y = read
    changed = {
        "dtype": ([x, y], [written[0].half(), written[1]]),
        "strides": ([y, x], written),
        "alignment": ([x, y], [torch.empty(5)[1:], written[1]]),
        "shape": ([x[:, :1].contiguous(), y], written),
    }
    once(*changed[other], 32, 1)
    assert len(kernel.looked_up) == 2
    assert not kernel.compiled.launches


class InC:
    """Triton's launcher in C, which calls hooks; and what tells it the stream and encodes descriptors."""

    def __init__(self) -> None:
        self.launches: list[list[Any]] = []
        self.stream = 0
        self.utils = SimpleNamespace(fill_tma_descriptor=lambda *of: of, fill_tma_descriptor_tiled=lambda *of: of)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return self.stream + device

    def __call__(self, *given: Any) -> None:
        hooks = [one for one in given if isinstance(one, knobs.HookChain)]
        told = next((one.get() for one in given if isinstance(one, LazyDict)), None)
        flat = [*given[:-1], *given[-1]] if isinstance(given[-1], list) else given
        self.launches.append([as_c_reads(one) for one in flat])
        for hook in hooks:
            hook(told)


def as_c_reads(given: Any) -> Any:
    """Return an argument of the launcher as its code in C reads it; what is for hooks is nothing."""
    if isinstance(given, knobs.HookChain | LazyDict):
        return None
    return given.data_ptr() if isinstance(given, Tensor) else given


class OnADevice(CompiledKernel):
    """What Triton compiled and loaded."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def __del__(self) -> None:
        """Unload nothing."""


class InTriton(Kernel):
    """A kernel whose launches go all the way that Triton has in Python. ``swizzle`` of a chip without a copy engine is
    None."""

    def __init__(self, in_c: InC, swizzle: int | None, scratch: int = 0) -> None:
        super().__init__()
        meta = [
            swizzle and {"swizzle": swizzle, "elem_size": 2, "elem_type": 10, "block_size": block, "fp4_padded": False}
            for block in BLOCKS
        ]
        kinds = ["tensordesc<bf16[1,1,16,16]>"] * 2 + ["*fp32"] * 2 + ["i32"] * 2 + ["constexpr"] * 2
        signature = dict(zip(self.arg_names, kinds, strict=True))
        launcher = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
        vars(launcher).update(
            launch=nvidia.wrap_handle_tensordesc(in_c, signature, meta),
            num_ctas=1, launch_cooperative_grid=False, launch_pdl=False, gsan_enabled=False,
            global_scratch_size=scratch, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
            arg_annotations="annotations", kernel_signature="signature",
        )  # fmt: skip
        self.compiled: Any = OnADevice(
            _run=launcher, module=1, function=2, packed_metadata=(4, 1, 0), name="kernel",
            src=SimpleNamespace(signature=signature), metadata=SimpleNamespace(tensordesc_meta=meta),
        )  # fmt: skip


@pytest.fixture
def in_c(monkeypatch: pytest.MonkeyPatch) -> InC:
    found = InC()
    monkeypatch.setattr(driver, "_active", found)
    return found


def launched(once: KeptLaunch, in_c: InC, given: Any, *numbers: int) -> list[Any]:
    once(*given, *numbers)
    return in_c.launches.pop()


def by_triton(once: KeptLaunch, in_c: InC, given: Any, *numbers: int) -> list[Any]:
    """Launch beside a hook, which Triton serves itself."""
    told: list[Any] = []
    knobs.runtime.launch_enter_hook.add(told.append)
    try:
        found = launched(once, in_c, given, *numbers)
    finally:
        knobs.runtime.launch_enter_hook.remove(told.append)
    assert [metadata["name"] for metadata in told] == ["kernel"]
    return found


@pytest.mark.parametrize("swizzle", [3, None])
def test_the_launcher_in_c_is_given_what_triton_gives_it(in_c: InC, swizzle: int | None) -> None:
    """Again at addresses that it has seen, at others, in another stream, and with another number."""
    once = KeptLaunch(InTriton(in_c, swizzle), 6, BLOCKS, CHOICES)
    given, others = tensors(), tensors()
    once(*given, 32, 1)
    seen = []
    for stream, which, layer in [(0, given, 1), (0, others, 1), (5, given, 1), (0, given, 2)] * 2:
        in_c.stream = stream
        found = launched(once, in_c, which, 32, layer)
        assert found == by_triton(once, in_c, which, 32, layer)
        seen.append(found)
    assert seen[:4] == seen[4:]
    assert all(seen[0] != other for other in seen[1:4])


@pytest.mark.parametrize("swizzle", [3, None])
def test_what_is_kept_keeps_no_tensor(in_c: InC, swizzle: int | None) -> None:
    kernel = InTriton(in_c, swizzle)
    once = KeptLaunch(kernel, 6, BLOCKS, CHOICES)
    given = tensors()
    for _ in range(3):
        once(*given, 32, 1)
    seen = [weakref.ref(x) for which in given for x in which]
    kernel.looked_up.clear()
    del given
    assert all(one() is None for one in seen)
    assert len(in_c.launches) == 2


def test_a_kernel_without_descriptors_is_launched_in_c(in_c: InC) -> None:
    kernel = InTriton(in_c, None)
    kernel.arg_names = kernel.arg_names[2:]  # type: ignore[misc]
    signature = dict(zip(kernel.arg_names, ["*fp32"] * 2 + ["i32"] * 2 + ["constexpr"] * 2, strict=True))
    kernel.compiled.run.launch, kernel.compiled.src.signature = in_c, signature
    kernel.compiled.metadata.tensordesc_meta = None
    once = KeptLaunch(kernel, 6, (), CHOICES)
    given, others = ((), tensors()[1]), ((), tensors()[1])
    once(*given, 32, 1)
    for which, layer in [(given, 1), (others, 1), (given, 2)] * 2:
        assert launched(once, in_c, which, 32, layer) == by_triton(once, in_c, which, 32, layer)
    assert len(kernel.looked_up) == 1
    assert sum(ready[0] is once for ready in kept_launch._READY) == 3


def test_a_launch_that_needs_memory_of_its_own_is_left_to_triton(in_c: InC, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = iter(range(100, 103))
    monkeypatch.setattr(nvidia._allocation, "_allocator", SimpleNamespace(get=lambda: lambda *_: next(memory)))
    once = KeptLaunch(InTriton(in_c, 3, scratch=16), 6, BLOCKS, CHOICES)
    given = tensors()
    once(*given, 32, 1)
    for address in range(100, 103):
        assert address in launched(once, in_c, given, 32, 1)


def test_few_addresses_are_kept(in_c: InC, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_launch, "_READY", {})
    monkeypatch.setattr(kept_launch, "_READY_AT_MOST", 2)
    once = KeptLaunch(InTriton(in_c, 3), 6, BLOCKS, CHOICES)
    many = [tensors() for _ in range(4)]
    once(*many[0], 32, 1)
    for given in many * 2:
        assert launched(once, in_c, given, 32, 1) == by_triton(once, in_c, given, 32, 1)
        assert len(kept_launch._READY) <= 2
