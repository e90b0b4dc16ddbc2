"""Which mask a call of an attention was given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CLOSED = -65_504.0
"""What is added to the score of a pair that is masked is this or less: the least number of FP16, or −∞."""


@torch.no_grad()
def masking(mask: Any, length: int) -> bool | None:
    """Return whether a call with this mask is causal; None where it is neither causal nor sees every key.

    Args:
        mask: [..., T, T] as PyTorch's attention takes it: bool, True where a query sees a key, or floating point, which
            is added to the scores. Anything else, as a mask of padding [B, T], is None, too.
        length: T.
    """
    if not isinstance(mask, Tensor) or mask.shape[-2:] != (length, length):
        return None
    if mask.dtype == torch.bool:
        seen = mask
    elif mask.is_floating_point() and bool(((mask == 0) | (mask <= _CLOSED)).all()):
        seen = mask == 0
    else:
        return None
    lower = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    if bool((seen == lower).all()):
        return True
    return False if bool(seen.all()) else None
