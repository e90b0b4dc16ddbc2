"""The forward and the backward pass of a layer: by the kernels on a GPU, else by the reference.

Shapes, and what each tensor holds: :mod:`flashpoint.numerics.reference`. ``seed_and_step`` [2] int64 is the key of
stochastic rounding.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from flashpoint.errors import notify
from flashpoint.numerics import reference
from flashpoint.numerics.deltas import dtype_of_saved
from flashpoint.numerics.layout import Form, Saved, by_token
from flashpoint.numerics.rounding import NoiseKey
from flashpoint.numerics.variant import AttentionVariant

TRITON = 3, 6
"""The oldest release of Triton that the kernels compile with."""


class Passes(Protocol):
    """The forward and the backward pass of a layer on tensors of one form."""

    call: tuple[AttentionVariant, int, bool, float]
    """The variant, the layer from 1, whether it is causal, and α."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seed_and_step: Tensor) -> Saved:
        """Return O, L, what δ takes beside O and centred keys, or None where none are."""

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: Saved, seed_and_step: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dQ, dK and dV; ``saved`` is what ``forward`` returned."""


def passes_of(q: Tensor | Form, choices: AttentionVariant, layer: int, causal: bool, scale: float) -> Passes:
    """Return the passes of tensors like q [B, H, T, d]: by the kernels, where they support every variant of the layer
    on this device, else by the reference."""
    return _passes_of(choices, layer, causal, scale, q.dtype, q.shape, q.device)


@lru_cache(maxsize=1024)
def _passes_of(
    choices: AttentionVariant, layer: int, causal: bool, scale: float, dtype: torch.dtype, shape: torch.Size,
    device: torch.device,
) -> Passes:  # fmt: skip
    if kernels := _kernels_for(device.type, dtype, shape[-1], shape[1], choices, layer):
        passes: Passes = kernels.Passes(choices, layer, causal, scale, shape, device)
        return passes
    return _ByReference(choices, layer, causal, scale)


class _ByReference:
    def __init__(self, choices: AttentionVariant, layer: int, causal: bool, scale: float) -> None:
        self.call = choices, layer, causal, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seed_and_step: Tensor) -> Saved:
        choices, layer, causal, scale = self.call
        saved = saved_like(q, choices, layer)

        def compute(share: slice) -> None:
            q_, k_, v_, *saved_ = _share_of(share, q, k, v, *saved)
            for group, heads in choices.groups(layer, q.shape[1]):
                noise, at = noise_key(q_, seed_and_step, layer, heads), index_of(heads, q)
                parts = reference.flash_fwd(q_[:, at], k_[:, at], v_[:, at], group, noise, causal, scale)
                for whole, part in zip(saved_, parts, strict=True):
                    if part.numel():
                        whole[:, at] = part.to(whole.dtype)

        _in_shares(compute, q, choices)
        return saved

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: Saved, seed_and_step: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        choices, layer, causal, scale = self.call
        grads = by_token(q, q.dtype), by_token(k, k.dtype), by_token(v, v.dtype)
        whole_of = [q.new_empty(0) if x is None else x for x in (grad_out, q, k, v, *saved)]

        def compute(share: slice) -> None:
            inputs, results = _share_of(share, *whole_of), _share_of(share, *grads)
            for group, heads in choices.groups(layer, q.shape[1]):
                noise, at = noise_key(inputs[1], seed_and_step, layer, heads), index_of(heads, q)
                g, q_, k_, v_, o, lse, o_delta, keys = (x[:, at] if x.numel() else x for x in inputs)
                parts = reference.flash_bwd(g, q_, k_, v_, o, lse, o_delta, keys, group, noise, causal, scale)
                for whole, part in zip(results, parts, strict=True):
                    whole[:, at] = part

        _in_shares(compute, q, choices)
        return grads


_SMALL = 1 << 15
"""Elements of q up to which PyTorch, too, leaves the work to one thread."""


def _in_shares(compute: Callable[[slice], None], q: Tensor, variant: AttentionVariant) -> None:
    """Compute the reference of all sequences: on a CPU each thread takes a share of them, through all its small
    operations. PyTorch's threads would meet after every one of these, and wait for each other as long as they work.

    Sequences have nothing to do with each other, so shares change no bit. Random bits are drawn for a whole batch.

    Args:
        compute: of a slice of B, in a thread of its own.
        q: [B, H, T, d].
    """
    threads = torch.get_num_threads()
    count = 1 if q.is_cuda or variant.draws or q.numel() <= _SMALL else min(threads, q.shape[0])
    size = max(1, -(-q.shape[0] // count))
    first, *others = (slice(start, start + size) for start in range(0, max(1, q.shape[0]), size))

    def alone(share: slice) -> None:
        torch.set_num_threads(1)  # of the thread that calls it
        with torch.no_grad():
            compute(share)

    with torch.autocast(q.device.type, enabled=False):
        if not others:
            compute(first)
            return
        try:
            waiting = [_helpers(os.getpid(), threads - 1).submit(alone, share) for share in others]
            alone(first)
            for one in waiting:
                one.result()
        finally:
            torch.set_num_threads(threads)


@lru_cache(maxsize=1)
def _helpers(process: int, threads: int) -> ThreadPoolExecutor:  # a process that was forked has none of its parent's
    return ThreadPoolExecutor(threads, thread_name_prefix="flashpoint")


def _share_of(share: slice, *tensors: Tensor) -> list[Tensor]:
    """Return the sequences of a share, of tensors [B, …] or empty ones."""
    return [x[share] if x.numel() else x for x in tensors]


def kernels_for(q: Tensor, variant: AttentionVariant, layer: int) -> ModuleType | None:
    """Return the kernels' launcher if the kernels support every variant of the layer on this device, else None."""
    return _kernels_for(q.device.type, q.dtype, q.shape[-1], q.shape[1], variant, layer)


