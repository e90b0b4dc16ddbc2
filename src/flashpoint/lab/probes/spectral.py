"""Spectral norms of the attention's weights, by layer and head."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from flashpoint.lab.model import GPT, Block

_SQUARINGS = 12


@torch.no_grad()
def weight_norms(model: GPT) -> dict[str, Tensor]:
    """Return the largest singular values of W_Q, W_K, W_V and of the bilinear form W_Qᵀ W_K of each head.

    Returns:
        ``w_q_spectral_norm``, ``w_k_…``, ``w_v_…`` and ``qk_spectral_norm`` (of QKᵀ as a form on the inputs, without
        α): [n_layer, n_head] float32, relative error below 1e-3.
    """
    H, C = model.config.n_head, model.config.d_model
    packed = torch.stack([cast(Block, block).attention.qkv.weight for block in model.blocks])
    weights = packed.view(-1, 3, H, C // H, C).transpose(0, 1)  # [3, L, H, d, C]
    grams = weights.double() @ weights.double().mT  # W Wᵀ
    unit = torch.eye(C // H, dtype=grams.dtype, device=grams.device).expand_as(grams[0])
    # W_Qᵀ W_K has the squared norm of W_Q W_Qᵀ · W_K W_Kᵀ.
    eigenvalues = largest_eigenvalue(torch.stack([*grams, grams[0]]), torch.stack([unit, unit, unit, grams[1]]))
    names = ("w_q_spectral_norm", "w_k_spectral_norm", "w_v_spectral_norm", "qk_spectral_norm")
    return dict(zip(names, eigenvalues.sqrt().float(), strict=True))


def largest_eigenvalue(matrices: Tensor, others: Tensor) -> Tensor:
    """Return the largest eigenvalue of products A·B of symmetric positive semidefinite matrices [..., d, d]: [...].

    The power method by repeated squaring: after 12 squarings a column is the 4,096-th power times a unit vector. Its
    Rayleigh quotient, under the inner product uᵀBv in which A·B is symmetric, is off by some ln(d) / 4,096 at most,
    however close the eigenvalues are.
    """
    product = matrices @ others
    power = product
    for _ in range(_SQUARINGS):
        power = power / power.abs().amax((-2, -1), keepdim=True).clamp_min(1e-300)
        power = power @ power
    column = power.square().sum(-2).argmax(-1)  # of the largest
    vector = power.gather(-1, column[..., None, None].expand(*power.shape[:-1], 1))
    vector = vector / vector.abs().amax((-2, -1), keepdim=True).clamp_min(1e-300)
    weighted = others @ vector
    return (weighted * (product @ vector)).sum((-2, -1)) / (weighted * vector).sum((-2, -1)).clamp_min(1e-300)
