"""Spectral norms on weights whose norm is known by construction."""

import numpy as np
import pytest
import torch

from flashpoint.attention.variant import AttentionVariant
from flashpoint.config import ModelConfig
from flashpoint.model import GPT
from flashpoint.probes.spectral import w_q_metrics, w_q_spectral_norms

CONFIG = ModelConfig(n_layer=3, n_head=2, d_model=64, context=8, vocab_size=11)


def test_norms_equal_numpys_singular_values() -> None:
    model = GPT(CONFIG, AttentionVariant(), 0)
    norms = w_q_spectral_norms(model)
    for layer in range(3):
        weight = model.blocks[layer].attention.qkv.weight.detach().double().numpy()
        for head in range(2):
            expected = np.linalg.svd(weight[32 * head : 32 * head + 32], compute_uv=False)[0]
            assert norms[layer, head].item() == pytest.approx(expected, rel=1e-6)


def test_a_planted_rank_one_spike_shows_in_its_layer_and_head_alone() -> None:
    model = GPT(CONFIG, AttentionVariant(), 0)
    left, right = torch.zeros(32), torch.zeros(64)
    left[3], right[7] = 1.0, 1.0
    with torch.no_grad():
        model.blocks[1].attention.qkv.weight[32:64] += 500 * torch.outer(left, right)
    metrics = w_q_metrics(model)
    assert metrics.pop("layer/2/head/2/w_q_spectral_norm") == pytest.approx(500, rel=1e-3)
    assert len(metrics) == 5
    assert max(metrics.values()) < 1
