"""Loops that train on random tokens: this package's optimiser step, and the plain one that it is compared with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.nanogpt import NanoGPT
from flashpoint.hardware import cores
from flashpoint.lab.config import Config
from flashpoint.lab.model import GPT
from flashpoint.lab.training.determinism import fix_numerics
from flashpoint.lab.training.parallel import Ranks
from flashpoint.lab.training.step import OptimizerStep

LEARNING_RATE = 1e-5
"""Small: random tokens teach nothing, and a loss that is NaN would change what a chip's clock does."""
_BATCHES = 8
"""Different ones, in turn."""

Step = Callable[[], None]


def random_batches(config: Config, device: torch.device) -> Iterator[Tensor]:
    """Return batches without end, each [micro-batches, sequences, T + 1] int64 in host memory; always the same ones."""
    train, model = config.train, config.model
    shape = (_BATCHES, train.micro_batches, train.sequences, model.context + 1)
    tokens = torch.randint(model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    if device.type == "cuda":
        tokens = tokens.pin_memory()
    return itertools.cycle(tokens.unbind())


def flashpoint_loop(config: Config, device: torch.device) -> tuple[nn.Module, Step]:
    """Return the model and a step of ``flashpoint train``, without what a run records."""
    fix_numerics(threads(device), config.train.deterministic, config.train.precision)
    model = GPT(config.model, config.attn, config.seed).to(device)
    step, batches = OptimizerStep(model, config, device, Ranks()), random_batches(config, device)
    step.warm_up()
    return model, lambda: step(next(batches), LEARNING_RATE)


def nanogpt_loop(config: Config, device: torch.device) -> tuple[nn.Module, Step]:
    """Return the model and a step of a loop as nanoGPT has it: compiled on a GPU, fused AdamW, nothing deterministic.

    Args:
        config: its shape, batch and decays hold; its attention and the rest do not.
    """
    torch.set_num_threads(threads(device))
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = NanoGPT(config.model).to(device)
    loss_of: nn.Module = torch.compile(model) if device.type == "cuda" else model  # type: ignore[assignment]
    betas = (config.train.beta1, config.train.beta2)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas, weight_decay=0.0, fused=True)
    batches = random_batches(config, device)

    def step() -> None:
        batch = next(batches)
        for sequences in batch:
            tokens = sequences.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(tokens[:, :-1], tokens[:, 1:])
            (loss / len(batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, step


def threads(device: torch.device) -> int:
    """Return the CPU threads that a run takes by default."""
    return 1 if device.type == "cuda" else cores()
