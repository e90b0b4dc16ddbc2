"""Tokens a second of whole optimiser steps, this package's beside a loop as nanoGPT has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.kernel_groups import GROUPS
from benchmarks.loops import flashpoint_loop, nanogpt_loop
from benchmarks.rounds import ROUNDS, quartiles
from benchmarks.shapes import TrainingShape, configured
from benchmarks.shown import Report, heading
from benchmarks.workers import Measured, taking_turns
from flashpoint.cli.table import Cell, Table
from flashpoint.errors import UserError
from flashpoint.lab.config import Config

SHAPES = {"cuda": ["ignite", "gpt2_124m:32"], "cpu": ["laptop"]}
ATTENTIONS = [
    "flash_bf16",
    "flash_exact_rowsum",
    "flash_unrounded_out",
    "flash_fixed",
    "sdpa",
    "sdpa_cudnn,train.deterministic=false",
    "flex",
    "fa4",
    "flash_bf16,train.deterministic=false",
    "flash_bf16,train.cuda_graph=false",
]
PLAIN = "nanogpt"
"""The loop that all are compared with."""


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
        UserError: a shape or attention is none.
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
        try:
            builders = {name: partial(flashpoint_loop, config, device) for name, config in of_attention.items()}
            plain = partial(nanogpt_loop, next(iter(of_attention.values())), device)
            measured, profiled, failures = taking_turns(PLAIN, plain, builders, device, seconds, profiles)
        except UserError as error:  # of the plain loop, or of one whose process ended in its turn
            measured, profiled, failures = {}, {}, [f"Not measured at {shape.name}: {error}."]
        rates.add(rates_table(shape.name, next(iter(of_attention.values())), measured, failures))
        if profiles:
            groups.add(profile_table(shape.name, profiled))


def rates_table(shape: str, config: Config, measured: Mapping[str, Measured], failures: Sequence[str]) -> Table:
    """Return the table of one shape.

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


def profile_table(place: str, profiled: Mapping[str, Mapping[str, float]], place_is: str = "shape") -> Table:
    """Return the table of one shape or mode.

    Args:
        profiled: milliseconds by group, by loop.
        place_is: the title of ``place``'s column.
    """

    def shown(milliseconds: float) -> Cell:
        return Cell(float(f"{milliseconds:.6g}"), f"{milliseconds:.2f}")

    rows = [
        [place, Cell(name, f"`{name}`"), *(shown(groups[group]) for group in GROUPS), shown(sum(groups.values()))]
        for name, groups in profiled.items()
    ]
    return Table([place_is, "loop", *GROUPS, "sum"], rows)
