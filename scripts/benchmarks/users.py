"""Milliseconds of a user's step: Transformers' GPT-2 with PyTorch's attention, and with what replaces it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashpoint
from benchmarks.loops import LEARNING_RATE, Step
from benchmarks.rounds import ROUNDS, Times, block, interleaved, quartiles
from benchmarks.shown import Report, heading
from benchmarks.workers import Worker, those_ready
from flashpoint.cli.table import Cell, Table

MODES = ("compiled", "eager")
LOOPS = ("sdpa", "sdpa:cudnn", "stabilize", "stabilize:cudnn", "flash_fixed")
"""``sdpa:BACKEND`` is PyTorch's attention by that backend alone, ``stabilize`` its calls with FP16 inside."""
HOST = ("sdpa", "stabilize", "flash_fixed")
PLAIN = "sdpa"
_BOTH = "forward and backward"
_SMALL = (1, 4, 256, 64)
_CALLS = {"cuda": 50, "cpu": 1}
_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION}
_SEQUENCES = 8
_TOKENS = {"cuda": 1024, "cpu": 64}
_TINY: dict[str, Any] = {"n_layer": 2, "n_embd": 128, "n_head": 2, "vocab_size": 512}
"""On a CPU, to see that it runs."""


def measure(device: torch.device, seconds: float, out: Path | None) -> None:
    """Print and write the tables.

    Args:
        seconds: of each loop.
        out: folder for the files.
    """
    what = (
        f"a step of Transformers' GPT-2 in BF16 autocast with fused AdamW, {_SEQUENCES} × {_TOKENS[device.type]:,} "
        "random tokens; medians (quartiles), ratios of the same rounds"
    )
    report = Report("users", heading(device, what), out)
    loops = LOOPS if device.type == "cuda" else tuple(name for name in LOOPS if ":" not in name)
    for mode in MODES if device.type == "cuda" else MODES[1:]:
        failures: list[str] = []
        with contextlib.ExitStack() as held:
            started = [held.enter_context(Worker(name, partial(_loop, name, mode, device), device)) for name in loops]
            ready = those_ready(started, failures)  # they compile side by side
            times = interleaved({worker.name: worker.seconds for worker in ready}, seconds)
            reserved = {worker.name: state.reserved for worker, state in ready.items()}
        report.add(_table(mode, times, reserved, failures))
    _host_times(device, out)


def _host_times(device: torch.device, out: Path | None) -> None:
    """Print and write the host's time of one eager call: of a shape so small that the GPU waits for the host."""
    what = f"host time of one eager call of {'×'.join(map(str, _SMALL))} in µs; medians (quartiles) of {ROUNDS} rounds"
    report = Report("users-host", heading(device, what), out)
    calls = _CALLS[device.type]
    found: dict[str, dict[str, Times]] = {}
    for name in HOST:
        with _contexts(nn.Linear(1, 1, device=device), name == "stabilize", ""):
            passes = _passes(name, device)
            found[name] = {
                which: np.array([1e6 * block(one, calls, device) / calls for _ in range(ROUNDS + 1)][1:])
                for which, one in passes.items()
            }
    rows = [
        [
            Cell(name, f"`{name}`"),
            *(quartiles(times, ".0f") for times in of.values()),
            quartiles(of[_BOTH] / found[PLAIN][_BOTH], ".2f"),
        ]
        for name, of in found.items()
    ]
    report.add(Table(["attention", *found[PLAIN], f"over {PLAIN}"], rows))


def _passes(name: str, device: torch.device) -> dict[str, Callable[[], object]]:
    q, k, v, grad_out = (torch.randn(_SMALL, device=device).bfloat16() for _ in range(4))
    given = [x.requires_grad_() for x in (q, k, v)]

    def forward() -> torch.Tensor:
        if name == "flash_fixed":
            return flashpoint.attention(q, k, v, is_causal=True, variant=name)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        torch.autograd.grad(forward(), given, grad_out)

    return {"forward": forward, _BOTH: both}


def _table(mode: str, times: Mapping[str, Times], reserved: Mapping[str, int], failures: list[str]) -> Table:
    rows = [
        [
            mode,
            Cell(name, f"`{name}`"),
            quartiles(1000 * of, ".2f"),
            quartiles(of / times[PLAIN], ".3f") if PLAIN in times else None,
            Cell(reserved[name] / 2**30, f"{reserved[name] / 2**30:.1f}") if reserved[name] else None,
        ]
        for name, of in times.items()
    ]
    return Table(["mode", "attention", "ms a step", f"over {PLAIN}", "memory, GiB"], rows, " ".join(failures))


def _loop(name: str, mode: str, device: torch.device) -> tuple[nn.Module, Step]:
    from transformers import GPT2Config, GPT2LMHeadModel

    from flashpoint.huggingface import implementation

    front, _, backend = name.partition(":")
    tiny = {} if device.type == "cuda" else _TINY
    config = GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False, **tiny)
    torch.manual_seed(0)
    attention = implementation(front) if front == "flash_fixed" else "sdpa"
    model = GPT2LMHeadModel._from_config(config, attn_implementation=attention).to(device)
    loss_of: nn.Module = torch.compile(model) if mode == "compiled" else model  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)
    tokens = torch.randint(config.vocab_size, (_SEQUENCES, _TOKENS[device.type]), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    held = _contexts(model, front == "stabilize", backend)
    held.__enter__()  # until the process ends

    def inside(_held: object = held) -> None:
        step()

    return model, inside


@contextlib.contextmanager
def _contexts(model: nn.Module, stabilized: bool, backend: str) -> Iterator[None]:
    with contextlib.ExitStack() as entered:
        if backend:
            entered.enter_context(sdpa_kernel(_BACKENDS[backend]))
        if stabilized:
            entered.enter_context(flashpoint.stabilize(model))
        yield
