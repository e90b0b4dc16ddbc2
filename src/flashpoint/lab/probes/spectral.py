"""Spectral norms of the attention's weights, by layer and head."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from flashpoint.early_warning import largest_eigenvalue
from flashpoint.lab.model import GPT, Block
from flashpoint.runs.metric_table import WEIGHT_NORMS


@torch.no_grad()
def weight_norms(model: GPT) -> dict[str, Tensor]:
    """Return the largest singular values of W_Q, W_K, W_V and of the bilinear form W_Qᵀ W_K of each head.

    Returns:
        Of each of :data:`.WEIGHT_NORMS` [n_layer, n_head] float32, relative error below 1e-3.
    """
    H, C = model.config.n_head, model.config.d_model
    packed = torch.stack([cast(Block, block).attention.qkv.weight for block in model.blocks])
    weights = packed.view(-1, 3, H, C // H, C).transpose(0, 1)  # [3, L, H, d, C]
    grams = weights.double() @ weights.double().mT  # W Wᵀ
    unit = torch.eye(C // H, dtype=grams.dtype, device=grams.device).expand_as(grams[0])
    # W_Qᵀ W_K has the squared norm of W_Q W_Qᵀ · W_K W_Kᵀ.
    eigenvalues = largest_eigenvalue(torch.stack([*grams, grams[0]]), torch.stack([unit, unit, unit, grams[1]]))
    return {metric.name: norms for metric, norms in zip(WEIGHT_NORMS, eigenvalues.sqrt().float(), strict=True)}
