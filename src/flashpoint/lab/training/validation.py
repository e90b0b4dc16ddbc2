"""The loss on tokens that a run does not train on."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flashpoint.lab.config import Config
from flashpoint.lab.data.batches import gather_windows
from flashpoint.lab.data.tokens import TokenDataset
from flashpoint.lab.model import GPT
from flashpoint.lab.precision import autocast


@torch.no_grad()
def validation_loss(
    model: GPT, tokens: TokenDataset, config: Config, device: torch.device, seed_and_step: Tensor
) -> float:
    """Return the mean loss, nats, over the first ``train.eval_sequences`` windows of the validation tokens.

    Args:
        seed_and_step: [2] int64, key of stochastic rounding; its count stays as it is.
    """
    context, batch = config.model.context, config.train.sequences
    count = min(config.train.eval_sequences, (len(tokens.val) - 1) // context)
    assert count >= 1, "refused before the run"
    total = 0.0
    for start in range(0, count, batch):
        windows = np.arange(start, min(start + batch, count), dtype=np.uint32)
        sequences = gather_windows(tokens.val, windows, context).to(device)
        with autocast(device, config.train.precision):
            # Uncompiled: a short last batch would compile once more.
            loss = model(sequences[:, :-1], sequences[:, 1:], seed_and_step)
        total += loss.item() * len(windows)
    return total / count
