"""What a step says it did is what it did."""

import threading

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from flashpoint.lab.config import Config, DataConfig, ModelConfig, TrainConfig
from flashpoint.lab.model import GPT
from flashpoint.lab.training.parallel import Ranks
from flashpoint.lab.training.step import OptimizerStep
from flashpoint.numerics.variant import AttentionVariant

MODEL = ModelConfig(n_layer=1, n_head=1, d_model=16, context=8, vocab_size=300)


def test_loss_gradient_norm_and_update_norm() -> None:
    train = TrainConfig(batch_size=4, micro_batch_size=2, grad_clip=0.5)
    config = Config(model=MODEL, data=DataConfig(vocab_size=300), train=train)
    model = GPT(MODEL, AttentionVariant(), 0)
    step = OptimizerStep(model, config, torch.device("cpu"), Ranks())
    batch = torch.randint(0, 300, (2, 2, 9), generator=torch.Generator().manual_seed(0))
    before = [parameter.detach().double().numpy().copy() for parameter in model.parameters()]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [model(part[:, :-1], part[:, 1:], step.seed_and_step).item() for part in batch]
    step(batch, 1e-2)
    loss, grad_norm, update_norm = step.result.tolist()
    moved = [
        parameter.detach().double().numpy() - old for parameter, old in zip(model.parameters(), before, strict=True)
    ]
    assert loss == pytest.approx(np.mean(losses), rel=1e-6)
    assert update_norm == pytest.approx(np.sqrt(sum((part**2).sum() for part in moved)), rel=1e-4)
    clipped = [parameter.grad.double().norm().item() for parameter in model.parameters() if parameter.grad is not None]
    assert grad_norm > 0.5
    assert np.sqrt(np.square(clipped).sum()) == pytest.approx(0.5, rel=1e-4)


def test_modules_are_called_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """While PyTorch's compiler traces a pattern, it takes calls of modules in every thread for those of the pattern."""
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    config = Config(model=MODEL, data=DataConfig(vocab_size=300), train=TrainConfig(batch_size=2, compile=True))
    step = OptimizerStep(GPT(MODEL, AttentionVariant(), 0), config, torch.device("cpu"), Ranks())
    threads = set()
    with register_module_forward_pre_hook(lambda *_: threads.add(threading.current_thread())):
        step.warm_up()
    assert threads == {threading.main_thread()}


@pytest.mark.slow
def test_warming_up_changes_nothing() -> None:
    config = Config(model=MODEL, data=DataConfig(vocab_size=300), train=TrainConfig(batch_size=2, compile=True))
    batch = torch.randint(0, 300, (1, 2, 9), generator=torch.Generator().manual_seed(0))
    results = []
    for warm in (False, True):
        step = OptimizerStep(GPT(MODEL, AttentionVariant(), 0), config, torch.device("cpu"), Ranks())
        if warm:
            step.warm_up()
        step(batch, 1e-2)
        results.append([step.result.clone(), *(tensor.clone() for tensor in step.state().values())])
    assert all(torch.equal(cold, warmed) for cold, warmed in zip(*results, strict=True))
