"""The kernels for Hopper without one: which choices they compute, what, run in threads, and what they compile to."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from flashpoint.numerics import launch, warp_groups
from flashpoint.numerics.choices import UNROUNDED, DeltaError
from flashpoint.numerics.compile_time import runs_warp_groups
from flashpoint.numerics.deltas import whole_saved_out
from flashpoint.numerics.reference import flash_fwd
from flashpoint.numerics.variant import AttentionVariant
from tests.conftest import REPOSITORY
from tests.numerics.gluon_in_threads import Descriptor, Pointer, loaded, values
from tests.numerics.gluon_in_threads import launch as launch_in_threads
from tests.numerics.oracle import exact_attention, noise_key, run_reference
from tests.numerics.test_kernels import FROM_FILES
from tests.scripts.test_compile_kernels import not_interpreted

FOLDER = REPOSITORY / "kernels/flashpoint_kernels/hopper"
tiles = loaded(FOLDER / "tiles.py", "tiles_in_threads")
forward = loaded(FOLDER / "forward.py", "forward_in_threads", tiles=tiles)
backward = loaded(FOLDER / "backward.py", "backward_in_threads", tiles=tiles)
FIXED = FROM_FILES["flash_fixed"]
CONTEXT: dict[str, Any] = {"layer": 1, "seed_and_step": torch.zeros(2, dtype=torch.int64)}
D = 128


class InThreads:
    """A kernel of Gluon, launched as Triton launches it."""

    def __init__(self, kernel: Callable[..., None]) -> None:
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def run(*given: Any, num_warps: int, num_stages: int, maxnreg: int, enable_fp_fusion: bool, **choices: Any):
            self.launches += 1
            launch_in_threads(self.kernel, grid[0], *map(as_emulated, given), **choices)

        return run


def as_emulated(given: Any) -> Any:
    if isinstance(given, Tensor):
        return Pointer(given)
    return Descriptor(given.base, given.block_shape) if hasattr(given, "block_shape") else given


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[InThreads]:
    """A Hopper with two multiprocessors; the kernels that were launched are counted."""
    kernels = []
    for module in (forward, backward):
        for name in ("hopper_fwd_kernel", "hopper_dq_kernel", "hopper_dkdv_kernel"):
            if hasattr(module, name):
                kernels.append(InThreads(getattr(module, name)))
                monkeypatch.setattr(warp_groups, name, kernels[-1])
    monkeypatch.setattr(warp_groups, "_multiprocessors", lambda _: 2)
    monkeypatch.setattr(launch, "chip_of", lambda _: "sm_90")
    monkeypatch.setattr(launch, "INTERPRETED", False)
    launch._plan.cache_clear()
    yield kernels
    launch._plan.cache_clear()


def tensors(T: int, shape: tuple[int, int] = (1, 2)) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, T, D, generator=random).bfloat16() for _ in range(4)]


def run(given: list[Tensor], scale: float | None = None) -> dict[str, Tensor]:
    q, k, v, grad_out = given
    saved = launch.flash_fwd(q, k, v, FIXED, **CONTEXT, scale=scale)
    grads = launch.flash_bwd(grad_out, q, k, v, *saved, FIXED, **CONTEXT, scale=scale)
    names = ("out", "logsumexp", "residual", "grad_q", "grad_k", "grad_v")
    return dict(zip(names, (*saved[:3], *grads), strict=True))


def error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).square().mean().sqrt())


@pytest.mark.slow
@pytest.mark.parametrize("T", [384, 400, 70, 1])  # whole blocks; blocks and tiles cut short; fewer rows than a block
def test_both_passes_are_as_exact_as_the_reference(hopper: list[InThreads], T: int) -> None:
    given = tensors(T)
    found = run(given)
    assert [kernel.launches for kernel in hopper] == [1, 1, 1]
    exact, reference = exact_attention(*given), run_reference(*given, FIXED)
    for name in ("out", "grad_q", "grad_k", "grad_v"):
        assert error(found[name], exact[name]) <= 1.05 * error(reference[name], exact[name]), name
    # P̄ is rounded beneath both; O's own rounding is gone from the two parts.
    whole = whole_saved_out(found["out"], found["residual"], FIXED)
    assert error(whole, exact["out"]) <= 0.95 * error(found["out"], exact["out"])


@pytest.mark.slow
@pytest.mark.parametrize("scale", [None, 0.1, 0.125])
def test_l_is_as_exact_as_one_of_scores_that_have_alpha(hopper: list[InThreads], scale: float | None) -> None:
    """The reference multiplies each score; here α is in the factor of the exponential, which is FP32."""
    q, k, v, grad_out = tensors(700, (1, 4))
    found = launch.flash_fwd(q, k, v, FIXED, **CONTEXT, scale=scale)[1]
    reference = flash_fwd(q, k, v, FIXED, noise_key(q), scale=scale)[1]
    exact = exact_attention(q, k, v, grad_out, scale=scale)["logsumexp"]
    assert error(found, exact) <= error(reference, exact)


def test_l_is_rounded_once() -> None:
    """A row with one key; the α of L is that of P̄: the FP32 factor of the exponential, times ln 2."""
    shift = values(40 * torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    found = forward.log_sums(shift, torch.ones_like(shift), D**-0.5)
    factor = torch.tensor(D**-0.5 / math.log(2)).double()
    assert torch.equal(found, (shift.double() * (factor * math.log(2))).float())


@pytest.mark.slow
def test_statistics_are_those_of_the_general_kernels(hopper: list[InThreads]) -> None:
    q, k, v, _ = tensors(70)
    shift, ones = launch.row_statistics(q, k, v, FIXED, **CONTEXT)
    assert not any(kernel.launches for kernel in hopper)
    scores = (q.float() @ k.float().mT * D**-0.5).masked_fill(torch.ones(70, 70, dtype=torch.bool).triu(1), -math.inf)
    torch.testing.assert_close(shift, scores.amax(-1))
    assert ones.min() >= 1


@pytest.mark.slow
def test_bits_depend_on_nothing_but_the_head(hopper: list[InThreads]) -> None:
    """Neither on the other sequences and heads nor on how tensors lie in memory."""
    given = tensors(200, (2, 2))
    together = run(given)
    packed = torch.stack(given[:3], 3).permute(3, 0, 1, 2, 4)  # rows of 3 · D
    strided = run([*packed.unbind(0), given[3].transpose(1, 2).contiguous().transpose(1, 2)])
    alone = run([x[1:, 1:] for x in given])
    for name, x in together.items():
        assert torch.equal(x, strided[name]), name
        assert torch.equal(x[1:, 1:], alone[name]), name


@pytest.mark.slow
def test_a_gradient_of_one_number_for_all_is_copied(hopper: list[InThreads]) -> None:
    """As ``out.sum().backward()`` makes it."""
    q, k, v, grad_out = tensors(70)
    one = torch.ones((), dtype=grad_out.dtype).expand(grad_out.shape)
    for name, x in run([q, k, v, one]).items():
        assert torch.equal(x, run([q, k, v, one.contiguous()])[name]), name


OTHERS = {
    **{name: variant for name, variant in FROM_FILES.items() if name != "flash_fixed"},
    "other probs": dataclasses.replace(FIXED, probs=UNROUNDED),
    "other blocks": dataclasses.replace(FIXED, block_k=128),
    "other residual": dataclasses.replace(FIXED, out_residual_bits=5),
    "injected": dataclasses.replace(FIXED, delta_error=DeltaError(kind="bias", size=1e-3)),
    "some heads": dataclasses.replace(FIXED, heads=(1,), elsewhere=AttentionVariant()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_choices_keep_the_general_kernels(name: str) -> None:
    assert not runs_warp_groups(OTHERS[name].groups(1, 2), 1, D, "sm_90")


def test_the_choices_of_flash_fixed_have_the_kernels_for_hopper_whatever_their_name() -> None:
    groups = dataclasses.replace(FIXED, name="mine").groups(1, 2)
    assert runs_warp_groups(groups, 1, D, "sm_90")
    assert runs_warp_groups(groups, 1, D, "sm_90", scale=0.3)
    assert not runs_warp_groups(groups, 1, D, "sm_90", causal=False)
    assert not runs_warp_groups(groups, 1, D, "sm_90", scale=-0.3)
    assert not runs_warp_groups(groups, 1, 64, "sm_90")
    assert not any(runs_warp_groups(groups, 1, D, chip) for chip in ("sm_80", "sm_100", "gfx942", None))
    elsewhere = dataclasses.replace(FIXED, layers=(2,), elsewhere=AttentionVariant())
    errs_in_2 = dataclasses.replace(FIXED, delta_error=DeltaError(kind="bias", size=1e-3, layers=(2,)))
    assert [runs_warp_groups(elsewhere.groups(layer, 2), layer, D, "sm_90") for layer in (1, 2)] == [False, True]
    assert [runs_warp_groups(errs_in_2.groups(layer, 2), layer, D, "sm_90") for layer in (1, 2)] == [True, False]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_they_fit_a_hopper_and_do_not_wait_for_each_product() -> None:
    """Where it has too few registers, the assembler waits for each product: there are more waits than were written."""
    told: dict[str, dict[str, int]] = json.loads(not_interpreted("-m", "tests.numerics.warp_groups_compiled"))
    assert {name.split("_")[0] for name in told} == {"hopper", "row"}
    for name, taken in told.items():
        assert taken["shared"] <= 227 * 1024, name
        assert taken["spilled"] <= 80, name
        assert taken["waits"] == taken["waits written"], name