@lru_cache(maxsize=1024)
def _kernels_for(
    device_type: str, dtype: torch.dtype, head_size: int, n_head: int, variant: AttentionVariant, layer: int
) -> ModuleType | None:
    if device_type != "cuda" or not triton_suffices():
        return None
    from flashpoint.numerics import launch  # a CPU need not wait for Triton

    groups = variant.groups(layer, n_head)
    return launch if all(launch.kernels_support(dtype, head_size, group) for group, _ in groups) else None


@lru_cache
def triton_suffices() -> bool:
    """Whether Triton is new enough for the kernels; if not, tell it once."""
    if not has_triton():
        notify(
            f"the kernels need Triton {'.'.join(map(str, TRITON))}, which PyTorch 2.10 brings; here it is "
            f"{_triton_found()}: the reference computes in their place, slower"
        )
    return has_triton()


@lru_cache
def has_triton() -> bool:
    """Whether Triton is new enough for the kernels."""
    found = _triton_found()
    return found != "none" and tuple(map(int, found.split(".")[:2])) >= TRITON


def _triton_found() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def noise_key(q: Tensor, seed_and_step: Tensor, layer: int, heads: tuple[int, ...]) -> NoiseKey:
    """Return the source of random bits for some heads of ``q`` [B, H, T, d]; heads count from 0."""
    return NoiseKey(seed_and_step, layer, _on_device(heads, q.device), q.shape[1], q.shape[0])


def index_of(heads: tuple[int, ...], q: Tensor) -> slice | Tensor:
    """Return an index that takes these heads out of [B, H, …]: all heads as a view, some as a copy."""
    return slice(None) if len(heads) == q.shape[1] else _on_device(heads, q.device)


@lru_cache(maxsize=256)
def _on_device(heads: tuple[int, ...], device: torch.device) -> Tensor:
    """Return head numbers, [heads] int64. They are copied once: a CUDA graph cannot hold a copy from the host."""
    return torch.tensor(heads, device=device)


def saved_like(q: Tensor, variant: AttentionVariant, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the uninitialised results of the forward pass: O, L, what δ takes beside O or nothing, and centred keys or
    nothing."""
    groups = [group for group, _ in variant.groups(layer, q.shape[1])]
    out = by_token(q, torch.float32 if any(group.returns_fp32 for group in groups) else q.dtype)
    saves_another, saved = any(group.saved_out != "none" for group in groups), dtype_of_saved(groups)
    return (
        out,
        q.new_empty(q.shape[:-1], dtype=torch.float32),
        by_token(q, saved) if saves_another else q.new_empty(0, dtype=saved),
        by_token(q, q.dtype) if any(group.center_keys for group in groups) else q.new_empty(0),
    )
