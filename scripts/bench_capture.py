"""What watching costs a step: GPT-2 of Transformers in the shape of the default experiment, or any other.

    python scripts/bench_capture.py                                            # 6 × 256, T 2048
    python scripts/bench_capture.py layers=12 heads=12 width=768 context=1024 batch=32 lr=6e-4
    python scripts/bench_capture.py --blocks 2 --block 20 layers=2 heads=2 width=32 context=16 batch=4 \\
        vocabulary=300 text=FILE                                               # a look on a CPU

Steps are timed in blocks: some without watching, as many with it at its defaults, and again as many without. A block
has as many steps as lie between two observations of the attention, so that each watched one holds one observation.
Settings are those of examples/explode_gpt2.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import flashpoint
from benchmarks.rounds import block, quartiles
from benchmarks.shown import heading
from examples.explode_gpt2 import SETTINGS, Loop
from flashpoint.cli.table import Table, show


class Unwatched:
    """Takes what a watched loop tells, and does nothing."""

    def step(self, *_: Any) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=4, help="timed of each kind, after one that is not")
    parser.add_argument("--block", type=int, default=500, help="steps of a block, and between observations")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    loop = Loop({**SETTINGS, **dict(word.split("=", 1) for word in arguments.settings)}, "sdpa")
    device = torch.device(loop.device)

    def timed(watched: Any) -> list[float]:
        blocks = range(1 + arguments.blocks)
        seconds = [block(lambda: loop.step(watched), arguments.block, device) for _ in blocks]
        return [1000 * of_block / arguments.block for of_block in seconds[1:]]

    before = timed(Unwatched())
    with (
        tempfile.TemporaryDirectory() as folder,
        flashpoint.watch(loop.model, runs_dir=folder, interval=arguments.block) as watched,
    ):
        during = timed(watched)
    after = timed(Unwatched())
    plain = float(np.median(before + after))
    rows: list[list[object]] = []
    for name, some in (("unwatched, before", before), ("watched", during), ("unwatched, after", after)):
        rows.append([name, len(some), quartiles(some, ".3f"), f"{float(np.median(some)) / plain - 1:+.1%}"])
    parameters = sum(parameter.numel() for parameter in loop.model.parameters())
    shape = ", ".join(f"{name} {loop.settings[name]}" for name in ("layers", "width", "context", "batch"))
    what = f"{parameters:,} parameters, {shape}; blocks of {arguments.block:,} steps"
    columns = ("steps", "blocks", "ms a step, median (quartiles)", "against the unwatched median")
    show(Table(columns, rows), "markdown", heading(device, what))


if __name__ == "__main__":
    main()
