"""What changes the weights: AdamW, or Muon on the matrices of the layers and AdamW on all else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from flashpoint.lab.config import Config, TrainConfig
from flashpoint.lab.model import GPT
from flashpoint.lab.training.tensor_files import Form

_OF_ADAMW, _OF_MUON = ("exp_avg", "exp_avg_sq"), "momentum_buffer"
MOMENTS = (*_OF_ADAMW, _OF_MUON)
"""What an optimiser keeps of a parameter it has, each of the parameter's form."""


class Optimizers:
    """The optimisers of a model, each with parameters of its own. Learning rate and decay are the same for both.

    Muon is PyTorch's. Scaled as in arXiv 2502.16982, its updates are as large as AdamW's usually are, which is why it
    takes AdamW's learning rate and decay. W_Q, W_K and W_V are matrices of their own to it, as in its authors' code.

    Muon's Newton–Schulz steps multiply in BF16, on a CPU with what instructions that has: other CPUs give other bits.

    Args:
        model: on ``device``.
    """

    def __init__(self, model: GPT, config: Config, device: torch.device) -> None:
        self._named = dict(model.named_parameters())
        of_muon = _matrices_of_layers(model) if config.optimizer.name == "muon" else {}
        self._learning_rate = torch.zeros((), device=device)
        self._decay = config.train.weight_decay
        others = [parameter for parameter in model.parameters() if parameter not in of_muon]
        self._adamw = build_adamw(others, config.train, self._learning_rate)
        self._momenta = {parameter: torch.zeros_like(parameter.detach()) for parameter in of_muon}
        self._parts = [(parameter, part) for parameter, rows in of_muon.items() for part in _parts(rows)]
        self._weights = [parameter.detach()[rows] for parameter, rows in self._parts]
        self._updates: list[Tensor] = [nn.Parameter(torch.zeros_like(weight)) for weight in self._weights]
        self._muon: torch.optim.Muon | None = None
        if self._parts:
            # It moves matrices of zeros at a rate of 1: its own rate is a number of the host's, which a CUDA graph
            # would keep as it was at the capture.
            self._muon = torch.optim.Muon(
                self._updates,
                lr=1.0,
                weight_decay=0.0,
                momentum=config.optimizer.momentum,
                eps=config.optimizer.eps,
                adjust_lr_fn="match_rms_adamw",
            )
            for (parameter, rows), update in zip(self._parts, self._updates, strict=True):
                self._muon.state[update][_OF_MUON] = self._momenta[parameter][rows]

    def set_learning_rate(self, learning_rate: float) -> None:
        self._learning_rate.fill_(learning_rate)

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights by their gradients. A CUDA graph may hold it."""
        self._adamw.step()
        if self._muon:
            for (parameter, rows), update in zip(self._parts, self._updates, strict=True):
                assert parameter.grad is not None
                update.grad = parameter.grad[rows]
                update.zero_()
            self._muon.step()
            self._muon.zero_grad()  # the parameters have the gradients
            torch._foreach_mul_(self._weights, 1 - self._learning_rate * self._decay)
            torch._foreach_mul_(self._updates, self._learning_rate)
            torch._foreach_add_(self._weights, self._updates)

    def state(self, name: str) -> dict[str, Tensor]:
        """Return what is kept of a parameter of the model, by key; not copied. AdamW keeps nothing before a step."""
        parameter = self._named[name]
        return {_OF_MUON: self._momenta[parameter]} if parameter in self._momenta else self._adamw.state[parameter]

    def forms(self, name: str) -> dict[str, Form]:
        """Return the forms of :meth:`state`, also before the first step."""
        parameter = self._named[name]
        form = Form.of(parameter)
        return {_OF_MUON: form} if parameter in self._momenta else {"step": Form(()), **dict.fromkeys(_OF_ADAMW, form)}


def _matrices_of_layers(model: GPT) -> dict[nn.Parameter, Sequence[int]]:
    """Return the weights of the layers' projections, each with the rows of the matrices it has below each other."""
    found: dict[nn.Parameter, Sequence[int]] = {}
    for name, module in model.blocks.named_modules():
        if isinstance(module, nn.Linear):
            weight = cast(nn.Parameter, module.weight)
            rows, C = weight.shape
            of_keys = (rows - C) // 2  # as many as of values
            found[weight] = (C, of_keys, of_keys) if name.endswith("attention.qkv") else (rows,)
    return found


def _parts(rows: Sequence[int]) -> Iterator[slice]:
    """Yield the rows of each of the matrices that a parameter has below each other."""
    first = 0
    for count in rows:
        yield slice(first, first + count)
        first += count


def build_adamw(parameters: Sequence[nn.Parameter], config: TrainConfig, lr: Tensor) -> torch.optim.AdamW:
    """Return AdamW in its fused form; weight decay on matrices only. ``lr`` [] float32, on the parameters' device."""
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    # Capturable: a CUDA graph may hold the step.
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=config.eps, fused=True, capturable=lr.is_cuda)
