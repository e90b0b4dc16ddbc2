"""Tokens a second of whole optimiser steps, this package's beside a loop as nanoGPT has it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.kernel_groups import GROUPS
from benchmarks.loops import flashpoint_loop, nanogpt_loop
from benchmarks.rounds import ROUNDS, Times, interleaved, quartiles
from benchmarks.shapes import TrainingShape, configured
from benchmarks.shown import Report, heading
from benchmarks.workers import Ready, Worker, those_ready
from flashpoint.cli.table import Cell, Table
from flashpoint.lab.config import Config

SHAPES = {"cuda": ["ignite", "gpt2_124m:32"], "cpu": ["laptop"]}
ATTENTIONS = [
    "flash_bf16",
    "flash_exact_rowsum",
    "flash_unrounded_out",
    "sdpa",
    "flash_bf16,train.deterministic=false",
    "flash_bf16,train.cuda_graph=false",
]
PLAIN = "nanogpt"
"""The loop that all are compared with."""
_CONTEXT_BYTES = 600 * 2**20
"""What a process takes of a GPU's memory before it has a tensor."""
_MORE_THAN_PLAIN = 1.25
"""Memory of a loop at most, over the plain one's: the graph of a step, copies of the weights."""


@dataclass(frozen=True)
class Measured:
    """Times of one loop, and of the plain loop in the same rounds."""

    times: Times
    plain: Times
    ready: Ready


def measure(
    device: torch.device,
    shapes: Sequence[TrainingShape],
    attentions: Sequence[str],
    seconds: float,
    out: Path | None,
    profiles: bool,
) -> None:
    """Print and write the table of rates, and with ``profiles`` that of kernel times.

    Args:
        attentions: ``NAME[,KEY=VALUE…]`` each.
        seconds: of each loop at each shape.
        out: folder for the files.

    Raises:
        UserError: a shape or attention is none, or the plain loop cannot run.
    """
    what = (
        f"whole optimiser steps on random tokens in {ROUNDS} rounds, medians (quartiles); `{PLAIN}` is a plain loop "
        "with PyTorch's attention, the others are flashpoint's step with the attention of that name"
    )
    rates = Report("training", heading(device, what), out)
    groups = Report("training-profile", heading(device, "milliseconds of one step by kind of kernel"), out)
    configs = {
        shape: {attention: configured(shape, attention) for attention in attentions} for shape in shapes
    }  # all of them before the first is measured: an unknown name costs no time
    for shape, of_attention in configs.items():
        measured, profiled, failures = _taking_turns(of_attention, device, seconds, profiles)
        rates.add(rates_table(shape.name, next(iter(of_attention.values())), measured, failures))
        if profiles:
            groups.add(profile_table(shape.name, profiled))


def rates_table(shape: str, config: Config, measured: Mapping[str, Measured], failures: Sequence[str]) -> Table:
    """Return the table of one shape, the plain loop last.

    Args:
        config: whose batch each step has.
        failures: a line for each loop that was not measured.
    """
    tokens = config.train.batch_size * config.model.context
    rows = []
    for name, of_loop in measured.items():
        reserved = of_loop.ready.reserved
        rows.append(
            [
                shape,
                Cell(name, f"`{name}`"),
                of_loop.ready.parameters,
                tokens,
                quartiles(tokens / of_loop.times, ",.0f"),
                quartiles(1000 * of_loop.times, ".3f"),
                quartiles(of_loop.plain / of_loop.times, ".3f"),
                Cell(reserved / 2**30, f"{reserved / 2**30:.1f}") if reserved else None,
            ]
        )
    columns = ["shape", "loop", "parameters", "tokens a step", "tokens/s", "ms a step"]
    return Table([*columns, f"rate over {PLAIN}'s", "memory, GiB"], rows, " ".join(failures))


def profile_table(shape: str, profiled: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the table of one shape.

    Args:
        profiled: milliseconds by group, by loop.
    """

    def shown(milliseconds: float) -> Cell:
        return Cell(float(f"{milliseconds:.6g}"), f"{milliseconds:.2f}")

    rows = [
        [shape, Cell(name, f"`{name}`"), *(shown(groups[group]) for group in GROUPS), shown(sum(groups.values()))]
        for name, groups in profiled.items()
    ]
    return Table(["shape", "loop", *GROUPS, "sum"], rows)


def _taking_turns(
    configs: Mapping[str, Config], device: torch.device, seconds: float, profiles: bool
) -> tuple[dict[str, Measured], dict[str, dict[str, float]], list[str]]:
    """Return what was measured of each loop, its profile, and a line for each loop that failed.

    As many loops as the memory holds are there at a time, and the plain one is always among them.
    """
    measured: dict[str, Measured] = {}
    profiled: dict[str, dict[str, float]] = {}
    failures: list[str] = []
    with Worker(PLAIN, partial(nanogpt_loop, next(iter(configs.values())), device), device) as plain:
        plain_ready = plain.ready()
        at_a_time = _places(device, plain_ready, len(configs))
        names = list(configs)
        for first in range(0, len(names), at_a_time):
            with contextlib.ExitStack() as held:
                some = names[first : first + at_a_time]
                started = [
                    held.enter_context(Worker(name, partial(flashpoint_loop, configs[name], device), device))
                    for name in some
                ]  # they compile side by side
                ready = those_ready(started, failures)
                loops = {PLAIN: plain, **{worker.name: worker for worker in ready}}
                times = interleaved({name: worker.seconds for name, worker in loops.items()}, seconds)
                for worker, state in ready.items():
                    measured[worker.name] = Measured(times[worker.name], times[PLAIN], state)
                    if profiles:
                        profiled[worker.name] = worker.profile()
        measured[PLAIN] = Measured(times[PLAIN], times[PLAIN], plain_ready)
        if profiles:
            profiled[PLAIN] = plain.profile()  # last: a profiler may slow what follows
    return measured, profiled, failures


def _places(device: torch.device, plain: Ready, wanted: int) -> int:
    """Return how many loops to hold beside the plain one."""
    if device.type != "cuda":
        return wanted
    free = torch.cuda.mem_get_info()[0] - plain.reserved  # which it gave back, and takes again for its turn
    return max(1, min(wanted, int(free / (plain.reserved * _MORE_THAN_PLAIN + _CONTEXT_BYTES))))
