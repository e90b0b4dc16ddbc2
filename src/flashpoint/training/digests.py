"""Digests that two runs compare by."""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import nn


class TrajectoryDigest:
    """SHA-256 over the FP32 bits of loss and gradient norm of every step, in order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, loss: float, grad_norm: float) -> None:
        self._hash.update(struct.pack("<ff", loss, grad_norm))

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


@torch.no_grad()
def weights_digest(model: nn.Module) -> str:
    """SHA-256 over names, shapes and bytes of all parameters, in order of names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run_digest(trajectory: str, weights: str) -> str:
    """The short digest of a whole run: equal if losses, gradient norms and final weights are."""
    return hashlib.sha256(f"{trajectory} {weights}".encode()).hexdigest()[:16]
