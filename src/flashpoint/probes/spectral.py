"""Spectral norms of the query projection, by layer and head."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from flashpoint.model import GPT, Block


@torch.no_grad()
def w_q_spectral_norms(model: GPT) -> Tensor:
    """Largest singular value of each head's W_Q.

    Returns:
        [n_layer, n_head] float32: the square root of the largest eigenvalue of W_Q W_Qᵀ, in FP64.
    """
    w_q = torch.stack([cast(Block, block).attention.w_q for block in model.blocks]).double()
    return torch.linalg.eigvalsh(w_q @ w_q.mT)[..., -1].sqrt().float()  # [L, H, d, d] → [L, H]


def w_q_metrics(model: GPT) -> dict[str, float]:
    """:func:`w_q_spectral_norms` under the names of the metrics file; layers and heads from 1."""
    return {
        f"layer/{layer}/head/{head}/w_q_spectral_norm": norm
        for layer, norms in enumerate(w_q_spectral_norms(model).tolist(), 1)
        for head, norm in enumerate(norms, 1)
    }
