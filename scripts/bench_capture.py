"""What watching costs a step: GPT-2 of Transformers in the shape of the default experiment, or any other.

    python scripts/bench_capture.py                                            # 6 × 256, T 2048
    python scripts/bench_capture.py --rounds 3 layers=12 heads=12 width=768 context=1024 vocabulary=50257
    python scripts/bench_capture.py --rounds 2 --block 20 layers=2 heads=2 width=32 context=16 batch=4 \\
        vocabulary=300 text=FILE                                               # a look on a CPU

One model trains in blocks of steps: one block unwatched, one watched at the watch's defaults, and so on in turns. A
round is one of each. The two are compared within a round, so that a drift of the machine falls on both. A block has as
many steps as lie between two observations of the attention: each watched one holds one observation. Settings are those
of examples/explode_gpt2.py, but for the learning rate, with which no warning is to come: a warning costs once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import flashpoint
from benchmarks.rounds import block, quartiles
from benchmarks.shown import heading
from examples.explode_gpt2 import SETTINGS, Loop
from flashpoint.analysis.intervals import mean_interval
from flashpoint.cli.table import Table, show


class Unwatched:
    """Takes what a watched loop tells, and does nothing."""

    def step(self, *_: Any) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="that are timed, after one that is not")
    parser.add_argument("--block", type=int, default=500, help="steps of a block, and between observations")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    given = dict(word.split("=", 1) for word in arguments.settings)
    loop = Loop({**SETTINGS, "lr": "1e-5", **given}, "sdpa")
    device = torch.device(loop.device)
    with (
        tempfile.TemporaryDirectory() as folder,
        flashpoint.watch(loop.model, runs_dir=folder, interval=arguments.block) as watched,
    ):
        takers: dict[str, Any] = {"unwatched": Unwatched(), "watched": watched}
        seconds: dict[str, list[float]] = {name: [] for name in takers}
        for _ in range(1 + arguments.rounds):
            for name, taker in takers.items():
                seconds[name].append(block(partial(loop.step, taker), arguments.block, device))
    times = {name: 1000 * np.array(some[1:]) / arguments.block for name, some in seconds.items()}
    more, half = mean_interval(times["watched"] / times["unwatched"] - 1)
    rows = [[name, len(some), quartiles(some, ".3f")] for name, some in times.items()]
    parameters = sum(parameter.numel() for parameter in loop.model.parameters())
    shape = ", ".join(f"{name} {loop.settings[name]}" for name in ("layers", "width", "context", "batch"))
    what = f"{parameters:,} parameters, {shape}; blocks of {arguments.block:,} steps, in turns"
    columns = ("steps", "blocks", "ms a step, median (quartiles)")
    interval = "" if half is None else f", 95 % interval {more - half:+.1%} to {more + half:+.1%}"
    note = f"Watched against unwatched, within a round: {more:+.1%} (mean{interval})."
    show(Table(columns, rows, note=note), "markdown", heading(device, what))


if __name__ == "__main__":
    main()
