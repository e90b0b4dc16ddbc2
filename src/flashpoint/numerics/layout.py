"""How the attention's results lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def by_token(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor [B, H, T, d] that lies in memory as [B, T, H, d], as the model reads it next."""
    B, H, T, d = x.shape
    return x.new_empty_strided((B, H, T, d), (T * H * d, d, H * d, 1), dtype=dtype)
