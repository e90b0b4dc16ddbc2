"""Digests that two runs compare by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn


@torch.no_grad()
def weights_digest(model: nn.Module) -> str:
    """Return SHA-256 over names, shapes and bytes of all parameters, in order of names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run_digest(chain: str, weights: str) -> str:
    """Return the short digest of a whole run: equal if losses, gradient norms, checksums and final weights are."""
    return hashlib.sha256(f"{chain} {weights}".encode()).hexdigest()[:16]


@torch.no_grad()
def state_checksum(tensors: Iterable[Tensor]) -> Tensor:
    """Return a checksum [] int64 on the tensors' device: a sum over all bits, the same in any order of summation.

    Each tensor (float32) adds Σ x + Σ x² over its values as int32, times an odd number of its own, modulo 2⁶⁴. A
    changed bit changes it, and so does a swap of two tensors.
    """
    total: Tensor | None = None
    for number, tensor in enumerate(tensors):
        bits = tensor.detach().contiguous().view(torch.int32).to(torch.int64)
        part = (bits.sum() + (bits * bits).sum()) * (2 * number + 1)
        total = part if total is None else total + part
    assert total is not None, "no tensors"
    return total
