"""Milliseconds of a user's step: Transformers' GPT-2 with PyTorch's attention, and with what replaces it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashpoint
from benchmarks.loops import LEARNING_RATE, Step
from benchmarks.rounds import Times, interleaved, quartiles
from benchmarks.shown import Report, heading
from benchmarks.workers import Worker, those_ready
from flashpoint.cli.table import Cell, Table

MODES = ("compiled", "eager")
LOOPS = ("sdpa", "sdpa:flash", "sdpa:cudnn", "stabilize", "stabilize:cudnn", "flash_fixed")
"""``sdpa:BACKEND`` is PyTorch's attention by that backend alone, ``stabilize`` its calls with FP16 inside."""
PLAIN = "sdpa"
_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
_SEQUENCES = 8
_TOKENS = {"cuda": 1024, "cpu": 64}
_TINY: dict[str, Any] = {"n_layer": 2, "n_embd": 128, "n_head": 2, "vocab_size": 512}
"""On a CPU, to see that it runs."""


def measure(device: torch.device, seconds: float, out: Path | None) -> None:
    """Print and write the table.

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

    return model, _held(step, model, stabilized=front == "stabilize", backend=backend)


def _held(step: Step, model: nn.Module, stabilized: bool, backend: str) -> Step:
    """Return the step as it is in a loop that stands in these contexts, without their price at each step."""

    @contextlib.contextmanager
    def contexts() -> Iterator[None]:
        with contextlib.ExitStack() as entered:
            if backend:
                entered.enter_context(sdpa_kernel(_BACKENDS[backend]))
            if stabilized:
                entered.enter_context(flashpoint.stabilize(model))
            yield

    held = contexts()
    held.__enter__()  # until the process ends

    def inside(_held: object = held) -> None:
        step()

    return inside
