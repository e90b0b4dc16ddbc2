"""How the attention's results lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def by_token(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised, of the shape [B, H, T, d] of ``x``, in memory as [B, T, H, d]: what the model reads next."""
    B, H, T, d = x.shape
    return x.new_empty((B, T, H, d), dtype=dtype).transpose(1, 2)
