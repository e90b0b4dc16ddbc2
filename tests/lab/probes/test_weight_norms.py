"""Spectral norms of weights against NumPy's singular values, and on matrices whose norm is known by construction."""

import dataclasses

import numpy as np
import pytest
import torch

from flashpoint.early_warning import largest_eigenvalue
from flashpoint.lab.config import ModelConfig
from flashpoint.lab.model import GPT
from flashpoint.lab.probes.runner import weight_norms
from flashpoint.numerics.variant import AttentionVariant

CONFIG = ModelConfig(n_layer=3, n_head=2, d_model=64, context=8, vocab_size=11)


@pytest.mark.parametrize("n_kv_head", [1, 2])
def test_norms_equal_numpys_singular_values(n_kv_head: int) -> None:
    model = GPT(dataclasses.replace(CONFIG, n_kv_head=n_kv_head), AttentionVariant(), 0)
    norms = weight_norms(model)
    for layer in range(3):
        weight = model.blocks[layer].attention.qkv.weight.detach().double().numpy()
        for head in range(2):
            shared = head * n_kv_head // 2
            q, k, v = (weight[32 * at :][:32] for at in (head, 2 + shared, 2 + n_kv_head + shared))
            expected = {"w_q": q, "w_k": k, "w_v": v, "qk": q.T @ k}
            for name, matrix in expected.items():
                largest = np.linalg.svd(matrix, compute_uv=False)[0]
                assert norms[f"{name}_spectral_norm"][layer, head].item() == pytest.approx(largest, rel=1e-3), name


@pytest.mark.parametrize("gap", [0.0, 1e-6, 1e-4, 1e-2, 0.9])
def test_eigenvalues_however_close(gap: float) -> None:
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64, generator=generator))
    values = torch.full((64,), 1 - gap, dtype=torch.float64)
    values[17] = 1.0
    for scale in (1e-30, 1.0, 1e30):
        unit = torch.eye(64, dtype=torch.float64)
        found = largest_eigenvalue(scale * (basis * values) @ basis.mT, unit).item()
        assert found == pytest.approx(scale, rel=2e-3)  # a norm is its root: half of that


def test_no_weight_has_norm_zero() -> None:
    model = GPT(CONFIG, AttentionVariant(), 0)
    with torch.no_grad():
        model.blocks[0].attention.qkv.weight[:32] = 0  # W_Q of the first head
    norms = weight_norms(model)
    assert norms["w_q_spectral_norm"][0, 0] == 0
    assert norms["w_q_spectral_norm"][0, 1] > 0


def test_a_planted_rank_one_spike_shows_in_its_layer_and_head_alone() -> None:
    model = GPT(CONFIG, AttentionVariant(), 0)
    left, right = torch.zeros(32), torch.zeros(64)
    left[3], right[7] = 1.0, 1.0
    with torch.no_grad():
        model.blocks[1].attention.qkv.weight[32:64] += 500 * torch.outer(left, right)
    norms = weight_norms(model)["w_q_spectral_norm"]
    assert norms[1, 1].item() == pytest.approx(500, rel=1e-3)
    norms[1, 1] = 0
    assert norms.max() < 1
