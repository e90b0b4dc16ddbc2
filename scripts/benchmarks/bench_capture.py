"""What watching costs a step: GPT-2 of Transformers in the shape of experiment=ignite, or any other.

    python scripts/benchmarks/bench_capture.py                                            # 6 × 256, T 2048
    python scripts/benchmarks/bench_capture.py --rounds 3 layers=12 heads=12 width=768 context=1024 vocabulary=50257
    python scripts/benchmarks/bench_capture.py --rounds 2 --interval 20 --turns 2 layers=2 heads=2 width=32 \\
        context=16 batch=4 vocabulary=300 text=FILE                                       # a look on a CPU
    python scripts/benchmarks/bench_capture.py --rounds 4 --interval 20 --logits-interval 5   # and largest scores

One model trains, unwatched and watched at the watch's defaults in turns. A round is as many watched steps as lie
between two observations of the attention, and as many unwatched ones: its watched steps hold one observation. A turn is
a block of each. Which comes first changes from turn to turn, so that a drift of the machine falls on both alike. The
two are compared within a round. A second table has by how much longer the watched block of a turn took: of turns with
the observation, of others with largest scores, of others with norms of W_Q and W_K, and of the rest. The observation's
turn has norms and scores, too, if the interval is a multiple of theirs. Settings are those of examples/explode_gpt2.py,
but for the learning rate, with which no warning is to come: a warning costs once.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import flashpoint
from benchmarks.rounds import Times, block, quartiles
from benchmarks.shown import heading
from examples.explode_gpt2 import SETTINGS, Loop
from flashpoint.cli.table import Table, show
from flashpoint.lab.analysis.intervals import mean_interval


class Unwatched:
    """Takes what a watched loop tells, and does nothing."""

    def step(self, *_: Any) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="that are timed, after one that is not")
    parser.add_argument("--interval", type=int, default=500, help="steps between observations")
    parser.add_argument("--turns", type=int, default=20, help="of a round; the interval is a multiple of them")
    parser.add_argument("--logits-interval", type=int, help="steps between largest scores; without it none")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    steps, rest = divmod(arguments.interval, arguments.turns)
    if rest or not steps:
        parser.error(f"--turns {arguments.turns}: give a divisor of the interval, {arguments.interval}")
    given = dict(word.split("=", 1) for word in arguments.settings)
    loop = Loop({**SETTINGS, "lr": "1e-5", **given}, "sdpa")
    device = torch.device(loop.device)
    with (
        tempfile.TemporaryDirectory() as folder,
        flashpoint.watch(
            loop.model, runs_dir=folder, interval=arguments.interval, logits_interval=arguments.logits_interval
        ) as watched,
    ):
        takers: dict[str, Any] = {"unwatched": Unwatched(), "watched": watched}
        seconds = {name: np.zeros((1 + arguments.rounds, arguments.turns)) for name in takers}
        for place in np.ndindex(1 + arguments.rounds, arguments.turns):
            for name in list(takers)[:: -1 if place[1] % 2 else 1]:
                seconds[name][place] = block(partial(loop.step, takers[name]), steps, device)
    times = {name: 1000 * some[1:].sum(1) / arguments.interval for name, some in seconds.items()}
    more, half = mean_interval(times["watched"] / times["unwatched"] - 1)
    rows = [[name, len(some), quartiles(some, ".3f")] for name, some in times.items()]
    parameters = sum(parameter.numel() for parameter in loop.model.parameters())
    shape = ", ".join(f"{name} {loop.settings[name]}" for name in ("layers", "width", "context", "batch"))
    what = f"{parameters:,} parameters, {shape}; rounds of {arguments.interval:,} steps of each, {steps:,} a turn"
    columns = ("steps", "rounds", "ms a step, median (quartiles)")
    interval = "" if half is None else f", 95 % interval {more - half:+.1%} to {more + half:+.1%}"
    note = f"Watched against unwatched, within a round: {more:+.1%} (mean{interval})."
    show(
        [Table(columns, rows, note=note), phase_table(seconds, steps, arguments.logits_interval)],
        "markdown",
        heading(device, what),
    )


def phase_table(seconds: dict[str, Times], steps: int, logits_interval: int | None) -> Table:
    """Return what the difference of blocks of so many steps consists of.

    Args:
        seconds: of each block, by round and turn; the first round does not count.
        logits_interval: steps between largest scores; None is without them.
    """
    longer, unwatched = 1000 * (seconds["watched"] - seconds["unwatched"])[1:], 1000 * seconds["unwatched"][1:]
    ends = (1 + np.arange(seconds["watched"].size)).reshape(seconds["watched"].shape)[1:] * steps
    norms = inspect.signature(flashpoint.watch).parameters["weights_interval"].default
    observed = np.zeros(ends.shape, bool)
    observed[:, -1] = True
    scored, weighed = (
        (ends // every > (ends - steps) // every) & ~observed if every else np.zeros_like(observed)
        for every in (logits_interval, norms)
    )
    rows = []
    for name, turns in {
        "the observation": observed, "largest scores": scored, "norms of W_Q and W_K": weighed & ~scored,
        "neither": ~(observed | scored | weighed),
    }.items():  # fmt: skip
        if turns.any():
            mean, half = mean_interval(longer[turns])
            interval = "" if half is None else f" ({mean - half:+.2f} to {mean + half:+.2f})"
            share = longer[turns].sum() / unwatched.sum()
            rows.append([name, int(turns.sum()), f"{mean:+.2f}{interval}", f"{share:+.2%}"])
    columns = ("turns with", "turns", "ms longer, mean (95 % interval)", "of all unwatched time")
    return Table(columns, rows, note=f"A turn: {steps:,} watched steps against as many unwatched ones.")


if __name__ == "__main__":
    main()
