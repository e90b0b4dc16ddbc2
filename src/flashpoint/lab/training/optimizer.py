"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flashpoint.lab.config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig, lr: Tensor) -> torch.optim.AdamW:
    """Return AdamW in its fused form; weight decay on matrices only. ``lr`` [] float32, on the parameters' device."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    # Capturable: a CUDA graph may hold the step.
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=config.eps, fused=True, capturable=lr.is_cuda)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate: a linear warm-up, then a cosine from ``lr`` to ``min_lr_ratio · lr`` at
    ``decay_steps``, then constant."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    decay_steps = config.decay_steps or config.steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, decay_steps - config.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)
