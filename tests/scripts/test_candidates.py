"""Candidates for Hopper's kernels, without one: what they compute, run in threads, and what they compile to."""

import json
import math

import pytest
import torch
from torch import Tensor

from flashpoint.files import CONFIGS
from flashpoint.numerics.deltas import whole_saved_out
from flashpoint.numerics.layout import by_token
from flashpoint.numerics.named import variant_named
from tests.conftest import REPOSITORY
from tests.numerics.oracle import exact_attention, run_reference
from tests.scripts.gluon_in_threads import Descriptor, Pointer, add_out, added, launch, loaded
from tests.scripts.test_compile_kernels import not_interpreted

FOLDER = REPOSITORY / "scripts/benchmarks/hopper"
tiles = loaded(FOLDER / "tiles.py", "tiles_in_threads")
forward = loaded(FOLDER / "forward.py", "forward_in_threads", tiles=tiles)
backward = loaded(FOLDER / "backward.py", "backward_in_threads", tiles=tiles)
one_pass = loaded(FOLDER / "one_pass.py", "one_pass_in_threads", tiles=tiles)
one_pass.add_out, one_pass.added = add_out, added
VARIANT = variant_named("flash_fixed", CONFIGS / "attn")
B, H = 1, 2


def tensors(T: int, d: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, T, d, generator=random).bfloat16() for _ in range(4)]


def described(x: Tensor, rows: int) -> Descriptor:
    return Descriptor(x, [1, 1, rows, x.shape[-1]])


def error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).square().mean().sqrt())


@pytest.mark.slow
@pytest.mark.parametrize("T", [384, 400, 70])  # whole blocks; blocks and tiles cut short; fewer rows than a block
@pytest.mark.parametrize(("bq", "turns", "fused"), [(128, True, False), (128, False, True), (192, False, False)])
def test_a_forward_pass_of_groups_of_warps_is_as_exact_as_the_reference(
    T: int, bq: int, turns: bool, fused: bool
) -> None:
    q, k, v, grad_out = tensors(T, 64)
    out, residual, logsumexp = by_token(q, q.dtype), by_token(q, torch.int8), torch.full((B, H, T), float("nan"))
    launch(
        forward.hopper_fwd_kernel, 2, described(q, 64), described(k, 128), described(v, 128), described(out, 64),
        described(residual, 64), Pointer(logsumexp), B, H, T, 2,
        BQ=bq, BK=128, D=64, STAGES=2, UNIT=64**-0.5, MANTISSA=13, FUSED=fused, TURNS=turns, REGISTERS=240,
    )  # fmt: skip
    exact, reference = exact_attention(q, k, v, grad_out), run_reference(q, k, v, grad_out, VARIANT)
    for name, found in (("out", out), ("logsumexp", logsumexp)):
        assert error(found, exact[name]) <= 1.2 * error(reference[name], exact[name])
    # P̄ is rounded beneath both; O's own rounding is gone from the two parts.
    assert error(whole_saved_out(out, residual, VARIANT), exact["out"]) <= 0.95 * error(out, exact["out"])


def rows_of(exact: dict[str, Tensor], grad_out: Tensor) -> Tensor:
    """L/ln 2 and δ as the backward kernels read them."""
    T = grad_out.shape[-2]
    rows = torch.zeros(2, B * H, -(-T // 128) * 128)
    rows[0] = float("inf")
    rows[0, :, :T] = (exact["logsumexp"] / math.log(2)).flatten(0, 1)
    rows[1, :, :T] = (exact["out"] * grad_out).sum(-1).flatten(0, 1)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("T", [384, 400, 70, 30])
def test_a_backward_pass_of_groups_of_warps_is_as_exact_as_the_reference(T: int) -> None:
    q, k, v, grad_out = tensors(T, 64)
    exact, reference = exact_attention(q, k, v, grad_out), run_reference(q, k, v, grad_out, VARIANT)
    rows = rows_of(exact, grad_out)
    T_rows = rows.shape[-1]
    grad_q, grad_k, grad_v = (torch.full_like(q, float("nan")) for _ in range(3))
    scales = {"D": 64, "STAGES": 2, "UNIT": 64**-0.5, "ALPHA": 64**-0.5}
    for bk in (64, 128):
        launch(
            backward.hopper_dq_kernel, 2, described(q, 64), described(k, bk), described(v, bk),
            described(grad_out, 64), described(grad_q, 64), Pointer(rows), B, H, T, 2, T_rows, rows[0].numel(),
            BK=bk, **scales,
        )  # fmt: skip
        assert error(grad_q, exact["grad_q"]) <= 1.05 * error(reference["grad_q"], exact["grad_q"])
        grad_q.fill_(float("nan"))
    launch(
        backward.hopper_dkdv_kernel, 2, described(q, 64), described(k, 64), described(v, 64), described(grad_out, 64),
        Descriptor(rows, [1, 1, 64]), described(grad_k, 64), described(grad_v, 64), B, H, T, 2, BQ=64, **scales,
    )  # fmt: skip
    for name, found in (("grad_k", grad_k), ("grad_v", grad_v)):
        assert error(found, exact[name]) <= 1.05 * error(reference[name], exact[name])


@pytest.mark.slow
@pytest.mark.parametrize("T", [384, 400, 70, 30])
def test_a_backward_pass_in_one_kernel_adds_up_in_one_order(T: int) -> None:
    q, k, v, grad_out = tensors(T, 64)
    exact, reference = exact_attention(q, k, v, grad_out), run_reference(q, k, v, grad_out, VARIANT)
    rows = rows_of(exact, grad_out)
    found = []
    for programs in (3, 1):
        grad_k, grad_v = (torch.full_like(q, float("nan")) for _ in range(2))
        summed, turns = torch.zeros(B * H, T, 64), torch.zeros(B * H, -(-T // 64), dtype=torch.int32)
        launch(
            one_pass.hopper_bwd_kernel, programs, *(described(x, 64) for x in (q, k, v, grad_out)),
            Descriptor(rows, [1, 1, 64]), described(grad_k, 64), described(grad_v, 64),
            Descriptor(summed, [1, 64, 32]), Pointer(turns), B, H, T, D=64, STAGES=2, UNIT=64**-0.5, ALPHA=64**-0.5,
        )  # fmt: skip
        grad_q = (summed.view(B, H, T, 64) * 64**-0.5).bfloat16()
        for name, grad in (("grad_q", grad_q), ("grad_k", grad_k), ("grad_v", grad_v)):
            assert error(grad, exact[name]) <= 1.05 * error(reference[name], exact[name])
        found.append(summed)
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_groups_of_warps_fit_a_hopper_and_do_not_wait_for_each_product() -> None:
    """Where it has too few registers, the assembler waits for each product: there are more waits than were written."""
    told: dict[str, dict[str, int]] = json.loads(not_interpreted("-m", "tests.scripts.candidates_compiled"))
    assert told
    for name, taken in told.items():
        assert taken["shared"] <= 227 * 1024, name
        assert taken["spilled"] <= 256, name
        assert taken["waits"] == taken["waits written"], name
