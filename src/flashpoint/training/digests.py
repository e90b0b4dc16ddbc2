"""Digests that two runs compare by."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


@torch.no_grad()
def weights_digest(model: nn.Module) -> str:
    """SHA-256 over names, shapes and bytes of all parameters, in order of names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run_digest(chain: str, weights: str) -> str:
    """The short digest of a whole run: equal if losses, gradient norms, checksums and final weights are."""
    return hashlib.sha256(f"{chain} {weights}".encode()).hexdigest()[:16]
