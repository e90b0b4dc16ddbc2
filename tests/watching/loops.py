"""A small model and a loop that trains it, watched."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashpoint
from flashpoint.cli.run_words import open_run
from flashpoint.runs.run import Run
from flashpoint.watching.loop import Watch

Project = Callable[[Tensor], Tensor]
Step = Callable[[nn.Module, int, Watch], Any]
"""Makes a step of that number, from 0, and tells the watch."""


def spectral_norms(weight: Tensor) -> list[float]:
    return [float(torch.linalg.matrix_norm(part.double(), 2)) for part in weight.detach().split(8)]


class Block(nn.Module):
    """Attention of x to itself, or to ``y``; q, k and v are parts of one tensor, as ``unbind`` gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        if y is not None:
            _, k, v = self.qkv(y).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=y is None)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Pair(nn.Module):
    """Two blocks, one after the other or each called by the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Heads(nn.Module):
    """Causal attention of heads of 8 features; q, k and v are made by three modules."""

    def __init__(self, q: nn.Module, k: nn.Module, v: nn.Module, change: Project | None = None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.change = q, k, v, change

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (made(x).unflatten(-1, (-1, 8)).transpose(1, 2) for made in (self.q, self.k, self.v))
        if self.change is not None:
            q, k = self.change(q), self.change(k)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return attended.transpose(1, 2).flatten(2).square().mean()


def rotated(x: Tensor) -> Tensor:
    """Return queries or keys with rotary positions: features 0 and 4, 1 and 5, … turn together."""
    angle = torch.arange(x.shape[2])[:, None] / 100 ** (torch.arange(4) / 4)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


class Quantised(Tensor):
    """As a package has it that knows few operations and no norm: a tensor made of another one."""

    @staticmethod
    def __new__(cls, whole: Tensor) -> "Quantised":
        made: Quantised = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype)
        return made

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].whole)
        if func is torch.ops.aten.t.default:
            return args[0].whole.t()
        raise NotImplementedError(func)


def beside_the_first_line(told: str) -> str:
    """What a watch told beside the line of its first step."""
    return "".join(line for line in told.splitlines(keepends=True) if "; to follow: flashpoint watch " not in line)


def loop(
    runs: Path,
    model: nn.Module | None = None,
    step: Step | None = None,
    steps: int = 4,
    **options: Any,
) -> Run:
    """Train so many steps; ``step`` takes one itself and tells the watch."""
    torch.manual_seed(0)
    model = Pair() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"interval": 1, "weights_interval": 1, "log_interval": 2, **options}
    with flashpoint.watch(model, runs_dir=runs, name="own", **options) as watched:
        for number in range(steps):
            (step or plain)(model, number, watched)
            optimizer.step()
            optimizer.zero_grad()
    return open_run("own", runs)


def plain(model: nn.Module, _number: int, watched: Watch) -> None:
    x = torch.randn(3, 12, 32)
    loss = model(x).square().mean()
    loss.backward()
    watched.step(loss, x)


def capturing(at: int, sequences: int) -> Step:
    """Return :func:`plain` with a capture asked for at a step."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == at:
            watched.capture(sequences=sequences)
        plain(model, number, watched)

    return step
