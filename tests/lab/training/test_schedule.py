"""The schedule by hand, and which parameters decay."""

import math

import pytest
import torch
from torch import nn

from flashpoint.lab.config import TrainConfig
from flashpoint.lab.training.optimizers import build_adamw
from flashpoint.lab.training.step import learning_rate

CONFIG = TrainConfig(steps=1100, warmup_steps=100, lr=2e-3, min_lr_ratio=0.1, weight_decay=0.1)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 2e-5),
        (99, 2e-3),
        (100, 2e-3),
        (600, 2e-3 * (0.1 + 0.9 * 0.5)),  # halfway down the cosine
        (1100, 2e-4),
        (5000, 2e-4),
    ],
)
def test_schedule(step: int, expected: float) -> None:
    assert math.isclose(learning_rate(step, CONFIG), expected, rel_tol=1e-12)


def test_decay_steps_keep_the_schedule_of_a_shorter_run() -> None:
    shorter = TrainConfig(**{**CONFIG.__dict__, "steps": 300, "decay_steps": 1100})
    assert [learning_rate(step, shorter) for step in range(300)] == [learning_rate(step, CONFIG) for step in range(300)]


def test_gains_do_not_decay() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4, bias=False))
    decay = {
        id(p): group["weight_decay"]
        for group in build_adamw(list(model.parameters()), CONFIG, torch.tensor(0.1)).param_groups
        for p in group["params"]
    }
    assert decay[id(model[0].weight)] == 0.1
    assert decay[id(model[1].weight)] == 0.0
