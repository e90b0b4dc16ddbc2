"""A launch that was kept has the arguments that Triton would have been given anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from triton.tools.tensor_descriptor import TensorDescriptor

from flashpoint.numerics import kept_launch
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
    if isinstance(given, TensorDescriptor):
        fields = {name: value for name, value in vars(given).items() if name != "base"} | {"type": type(given)}
        return given.base.data_ptr(), given.base.flatten().tolist(), fields
    return given.data_ptr() if isinstance(given, Tensor) else given


def tensors(odd: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    x = torch.randn(1, 2, 32, 16).bfloat16()
    y = torch.randn(1, 2, 32, 17).bfloat16()[..., 1:] if odd else torch.randn(1, 32, 2, 16).bfloat16().transpose(1, 2)
    return [x, y], [torch.empty(4), torch.empty(0)]


@pytest.mark.parametrize("odd", [False, True])
def test_the_second_launch_has_the_arguments_of_a_first_one(kernel: Kernel, odd: bool) -> None:
    """A tensor that the copy engine cannot read is copied each time."""
    once = KeptLaunch(kernel, 6, BLOCKS, CHOICES)
    once(*tensors(odd), 32, 1)
    (x, y), written = tensors(odd)
    once((x, y), written, 32, 2)
    anew = KeptLaunch(kernel, 6, BLOCKS, CHOICES)
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
