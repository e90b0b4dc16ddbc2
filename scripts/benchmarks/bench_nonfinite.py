"""What the look for the first NaN costs a step that is not observed: nanoGPT's loop.

    python scripts/benchmarks/bench_nonfinite.py                        # experiment=laptop, on a CPU or a GPU
    python scripts/benchmarks/bench_nonfinite.py --shape gpt2_124m      # the shape of another experiment

One model trains as nanoGPT does, compiled on a GPU. Blocks of steps with and without the look take turns. The look
takes the largest magnitudes of weights and gradients before each step of the optimizer, and reads them every 10 steps,
as in a loop that :func:`flashpoint.watch` watches.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.loops import nanogpt_loop
from benchmarks.nanogpt import CausalSelfAttention
from benchmarks.rounds import block, interleaved, quartiles
from benchmarks.shapes import composed
from benchmarks.shown import heading
from flashpoint.cli.table import Table, show
from flashpoint.lab.analysis.intervals import mean_interval
from flashpoint.runs.metric_table import W_K_NORM, W_Q_NORM
from flashpoint.watching.arrivals import Arrivals
from flashpoint.watching.events import Dispatcher, ReadDue, StepEnded
from flashpoint.watching.first_nonfinite import FirstNonfinite
from flashpoint.watching.latest_batches import LatestBatches
from flashpoint.watching.notices import Notices
from flashpoint.watching.projections import ByMetric, Projection
from flashpoint.watching.watched_run import WatchedRun

_READ = 10
"""Steps between reads."""


class Look:
    """Looks before each step of any optimizer, while it is on."""

    def __init__(self, model: nn.Module) -> None:
        notices = Notices("bench", 0)
        dispatcher = Dispatcher(notices)
        arrivals = Arrivals(dispatcher.publish)
        run = cast(WatchedRun, None)  # nothing is told
        found = _projections(model)
        dispatcher.add(
            FirstNonfinite(
                model, lambda: found, lambda some: [one.grad for one in some], (), 50, LatestBatches(0), run, arrivals,
                notices,
            ),
            arrivals,
        )  # fmt: skip
        self._publish, self._step, self.on = dispatcher.publish, 0, False
        register_optimizer_step_pre_hook(self._take)

    def _take(self, *_: Any) -> None:
        if self.on:
            self._publish(StepEnded(self._step))
            self._step += 1
            if self._step % _READ == 0:
                self._publish(ReadDue())


def _projections(model: nn.Module) -> ByMetric:
    """Return W_Q and W_K as a watch finds them in the first step."""
    found: ByMetric = {W_Q_NORM.name: [], W_K_NORM.name: []}
    for module in model.modules():
        if isinstance(module, CausalSelfAttention):
            width = module.c_attn.in_features
            weight = cast(nn.Parameter, module.c_attn.weight)
            features = torch.arange(2 * width, device=weight.device).view(2, module.n_head, -1)
            for some, of_heads in zip(found.values(), features, strict=True):
                some.append((Projection(weight, (1,), of_heads),))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="laptop", help="an experiment")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each of the two")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, step = nanogpt_loop(composed([f"experiment={arguments.shape}"]), device)
    look = Look(model)

    def timed(on: bool, steps: int) -> float:
        look.on = on
        return block(step, steps, device)

    for on in (False, True):
        timed(on, 2 * _READ)
    candidates = {"without": partial(timed, False), "with": partial(timed, True)}
    times = interleaved(candidates, arguments.seconds)
    more, half = mean_interval(times["with"] / times["without"] - 1)
    interval = "" if half is None else f", 95 % interval {more - half:+.2%} to {more + half:+.2%}"
    parameters = sum(one.numel() for one in model.parameters())
    rows = [[name, len(some), quartiles(1000 * some, ".3f")] for name, some in times.items()]
    note = f"With the look against without, within a round: {more:+.2%} (mean{interval})."
    what = f"{arguments.shape}, {parameters:,} parameters in {len(list(model.parameters())):,} tensors"
    show(Table(("the look", "rounds", "ms a step, median (quartiles)"), rows, note=note), "markdown",
         heading(device, what))  # fmt: skip


if __name__ == "__main__":
    main()
