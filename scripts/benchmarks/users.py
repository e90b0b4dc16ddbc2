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
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

import flashpoint
from benchmarks.loops import LEARNING_RATE, Step
from benchmarks.peers import BACKENDS, Attention, installed
from benchmarks.rounds import ROUNDS, Times, block, quartiles
from benchmarks.shown import Report, heading
from benchmarks.training import profile_table
from benchmarks.workers import Measured, taking_turns
from flashpoint.cli.table import Cell, Table
from flashpoint.errors import UserError, one_line

MODES = ("compiled", "eager")
LOOPS = ("sdpa", "sdpa:cudnn", "stabilize", "stabilize:cudnn", "flash_fixed", "fa4")
"""``sdpa:BACKEND`` is PyTorch's attention by that backend alone, ``stabilize`` its calls with FP16 inside. ``fa4``
is FlashAttention-4 as Transformers calls it, which has no FlexAttention for this model."""
ON_A_CPU = ("sdpa", "stabilize", "flash_fixed")
HOST = ("sdpa", "sdpa:flash", "sdpa:cudnn", "stabilize", "flash_fixed")
PLAIN = "sdpa"
_FORWARD, _BOTH, _ALONE = "forward", "forward and backward", "both in one thread"
"""On a GPU autograd has a thread of its own for the backward pass, and host threads wait for each other."""
_SMALL = (1, 4, 256, 64)
_CALLS = {"cuda": 50, "cpu": 1}
_BACKENDS = {"cudnn": BACKENDS["sdpa_cudnn"], "flash": BACKENDS["sdpa_flash"]}
_OF_TRANSFORMERS = {"fa4": "flash_attention_4"}
_SEQUENCES = 8
_TOKENS = {"cuda": 1024, "cpu": 64}
_TINY: dict[str, Any] = {"n_layer": 2, "n_embd": 128, "n_head": 2, "vocab_size": 512}
"""On a CPU, to see that it runs."""


def measure(device: torch.device, seconds: float, out: Path | None, profiles: bool) -> None:
    """Print and write the tables, and with ``profiles`` that of kernel times.

    Args:
        seconds: of each loop.
        out: folder for the files.
    """
    what = (
        f"a step of Transformers' GPT-2 in BF16 autocast with fused AdamW, {_SEQUENCES} × {_TOKENS[device.type]:,} "
        "random tokens; medians (quartiles), ratios of the same rounds"
    )
    report = Report("users", heading(device, what), out)
    groups = Report("users-profile", heading(device, "milliseconds of one step by kind of kernel"), out)
    loops = LOOPS if device.type == "cuda" else ON_A_CPU
    for mode in MODES if device.type == "cuda" else MODES[1:]:
        builders = {name: partial(_loop, name, mode, device) for name in loops}
        try:
            plain = builders.pop(PLAIN)
            measured, profiled, failures = taking_turns(PLAIN, plain, builders, device, seconds, profiles)
        except UserError as error:  # of the plain loop, or of one whose process ended in its turn
            measured, profiled, failures = {}, {}, [f"Not measured, {mode}: {error}."]
        report.add(_table(mode, {name: measured[name] for name in loops if name in measured}, failures))
        if profiles:
            groups.add(profile_table(mode, profiled, "mode"))
    _host_times(device, out)


def _host_times(device: torch.device, out: Path | None) -> None:
    """Print and write the host's time of one eager call: of a shape so small that the GPU waits for the host."""
    what = f"host time of one eager call of {'×'.join(map(str, _SMALL))} in µs; medians (quartiles) of {ROUNDS} rounds"
    report = Report("users-host", heading(device, what), out)
    calls = _CALLS[device.type]
    found: dict[str, dict[str, Times]] = {}
    attentions, failures = _called_eagerly(device)
    for name, attend in attentions.items():
        front, _, backend = name.partition(":")
        try:
            with _contexts(nn.Linear(1, 1, device=device), front == "stabilize", backend):
                found[name] = {
                    which: np.array([1e6 * block(one, calls, device) / calls for _ in range(ROUNDS + 1)][1:])
                    for which, one in _passes(attend, device).items()
                }
        except Exception as error:  # of another library
            failures.append(f"Not measured: {name} ({type(error).__name__}: {one_line(error)}).")
    report.add(_host_table(found, failures))


def _host_table(found: Mapping[str, Mapping[str, Times]], failures: list[str]) -> Table:
    rows = [
        [
            Cell(name, f"`{name}`"),
            *(quartiles(times, ".0f") for times in passes.values()),
            quartiles(passes[_BOTH] / found[PLAIN][_BOTH], ".2f") if PLAIN in found else None,
        ]
        for name, passes in found.items()
    ]
    return Table(["attention", _FORWARD, _BOTH, _ALONE, f"over {PLAIN}"], rows, " ".join(failures))


def _called_eagerly(device: torch.device) -> tuple[dict[str, Attention], list[str]]:
    """Return the attentions to call, by name, and a line for each that is not installed."""

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def drop_in(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashpoint.attention(q, k, v, is_causal=True, variant="flash_fixed")

    on_gpu = device.type == "cuda"
    ours = {name: drop_in if name == "flash_fixed" else plain for name in (HOST if on_gpu else ON_A_CPU)}
    others, missing = installed() if on_gpu else ({}, [])
    return ours | others, missing


def _passes(attend: Attention, device: torch.device) -> dict[str, Callable[[], object]]:
    q, k, v, grad_out = (torch.randn(_SMALL, device=device).bfloat16() for _ in range(4))
    given = [x.requires_grad_() for x in (q, k, v)]

    def both() -> None:
        torch.autograd.grad(attend(q, k, v), given, grad_out)

    def alone() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            both()

    return {_FORWARD: lambda: attend(q, k, v), _BOTH: both, _ALONE: alone}


def _table(mode: str, measured: Mapping[str, Measured], failures: list[str]) -> Table:
    rows = [
        [
            mode,
            Cell(name, f"`{name}`"),
            quartiles(1000 * loop.times, ".2f"),
            quartiles(loop.times / loop.plain, ".3f"),
            Cell(loop.ready.reserved / 2**30, f"{loop.ready.reserved / 2**30:.1f}") if loop.ready.reserved else None,
        ]
        for name, loop in measured.items()
    ]
    return Table(["mode", "attention", "ms a step", f"over {PLAIN}", "memory, GiB"], rows, " ".join(failures))


def _loop(name: str, mode: str, device: torch.device) -> tuple[nn.Module, Step]:
    from transformers import GPT2Config, GPT2LMHeadModel

    from flashpoint.huggingface import implementation

    front, _, backend = name.partition(":")
    tiny = {} if device.type == "cuda" else _TINY
    config = GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False, **tiny)
    torch.manual_seed(0)
    attention = implementation(front) if front == "flash_fixed" else _OF_TRANSFORMERS.get(front, "sdpa")
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
