"""A quantity by layer: ``python scripts/by_layer.py sensitivity RUN [RUN …]``, or ``by_layer.py METRIC RUN [RUN …]``

A row for each run, in bold the layer whose W_Q is largest at the onset, or at the end. ``sensitivity`` is
N·|dO_i|·|O_i| in nats of the loss summed over the step's N tokens, root mean square over the tokens, heads and observed
steps of a layer: how much the loss depends on its output. By Fisher's identity (src/flashpoint/probes/targets.py) the
bias of δ over the square of its noise is about that, in the unit of ``attn.delta_error.size``. It is taken from the
recorded errors of δ, so a run without any has none. Of any metric of heads (``input_similarity``, ``score_mean``, …) it
is the mean over heads and steps.

``--since`` and ``--until`` choose the steps (default: all up to 1,000 before the onset), ``--last N`` the last of them.

``--verdicts FOLDER`` takes the verdict and the bold layer from the run of the same name there, for runs that were
observed closely and stopped early. Of several explosions a last line says in how many the largest is of the layer that
exploded, with its 95 % Clopper–Pearson interval, and which layers these were.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import script_errors
from flashpoint.report.bias import Relative, Sums, Window
from flashpoint.report.intervals import clopper_pearson
from flashpoint.report.provenance import provenance
from flashpoint.report.series import RecordedRun

SENSITIVITY = "sensitivity"


def table(quantity: str, runs: Sequence[RecordedRun], verdicts: Sequence[RecordedRun], window: Window) -> Iterator[str]:
    """Markdown, a row a run with its verdict and hottest layer from ``verdicts``, then a line on the explosions."""
    of_layers, form = (_sensitivities, ".1f") if quantity == SENSITIVITY else (partial(_means, quantity), ".3g")
    found = [of_layers(run, window) for run in runs]
    count = max(map(len, found))
    yield f"| run | verdict | {' | '.join(f'layer {layer + 1}' for layer in range(count))} |"
    yield "|---|---|" + "---|" * count
    for run, verdict, values in zip(runs, verdicts, found, strict=True):
        cells = ["" if np.isnan(value) else f"{value:{form}}" for value in values] + [""] * (count - len(values))
        if cells[verdict.hottest_layer - 1]:
            cells[verdict.hottest_layer - 1] = f"**{cells[verdict.hottest_layer - 1]}**"
        yield f"| `{run.name}` | {verdict.verdict} | {' | '.join(cells)} |"
    exploding = [
        (verdict.hottest_layer, 1 + int(np.nanargmax(values)))
        for verdict, values in zip(verdicts, found, strict=True)
        if verdict.onset is not None and not np.isnan(values).all()
    ]
    if len(exploding) > 1:
        right, n = sum(layer == largest for layer, largest in exploding), len(exploding)
        low, high = clopper_pearson(right, n)
        layers = sorted(Counter(layer for layer, _ in exploding).items())
        told = ", ".join(f"layer {layer} in {times}" for layer, times in layers)
        yield ""
        yield f"largest in the layer that explodes: {right} of {n} ({100 * low:.0f} to {100 * high:.0f} %); {told}"


def _sensitivities(run: RecordedRun, window: Window) -> NDArray[np.float64]:
    """[L]; nan where δ takes no part of O's error."""
    sums, relative = Sums.of(run, window), Relative.of(run, "delta_error", window)
    layers = range(1, len(sums.by_step) + 1)
    return np.array([sums.sensitivity(relative, at) for at in layers])


def _means(metric: str, run: RecordedRun, window: Window) -> NDArray[np.float64]:
    """[L]."""
    steps, values = run.measured_by_head(metric)
    means: NDArray[np.float64] = values[..., window.of(run, steps)].mean((1, 2))
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quantity", help="sensitivity, or a metric of heads")
    parser.add_argument("runs", nargs="+", metavar="RUN")
    Window.add_options(parser)
    parser.add_argument("--verdicts", metavar="FOLDER", type=Path, help="of runs with the same names")
    arguments = parser.parse_args()
    with script_errors():
        runs = [RecordedRun.open(name) for name in arguments.runs]
        verdicts = runs
        if arguments.verdicts:
            verdicts = [RecordedRun.open(arguments.verdicts / run.name) for run in runs]
        print(f"{provenance(runs)}\n")
        print("\n".join(table(arguments.quantity, runs, verdicts, Window.of_options(arguments))))


if __name__ == "__main__":
    main()
