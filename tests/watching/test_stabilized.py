"""A loop that is watched and stabilised: both replace attentions, and a watch only while it observes."""

from __future__ import annotations

import contextlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn

import flashpoint
from flashpoint.cli.main import main
from flashpoint.cli.run_words import open_run
from flashpoint.runs.metric_table import W_K_NORM, W_Q_NORM
from flashpoint.runs.run import Run
from flashpoint.watching.captures import read_calls

STEPS = 5
ORDERS = [("stabilize", "watch"), ("watch", "stabilize")]


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(12, 12, dtype=x.dtype).masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf)
        attended: Tensor = self.attend(x, x, x, need_weights=False, attn_mask=mask)[0]
        return x + attended


class Apart(nn.Module):
    """q, k and v are made by modules of their own, and attended to by a function of a library."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self.kernels = library
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (self.query, self.key, self.value))
        attended: Tensor = self.kernels.attend(q, k, v)
        return x + attended.transpose(1, 2).flatten(2)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def train(
    runs: Path,
    model: nn.Module,
    contexts: tuple[str, ...],
    functions: tuple[str, ...] = (),
    capture: bool = False,
    **options: Any,
) -> list[Tensor]:
    """Return the losses of a loop inside these contexts."""
    for parameter, number in zip(model.parameters(), range(100), strict=False):
        nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(number))
    model.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, watched = [], None
    with contextlib.ExitStack() as entered:
        for context in contexts:
            if context == "stabilize":
                entered.enter_context(flashpoint.stabilize(model, functions=functions))
            else:
                options = {"runs_dir": runs, "interval": 2, "weights_interval": 1, "log_interval": 1, **options}
                watched = entered.enter_context(flashpoint.watch(model, functions=functions, **options))
        for number in range(STEPS):
            if watched is not None and capture and number == 1:
                watched.capture(sequences=3)
            x = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(number)).bfloat16()
            loss = model(x).float().square().mean()
            loss.backward()
            if watched is not None:
                watched.step(loss, x)
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A library of one attention, which notes the dtypes that it is called with."""
    module: Any = types.ModuleType("attention_of_a_library")
    module.seen = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        module.seen.append(q.dtype)
        return (q @ k.mT / 8**0.5).softmax(-1) @ v

    module.attend = attend
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_a_named_function_has_fp16_inside_in_every_step_and_is_itself_afterwards(
    tmp_path: Path, library: Any, order: tuple[str, ...]
) -> None:
    attend = library.attend
    functions = (f"{library.__name__}:attend",)
    alone = train(tmp_path, Apart(library), ("stabilize",), functions)
    assert train(tmp_path, Apart(library), order, functions) == alone
    assert set(library.seen) == {torch.float16}
    assert library.attend is attend


@pytest.mark.parametrize("order", ORDERS)
def test_multihead_attention_has_fp16_inside_in_every_step(tmp_path: Path, order: tuple[str, ...]) -> None:
    original = F.scaled_dot_product_attention
    alone = train(tmp_path, Multihead(), ("stabilize",))
    assert train(tmp_path, Multihead(), order) == alone
    assert train(tmp_path, Multihead(), ()) != alone
    assert F.scaled_dot_product_attention is original


@pytest.mark.slow
@pytest.mark.parametrize("order", [*ORDERS, ("watch",)])
@pytest.mark.parametrize("kind", ["fused", "multihead", "named"])
def test_a_capture_tells_whether_its_attention_has_fp16_inside(
    tmp_path: Path, library: Any, kind: str, order: tuple[str, ...]
) -> None:
    model = {"fused": Fused, "multihead": Multihead, "named": lambda: Apart(library)}[kind]()
    functions = (f"{library.__name__}:attend",) if kind == "named" else ()
    train(tmp_path, model, order, functions, name="own", capture=True)
    (call,) = read_calls(tmp_path / "own")
    assert call.has_fp16_inside == (len(order) == 2)
    for of_tensors in (True, False):
        told = CliRunner().invoke(main, ["diagnose", str(tmp_path / "own")]).stdout
        assert ("with FP16 inside, as recorded" in told) == (of_tensors and len(order) == 2)
        for file in tmp_path.glob("own/captures/*/*.safetensors"):
            file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["fused", "apart"])
def test_w_q_and_w_k_are_found_behind_the_cast(tmp_path: Path, library: Any, kind: str, order: tuple[str, ...]) -> None:
    """The norms of the first step are of the same weights with FP16 inside and without."""
    library.attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v)

    def norms(*contexts: str) -> list[Any]:
        name = "-".join(contexts)
        train(tmp_path, Fused() if kind == "fused" else Apart(library), contexts, name=name)
        run: Run = open_run(name, tmp_path)
        return [run.columns[metric.name][1][..., 0].tolist() for metric in (W_Q_NORM, W_K_NORM)]

    assert norms(*order) == norms("watch")
