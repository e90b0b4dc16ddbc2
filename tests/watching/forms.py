"""A layer of attention in FP64 in many forms, its recorded call, and what FP64 makes of that."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import exact
from flashpoint.watching.captures import read_calls
from flashpoint.watching.loop import Watch
from tests.watching.loops import loop

BATCH, HEADS, LENGTH, SIZE = 3, 4, 12, 8
LOWER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
SOME = torch.ones(BATCH, LENGTH, dtype=torch.bool)
"""Tokens that are no padding: all of two sequences, and nine of the second."""
SOME[1, 9:] = False
PADDED = SOME[:, None, None]
WINDOW = LOWER.triu(-3)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def added(seen: Tensor, least: float = -torch.inf) -> Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, least)


def sdpa(**options: Any) -> Attend:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


class Model(nn.Module):
    """One layer of attention in FP64, of 4 heads of queries, with whatever the call is given.

    Args:
        others: tokens of another sequence, to whose keys and values the first one attends; None is itself.
    """

    def __init__(self, call: Attend, heads_kv: int = HEADS, values: int = SIZE, others: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.call, self.others = call, others
        self.sizes = [HEADS * SIZE, heads_kv * SIZE, heads_kv * values]
        self.heads = (HEADS, heads_kv, heads_kv)
        self.q, self.k, self.v = (nn.Linear(32, size, dtype=torch.float64) for size in self.sizes)
        self.bias = nn.Parameter(torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.others is None else x.repeat(1, 3, 1)[:, : self.others].flip(0)
        parts = zip((self.q, self.k, self.v), (x, y, y), self.heads, strict=True)
        return self.call(*(part(of).unflatten(-1, (heads, -1)).transpose(1, 2) for part, of, heads in parts))


def captured(model: nn.Module, number: int, watched: Watch) -> None:
    if number == 0:
        watched.capture(sequences=0)
    loss = model(2 * torch.randn(BATCH, LENGTH, 32, dtype=torch.float64)).square().mean()
    loss.backward()
    watched.step(loss)


def call_of(folder: Path, model: nn.Module, **options: Any) -> AttentionCall:
    run = loop(folder, model, captured, steps=2, **options)
    assert run.manifest.not_recorded == ()
    (call,) = read_calls(folder / "own")
    return call


def assert_exact(call: AttentionCall) -> None:
    for n in range(len(call.q)):
        true = exact(call, n)
        for name in ("out", "grad_q", "grad_k", "grad_v"):
            expected, found = getattr(call, name)[n], getattr(true, name)
            if name in ("grad_k", "grad_v"):
                found = (
                    found.reshape(expected.shape)
                    if found.shape == expected.shape
                    else found.unflatten(0, (len(expected), -1)).sum(1)
                )
            torch.testing.assert_close(found, expected, msg=lambda told, name=name: f"{name}: {told}")
