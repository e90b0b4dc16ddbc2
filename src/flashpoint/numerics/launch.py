"""Launches the Triton kernels: the same numerics as :mod:`flashpoint.numerics.reference`, all heads in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from flashpoint.hardware import capability, chip_of
from flashpoint.numerics.compile_time import compile_time_choices, launch_options, runs_warp_groups
from flashpoint.numerics.deltas import dtype_of_saved
from flashpoint.numerics.kept_launch import KeptLaunch, readable
from flashpoint.numerics.layout import Saved, allocator, by_token, contiguous, strides_by_token
from flashpoint.numerics.variant import AttentionVariant, Groups
from flashpoint_kernels.center_keys import center_keys_kernel
from flashpoint_kernels.flash_bwd_dkdv import flash_bwd_dkdv_kernel
from flashpoint_kernels.flash_bwd_dq import flash_bwd_dq_kernel
from flashpoint_kernels.flash_fwd import flash_fwd_kernel
from flashpoint_kernels.rounding import INTERPRETED
from flashpoint_kernels.tile_sizes import FALLBACK, GROUP_BYTES, Tiles, tiles_of

if TYPE_CHECKING:
    from flashpoint.numerics.warp_groups import WarpGroups

PAIRS_FROM = 90
"""Compute capability from which the kernels take arithmetic on two BF16 values in a word."""
_CHUNK_ELEMENTS = 16_384
"""Elements of K that the centring pass reads at a time."""


def kernels_support(dtype: torch.dtype, head_size: int, variant: AttentionVariant) -> bool:
    """Whether the kernels compute ``variant`` on tensors of a dtype with so many features; the reference does all
    others.

    They take BF16, d ∈ {16, 32, 64, 128} and key blocks of whole tiles; where ``grad_blocks`` rounds, of whole tiles of
    the backward pass, 64 keys. ``variant.elsewhere`` is not looked at.
    """
    if dtype != torch.bfloat16 or head_size not in FALLBACK:
        return False
    block = variant.block_k
    smallest = 16 if variant.grad_blocks.mode == "none" else 64
    return block is None or (block >= smallest and triton.next_power_of_2(block) == block)


def flash_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: AttentionVariant,
    *,
    layer: int,
    seed_and_step: Tensor,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the attention of all heads.

    Args:
        q, k, v: [B, H, T, d] bfloat16, read in place where rows are contiguous and strides are multiples of 16 bytes.
        variant: every numerical choice, and the layers and heads it holds for.
        layer: from 1.
        seed_and_step: [2] int64, key of stochastic rounding.
        causal: whether a query sees no later key; otherwise it sees all.
        scale: α; None is 1/√d.

    Returns:
        O, L, what δ takes beside O, and the centred keys, as :func:`flashpoint.numerics.reference.flash_fwd` has them.
        The last two are empty where no variant asks. O lies in memory as [B, T, H, d].
    """
    plan = _plan(variant, layer, q.shape, q.device, chip_of(q.device), causal, scale)
    out, logsumexp, out_for_delta, centered = _forward(plan, q, k, v, seed_and_step)
    return out, logsumexp, out_for_delta, q.new_empty(0) if centered is None else centered


def row_statistics(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, *, layer: int, seed_and_step: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute what decides the rounding of a row, in an extra forward pass (:func:`flash_fwd`).

    Returns:
        shift: the final m [B, H, T] float32, nats.
        ones: [B, H, T] int32: the P̄ that are exactly 1 as operands of P̄V, under the row's final m.
    """
    shift = q.new_empty(q.shape[:-1], dtype=torch.float32)
    ones = torch.empty_like(shift, dtype=torch.int32)
    plan = _plan(variant, layer, q.shape, q.device, chip_of(q.device), True, None)
    _forward(plan, q, k, v, seed_and_step, (shift, ones))
    return shift, ones


def flash_bwd(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    out_for_delta: Tensor,
    centered: Tensor,
    variant: AttentionVariant,
    *,
    layer: int,
    seed_and_step: Tensor,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV of :func:`flash_fwd` from what it took and returned; each lies in memory as [B, T, H, d]."""
    plan = _plan(variant, layer, q.shape, q.device, chip_of(q.device), causal, scale)
    saved = out, logsumexp, out_for_delta, centered if centered.numel() else None
    return _backward(plan, grad_out, q, k, v, saved, seed_and_step)


def flash_bwd_dq(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    out_for_delta: Tensor,
    variant: AttentionVariant,
    *,
    layer: int,
    seed_and_step: Tensor,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the first half of :func:`flash_bwd`: δ and dQ. ``k`` is centred if a variant centres keys.

    Returns:
        grad_q: dQ [B, H, T, d].
        rows: L and the δ of dK, [2, B·H, T'] float32, with T' the next multiple of a block of queries; L/ln 2 in
            place of L from the kernels for Hopper.
        drift: Σᵢ (Σⱼ dSᵢⱼ) qᵢ over each block of queries, [B·H, blocks, d] float32, α left out; empty unless K is
            centred.
    """
    plan = _plan(variant, layer, q.shape, q.device, chip_of(q.device), causal, scale)
    return _grad_q(plan, grad_out, q, k, v, (out, logsumexp, out_for_delta), seed_and_step)


class Passes:
    """Both passes on tensors of one shape on one GPU.

    Args:
        variant: every numerical choice, and the layers and heads it holds for.
        layer: from 1.
        causal, scale: as for :func:`flash_fwd`.
        shape: of q, k and v, [B, H, T, d].
    """

    def __init__(
        self, variant: AttentionVariant, layer: int, causal: bool, scale: float, shape: torch.Size, device: torch.device
    ) -> None:
        self.call = variant, layer, causal, scale
        self._device = device
        with torch.cuda.device(device):
            self._plan = _plan(variant, layer, shape, device, chip_of(device), causal, scale)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seed_and_step: Tensor) -> Saved:
        """Return what :func:`flash_fwd` does; None in place of centred keys where none are."""
        if _current_device() == self._device.index:
            return _forward(self._plan, q, k, v, seed_and_step)
        with torch.cuda.device(self._device):  # on which Triton launches
            return _forward(self._plan, q, k, v, seed_and_step)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: Saved, seed_and_step: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dQ, dK and dV of ``forward``, which returned what is ``saved``."""
        if _current_device() == self._device.index:
            return _backward(self._plan, grad_out, q, k, v, saved, seed_and_step)
        with torch.cuda.device(self._device):
            return _backward(self._plan, grad_out, q, k, v, saved, seed_and_step)


def _current_device() -> int:
    """Return its index; of a process that has a GPU's tensor, and need not look whether there are GPUs."""
    return torch._C._cuda_getDevice()


def _forward(
    plan: _Plan, q: Tensor, k: Tensor, v: Tensor, seed_and_step: Tensor,
    statistics: tuple[Tensor, Tensor] | None = None,
) -> Saved:  # fmt: skip
    if plan.warp_groups and not statistics:
        return (*plan.warp_groups.forward(q, k, v), None)
    B, H, T, _ = plan.shape
    out = plan.by_token(torch.float32 if plan.returns_fp32 else q.dtype)
    out_for_delta = plan.by_token(plan.saved) if plan.saves_another else q.new_empty(0, dtype=plan.saved)
    logsumexp = plan.empty(B, H, T)
    centered = _center_keys(k, plan.selected, *plan.center_keys) if any(plan.center_keys) else None
    (plan.statistics if statistics else plan.forward)(
        (q, k if centered is None else centered, v),
        (out, out_for_delta, logsumexp, *(statistics or plan.no_statistics), seed_and_step, plan.selected),
        B, H, T, plan.layer, plan.side_by_side,
    )  # fmt: skip
    return out, logsumexp, out_for_delta, centered


def _backward(
    plan: _Plan, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: Saved, seed_and_step: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    out, logsumexp, out_for_delta, centered = saved
    k = k if centered is None else centered
    # An FP32 O hands back a gradient that autocast made from BF16: nothing is lost here.
    grad_out = grad_out if grad_out.dtype == q.dtype else grad_out.to(q.dtype)
    grad_q, rows, drift = _grad_q(plan, grad_out, q, k, v, (out, logsumexp, out_for_delta), seed_and_step)
    grad_k, grad_v = _grad_kv(plan, grad_out, q, k, v, rows, drift, seed_and_step)
    return grad_q, grad_k, grad_v


def _grad_q(
    plan: _Plan, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, Tensor, Tensor],
    seed_and_step: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out, logsumexp, out_for_delta = saved
    if plan.warp_groups:
        rows = plan.warp_groups.row_deltas(grad_out, out, logsumexp, out_for_delta)
        return plan.warp_groups.grad_q(grad_out, q, k, v, rows), rows, plan.no_drift
    B, H, T, d = plan.shape
    blocks, T_rows = plan.blocks, plan.blocks * plan.tiles.grad_q.bq
    grad_q, rows = plan.by_token(q.dtype), plan.empty(2, B * H, T_rows)
    drift = plan.empty(B * H, blocks, d) if any(plan.center_keys) else plan.no_drift
    centered = _center_keys(k, plan.selected, True) if plan.centers_grad_q else k
    plan.grad_q(
        (q, k, centered, v, grad_out),
        (out, out_for_delta, logsumexp, rows, drift, grad_q, seed_and_step, *plan.error_sizes, plan.selected),
        B, H, T, T_rows, B * H * T_rows, plan.layer, plan.side_by_side,
    )  # fmt: skip
    return grad_q, rows, drift


def _grad_kv(
    plan: _Plan, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, drift: Tensor, seed_and_step: Tensor
) -> tuple[Tensor, Tensor]:
    if plan.warp_groups:
        return plan.warp_groups.grad_kv(grad_out, q, k, v, rows)
    B, H, T, _ = plan.shape
    T_rows = rows.shape[-1]
    grad_k, grad_v = plan.by_token(k.dtype), plan.by_token(v.dtype)
    plan.grad_kv(
        (q, k, v, grad_out), (rows, drift, grad_k, grad_v, seed_and_step, plan.selected),
        B, H, T, T_rows, B * H * T_rows, plan.blocks, plan.layer, plan.side_by_side,
    )  # fmt: skip
    return grad_k, grad_v


def _center_keys(k: Tensor, selected: Tensor, centers: bool, elsewhere: bool | None = None) -> Tensor:
    """Compute K − mean_T(K) of the heads that centre keys, in a pass of its own; other heads keep K."""
    B, H, T, d = k.shape
    k, _ = readable(k)
    centered = by_token(k, k.dtype)
    center_keys_kernel[(B * H,)](
        k, centered, selected, *k.stride()[:3], H, T,
        D=d, BT=_CHUNK_ELEMENTS // d, CENTERS=centers, ELSEWHERE=elsewhere, enable_fp_fusion=False,
    )  # fmt: skip
    return centered


@dataclass(frozen=True)
class _Plan:
    """What is decided once for all calls of a variant in a layer on tensors of one shape."""

    shape: tuple[int, ...]
    """[B, H, T, d]."""
    strides: tuple[int, ...]
    """Of results, which lie in memory as [B, T, H, d]."""
    layer: int
    allocate: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
    returns_fp32: bool
    saves_another: bool
    saved: torch.dtype
    center_keys: list[bool]
    """Of the selected heads, and of the others."""
    centers_grad_q: bool
    selected: Tensor
    error_sizes: tuple[Tensor, Tensor]
    no_statistics: tuple[Tensor, Tensor]
    no_drift: Tensor
    tiles: Tiles
    blocks: int
    """Of queries, in the pass that makes dQ."""
    side_by_side: int
    warp_groups: WarpGroups | None
    """The kernels that take the place of the following ones, but for statistics."""
    forward: KeptLaunch
    statistics: KeptLaunch
    """The forward pass that counts, too (:func:`row_statistics`)."""
    grad_q: KeptLaunch
    grad_kv: KeptLaunch

    def by_token(self, dtype: torch.dtype) -> Tensor:
        return self.allocate(self.shape, self.strides, dtype)

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialised tensor float32."""
        return self.allocate(shape, contiguous(shape), torch.float32)


@lru_cache(maxsize=1024)
def _plan(
    variant: AttentionVariant,
    layer: int,
    shape: torch.Size,
    device: torch.device,
    chip: str | None,
    causal: bool,
    scale: float | None,
) -> _Plan:
    _, H, T, d = shape
    groups = variant.groups(layer, H)
    variants = [chosen for chosen, _ in groups]
    side_by_side = max(1, GROUP_BYTES // (4 * T * d))  # the heads whose K and V stay in L2 together
    warp_groups = None
    if runs_warp_groups(groups, layer, d, None if INTERPRETED else chip, causal, scale):
        from flashpoint.numerics.warp_groups import WarpGroups  # Gluon is there for NVIDIA's chips alone

        warp_groups = WarpGroups(shape, device, _choices(groups, layer, d, causal, scale)["C"], side_by_side)
    tiles = tiles_of(None if INTERPRETED else chip, d)
    forward, statistics, grad_q, grad_kv = _launches(groups, layer, shape, tiles, chip, causal, scale)
    return _Plan(
        shape=tuple(shape),
        strides=strides_by_token(shape),
        layer=layer,
        allocate=allocator(device),
        returns_fp32=any(chosen.returns_fp32 for chosen in variants),
        saves_another=any(chosen.saved_out != "none" for chosen in variants),
        saved=dtype_of_saved(variants),
        center_keys=[chosen.center_keys for chosen in variants],
        centers_grad_q=any(chosen.center_grad_q for chosen in variants),
        selected=_selection(groups[0][1] if len(groups) > 1 else (), H, device),
        error_sizes=(_error_sizes(variants[0], layer, device), _error_sizes(variants[-1], layer, device)),
        no_statistics=(torch.empty(0, dtype=torch.int32, device=device),) * 2,
        no_drift=torch.empty(0, dtype=torch.float32, device=device),
        tiles=tiles,
        blocks=triton.cdiv(T, tiles.grad_q.bq),
        side_by_side=side_by_side,
        warp_groups=warp_groups,
        forward=forward,
        statistics=statistics,
        grad_q=grad_q,
        grad_kv=grad_kv,
    )


def _launches(
    groups: Groups, layer: int, shape: torch.Size, tiles: Tiles, chip: str | None, causal: bool, scale: float | None
) -> tuple[KeptLaunch, KeptLaunch, KeptLaunch, KeptLaunch]:
    """Return the launches of the forward pass, of the one that counts, of dQ, and of dK and dV."""
    B, H, T, d = shape
    fwd, dq, dkdv = tiles.forward, tiles.grad_q, tiles.grad_kv
    tokens_of_block = [chosen.block_k or triton.next_power_of_2(T) for chosen, _ in groups]
    bk = max(16, min(fwd.bk, *tokens_of_block))
    choices = _choices(groups, layer, d, causal, scale)
    of_fwd = {
        "D": d, "BQ": fwd.bq, "BK": bk,
        **_choices(groups, layer, d, causal, scale, [max(1, block // bk) for block in tokens_of_block]),
        "PAIRS": not INTERPRETED and capability(chip) >= PAIRS_FROM, **launch_options(fwd),
    }  # fmt: skip
    in_one_pass = any(chosen.corrects_in_one_pass for chosen, _ in groups)
    of_dq = {"D": d, "BQ": dq.bq, "BK": dq.bk, **choices, **launch_options(dq, in_one_pass)}
    of_dkdv = {"D": d, "BQ": dkdv.bq, "BK": dkdv.bk, **choices, **launch_options(dkdv)}

    def kept(kernel: Any, tokens: int, copied: Sequence[int], given: dict[str, Any]) -> KeptLaunch:
        """Return launches with a program for so many tokens, that copies tiles of so many tokens of its tensors."""
        return KeptLaunch(kernel, triton.cdiv(T, tokens) * B * H, [[1, 1, some, d] for some in copied], given)

    return (
        kept(flash_fwd_kernel, fwd.bq, (fwd.bq, bk, bk), {**of_fwd, "STATISTICS": False}),
        kept(flash_fwd_kernel, fwd.bq, (fwd.bq, bk, bk), {**of_fwd, "STATISTICS": True}),
        kept(flash_bwd_dq_kernel, dq.bq, (dq.bq, dq.bk, dq.bk, dq.bk, dq.bq), of_dq),
        kept(flash_bwd_dkdv_kernel, dkdv.bk, (dkdv.bq, dkdv.bk, dkdv.bk, dkdv.bq), of_dkdv),
    )


def _choices(
    groups: Groups,
    layer: int,
    head_size: int,
    causal: bool,
    scale: float | None,
    tiles_per_block: Sequence[int] = (1, 1),
) -> dict[str, Any]:
    """Return the compile-time choices of a launch: of all heads, or of the selected ones and of the others."""
    chosen = [
        compile_time_choices(variant, layer, head_size**-0.5 if scale is None else scale, causal, tiles)
        for (variant, _), tiles in zip(groups, tiles_per_block, strict=False)
    ]
    return {"C": chosen[0], "ELSEWHERE": chosen[1] if len(chosen) > 1 else None}


@lru_cache(maxsize=256)
def _selection(heads: tuple[int, ...], n_head: int, device: torch.device) -> Tensor:
    """Return which heads are selected, [H] int32. It is copied once, because a copy to a GPU waits for the GPU."""
    return torch.tensor([int(head in heads) for head in range(n_head)], dtype=torch.int32, device=device)


@lru_cache(maxsize=256)
def _error_sizes(variant: AttentionVariant, layer: int, device: torch.device) -> Tensor:
    """Return the sizes of the errors injected into δ, [sizes] float32. They are copied once, as the selection is."""
    return torch.tensor(variant.delta_error.sizes_in(layer), device=device)
